"""Models to train, each made from its own seed: the global random numbers are left alone."""

from fadamgc.models.mlp import mlp

__all__ = ["mlp"]
