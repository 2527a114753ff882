"""Models to train, each made from its own seed: the global random numbers are left alone."""

from fadamgc.models.cnn import cnn
from fadamgc.models.mlp import mlp
from fadamgc.models.resnet import resnet18

__all__ = ["cnn", "mlp", "resnet18"]
