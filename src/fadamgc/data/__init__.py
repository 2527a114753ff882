"""Where data come from (one module a source) and how they are split over clients."""

from fadamgc.data.partition import Partition, dirichlet, iid, natural, shards

__all__ = ["Partition", "dirichlet", "iid", "natural", "shards"]
