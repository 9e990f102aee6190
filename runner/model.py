"""Networks and their options; their layers are in `models/`, which knows nothing of this project."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from runner.config import ConfigError, check, check_choice, check_range


@dataclass
class Model:
    """A network's options; `build` makes the network.

    Args:
        checkpoint_activations: keep only the activations at the borders of the network's stages, and compute the
            others again in the backward pass (Chen et al., 2016): memory for time, the same numbers.
        weights: a file of weights to start from (`.safetensors`, or a `state_dict` in `.pt`/`.pth`); null: fresh ones.
    """

    checkpoint_activations: bool = False
    weights: str | None = None

    def build(self, shape: tuple[int, int, int], num_classes: int) -> torch.nn.Module:
        """The network for inputs of `shape` = (channels, height, width), with weights from torch's global generator."""
        model = self.network(shape, num_classes)
        if self.weights is not None:
            _load_weights(model, self.weights)
        return model

    def network(self, shape: tuple[int, int, int], num_classes: int) -> torch.nn.Module:
        raise NotImplementedError
