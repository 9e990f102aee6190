"""Networks: layers and nothing else. They know no device, rank, precision or config."""

from models.convnet import ConvNet
from models.resnet import ResNet

__all__ = ["ConvNet", "ResNet"]
