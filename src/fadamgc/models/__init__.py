"""Models to train. Their initial weights depend on a seed; torch's global random numbers do not change."""

from fadamgc.models.cnn import cnn, cnn1d, convnet
from fadamgc.models.inputs import ImageInput
from fadamgc.models.mlp import mlp
from fadamgc.models.resnet import resnet8, resnet18

__all__ = ["ImageInput", "cnn", "cnn1d", "convnet", "mlp", "resnet8", "resnet18"]
