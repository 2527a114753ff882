"""Models to train, each made from its own seed: the global random numbers are left alone."""

from fadamgc.models.cnn import cnn, cnn1d, convnet
from fadamgc.models.inputs import PictureInput
from fadamgc.models.mlp import mlp
from fadamgc.models.resnet import resnet8, resnet18

__all__ = ["PictureInput", "cnn", "cnn1d", "convnet", "mlp", "resnet8", "resnet18"]
