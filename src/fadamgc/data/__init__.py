"""Data sets (one module per source) and partitions of a data set over clients."""

from fadamgc.data.partition import Partition, dirichlet, iid, natural, shards

__all__ = ["Partition", "dirichlet", "iid", "natural", "shards"]
