"""Options of the residual networks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runner.config.errors import check, check_choice
from runner.model.base import Model


@dataclass
class ResNet(Model):
    """A residual network with torchvision's parameter names (`models.resnet.ResNet`)."""

    depth: int = 50
    stem: str = "imagenet"
    norm: str = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        depths = (18, 34, 50, 101, 152)
        why = f"it must be one of {', '.join(map(str, depths))}"
        check(self.depth in depths, "depth", self.depth, why, "for example model.depth=50")
        check_choice(self, "stem", ("imagenet", "cifar"))
        check_choice(self, "norm", ("batch", "group"))

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from models import resnet

        options = (self.stem, self.norm, self.checkpoint_activations)
        return resnet.ResNet(self.depth, shape[0], num_classes, *options)
