"""Networks and their options; their layers are in `models/`, which knows nothing of this project."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from runner.config.errors import check
from runner.model.weights import SAVE_WEIGHTS, load_weights


@dataclass
class Model(ABC):
    """A network's options; `build` makes the network.

    Args:
        checkpoint_activations: keep only the activations at the borders of the network's stages, and compute the
            others again in the backward pass (Chen et al., 2016): memory for time, the same numbers.
        weights: a file of weights to start from (`.safetensors`, or a `state_dict` in `.pt`/`.pth`); null: fresh ones.
        reset_head: leave out the last layer of `weights`, and start that one fresh: for other classes than theirs.
    """

    checkpoint_activations: bool = False
    weights: str | None = None
    reset_head: bool = False

    may_change_on_resume: ClassVar[tuple[str, ...]] = ("checkpoint_activations", "weights", "reset_head")
    """Options that may differ on a resume: they change how the network computes, or where it once started."""

    num_dims: ClassVar[int | None] = 3
    """Of one input: images have channels, height and width; None: any, which the network flattens."""

    def __post_init__(self) -> None:
        if self.weights is None:
            check(not self.reset_head, "reset_head", True, "without weights every layer is fresh", "name model.weights")
            return
        suffixes, path = (".safetensors", ".pt", ".pth"), Path(self.weights).expanduser()
        check(path.suffix in suffixes, "weights", self.weights, f"it is none of {', '.join(suffixes)}", SAVE_WEIGHTS)
        remedy = "give the path of a file, or null for fresh weights"
        check(path.is_file(), "weights", self.weights, f"there is no such file in {path.parent.absolute()}", remedy)

    def build(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """The network for inputs of `shape`, of images (channels, height, width); weights from the global generator.

        Raises:
            ConfigError: when the network cannot take such inputs, or its weights are not this network's.
        """
        model = self.network(shape, num_classes)
        if self.weights is not None:
            load_weights(model, self.weights, self.reset_head)
        return model

    @abstractmethod
    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """The network with fresh weights.

        One that can be split into stages has `blocks()`: (name, module) in the order of the forward pass, the last of
        them the head.
        """
