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
        known = self.names()
        why = "the library has no network of this name;"
        check(self.name in known, "name", self.name, why, "" if self.name in known else did_you_mean(self.name, known))
        try:
            model = self.create(shape, num_classes)
        except (AssertionError, TypeError, ValueError) as error:
            raise self._refusal(shape, error) from None
        self._check_outputs(model, shape, num_classes)
        return model

    def _check_outputs(self, model: torch.nn.Module, shape: tuple[int, ...], num_classes: int) -> None:
        inputs = torch.zeros(1, *shape, device=next(model.parameters()).device)
        try:
            with torch.no_grad():
                outputs = model.eval()(inputs)
        except (AssertionError, RuntimeError, ValueError) as error:
            raise self._refusal(shape, error) from None
        model.train()
        right = isinstance(outputs, torch.Tensor) and outputs.shape == (1, num_classes)
        why = f"it does not return one output for each of the {num_classes} classes"
        check(right, "name", self.name, why, "choose a network for classification")

    def _refusal(self, shape: tuple[int, ...], error: Exception) -> ConfigError:
        sides, said = "×".join(map(str, shape)), str(error).split("\n")[0]
        remedy = "larger images (data.size, if the data set has it), other model.options, or another model.name"
        return ConfigError("name", self.name, f"it cannot be built for images of {sides} ({said})", remedy)

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Return the names of the library's classification networks."""

    @abstractmethod
    def create(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """Return the network `name` with random weights; nothing is downloaded.

        Raises `ConfigError` for an unknown option, and `AssertionError`, `TypeError` or `ValueError` if the library
        refuses.
        """


@dataclass
class Torchvision(NamedModel):
    """A classification network of torchvision, without auxiliary classifiers (`models.torchvision_network`).

    The numbers of classes and input channels, and the image size of vision transformers, are taken from the data.
    """

    def names(self) -> Iterable[str]:
        from models import torchvision_network

        return torchvision_network.names()

    def create(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from models import torchvision_blocks, torchvision_network

        given, known = self.options or {}, torchvision_network.options_of(self.name)
        for key, value in given.items():
            has = key in known
            why = f"{self.name} has no such option;"
            check(has, f"options.{key}", ABSENT, why, "" if has else did_you_mean(key, known))
            kinds = (int, float) if known[key] is float else (known[key],)
            right = isinstance(value, kinds) and isinstance(value, bool) == (known[key] is bool)
            why = f"it must be of type {known[key].__name__}"
            check(right, f"options.{key}", value, why, f"see {self.name} in torchvision's documentation")
        model = torchvision_network.create(self.name, shape, num_classes, given)
        if self.checkpoint_activations:
            count = torchvision_blocks.checkpoint_activations(model)
            why = f"{self.name} has no blocks whose activations could be recomputed"
            check(count > 0, "checkpoint_activations", True, why, "model.checkpoint_activations=false")
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

        options = self.options or {}
        try:
            return timm.create_model(self.name, pretrained=False, num_classes=num_classes, in_chans=shape[0], **options)
        except (AttributeError, LookupError, OSError, RuntimeError) as error:
            if not options:
                raise
            raise ValueError(f"{type(error).__name__}: {error}") from None  # timm checks few of its arguments
