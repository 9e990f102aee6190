"""torchvision's classification networks by name, for inputs of any number of channels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torchvision import models
from torchvision.models.regnet import BlockParams

from models.torchvision_blocks import with_blocks

_OURS = ("num_classes", "image_size", "init_weights", "aux_logits", "transform_input", "dropout_aux")
"""Arguments that are not options: set by the data, or about initialization, pretraining or auxiliary outputs."""


def names() -> list[str]:
    """Return the names of torchvision's classification networks."""
    return models.list_models(module=models)


def options_of(name: str) -> dict[str, type]:
    """Return a dict from each option of the network `name` to the type of its values: int, float or bool."""
    parameters = inspect.signature(_class_of(name).__init__).parameters.items()
    plain = {key: each.annotation for key, each in parameters if each.annotation in (int, float, bool)}
    return {key: kind for key, kind in plain.items() if key not in _OURS}


def create(name: str, shape: tuple[int, ...], num_classes: int, options: Mapping[str, Any]) -> nn.Module:
    """Return the network `name` with random weights, initialized as in torchvision.

    If the inputs do not have three channels, the first convolution is replaced; its weights are initialized as in
    torchvision's residual networks (He et al., 2015, fan out).
    """
    channels, height, width = shape
    cls, given = _class_of(name), dict(options)
    if cls in (models.GoogLeNet, models.Inception3):
        given |= {"aux_logits": False, "init_weights": True}
    elif cls is models.VisionTransformer:
        given["image_size"] = height
    elif cls is models.MaxVit:
        given["input_size"] = (height, width)
    with patch.object(BlockParams, "from_init_params", _on_cpu(BlockParams.from_init_params)):
        network = models.get_model(name, weights=None, num_classes=num_classes, **given)
    if channels != 3:
        _replace_first_convolution(network, channels)
    return with_blocks(network)


def _class_of(name: str) -> type[nn.Module]:
    return inspect.signature(models.get_model_builder(name)).return_annotation


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that the tensors it creates have the values that it needs, even under `FakeTensorMode`."""

    def call(*arguments: Any, **options: Any) -> Any:
        with torch.device("cpu"), _disable_current_modes():  # FakeTensorMode
            return function(*arguments, **options)

    return call


def _replace_first_convolution(network: nn.Module, channels: int) -> None:
    name, old = next((name, each) for name, each in network.named_modules() if isinstance(each, nn.Conv2d))
    sizes: Any = (old.kernel_size, old.stride, old.padding)
    new = nn.Conv2d(channels, old.out_channels, *sizes, bias=old.bias is not None)
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    if new.bias is not None:
        nn.init.zeros_(new.bias)
    parent, _, own = name.rpartition(".")
    setattr(network.get_submodule(parent), own, new)
