"""Models to train. Their initial weights depend on a seed; torch's global random numbers do not change."""

from fadamgc.models.inputs import ImageInput
from fadamgc.models.networks import cnn, cnn1d, convnet, mlp, resnet8, resnet18

__all__ = ["ImageInput", "cnn", "cnn1d", "convnet", "mlp", "resnet8", "resnet18"]
