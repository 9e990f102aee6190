"""Options of networks that a library builds by name: torchvision's and timm's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from runner.config.errors import ABSENT, ConfigError, check, did_you_mean
from runner.model.base import Model
from runner.system.import_path import is_installed


@dataclass
class NamedModel(Model):
    """The base class for the options of networks that a library builds by `name`, with the arguments `options`."""

    name: str = "resnet18"
    options: dict[str, Any] | None = None

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        names = self.names()
        if self.name not in names:
            raise ConfigError("name", self.name, "there is no network of this name;", did_you_mean(self.name, names))
        try:
            model = self.create(shape, num_classes)
            inputs = torch.zeros(1, *shape, device=next(model.parameters()).device)
            with torch.no_grad():
                outputs = model.eval()(inputs)
        except ConfigError:
            raise
        except Exception as error:  # libraries check few of their arguments
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            why = f"it cannot be built for images of {'×'.join(map(str, shape))} ({said})"
            remedy = "larger images (data.size, if the data set has it), other model.options, or another model.name"
            raise ConfigError("name", self.name, why, remedy) from None
        right = isinstance(outputs, torch.Tensor) and outputs.shape == (1, num_classes)
        why = f"it does not return one output for each of the {num_classes} classes"
        check(right, "name", self.name, why, "choose a network for classification")
        return model.train()

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Return the names of the library's classification networks."""

    @abstractmethod
    def create(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """Return the network `name` with random weights; nothing is downloaded. It may raise any exception."""


@dataclass
class Torchvision(NamedModel):
    """A classification network of torchvision, without auxiliary classifiers (`models.torchvision_networks`).

    The numbers of classes and input channels, and the image size of vision transformers, are taken from the data.
    """

    def names(self) -> Iterable[str]:
        from torchvision import models

        return models.list_models(module=models)

    def create(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from models import torchvision_networks

        model = torchvision_networks.create(self.name, shape, num_classes, self.options or {})
        if self.checkpoint_activations and not torchvision_networks.checkpoint_activations(model):
            why = f"{self.name} has no blocks whose activations could be recomputed"
            raise ConfigError("checkpoint_activations", True, why, "model.checkpoint_activations=false")
        return model


_TAKEN = ("num_classes", "in_chans", "device", "dtype", "checkpoint_path", "cache_dir")
"""Arguments that are set elsewhere or name files; all whose names begin with `pretrained` are refused, too."""


@dataclass
class Timm(NamedModel):
    """A classification network of timm, PyTorch Image Models (https://huggingface.co/docs/timm), with random weights.

    The numbers of classes and input channels are taken from the data; `options` are arguments of `timm.create_model`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check(is_installed("timm"), "_target_", "timm", "it is not installed", "pip install timm")
        if self.checkpoint_activations:
            why = "timm's networks do not say which of their blocks could be recomputed"
            raise ConfigError("checkpoint_activations", True, why, "model.checkpoint_activations=false")
        taken = sorted(key for key in self.options or {} if key in _TAKEN or key.startswith("pretrained"))
        why = "it follows from the data, the device and model.weights"
        check(not taken, f"options.{''.join(taken[:1])}", ABSENT, why, "leave it out; model.weights=FILE loads weights")

    def names(self) -> Iterable[str]:
        import timm  # pyright: ignore[reportMissingImports]

        return timm.list_models()

    def create(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        import timm  # pyright: ignore[reportMissingImports]

        options = {"num_classes": num_classes, "in_chans": shape[0], **(self.options or {})}
        return timm.create_model(self.name, pretrained=False, **options)
