"""Options of the networks in `models/`, and of networks that torchvision and timm build by name."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch

from runner.config.errors import ABSENT, ConfigError, check, did_you_mean, see_comments
from runner.config.limits import PositiveInt, Range, check_range
from runner.model.base import Model
from runner.system import torch_errors
from runner.system.fake_tensors import build_with_values
from runner.system.import_path import is_installed


@dataclass
class ConvNet(Model):
    """Convolutions with max pooling, then two linear layers (`runner.models.convnet.ConvNet`)."""

    channels: tuple[PositiveInt, ...] = (20, 20)
    kernel_size: Annotated[int, Range(least=1, most=31)] = 5
    padding: int = 0
    hidden: PositiveInt = 50
    dropout: Annotated[float, Range(least=0, below=1)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.channels:
            raise ConfigError("channels", [], "there is at least one convolution", see_comments(self))
        # Half a kernel keeps the image size; with more, some outputs would depend on nothing but zeros.
        check_range(self, "padding", Range(least=0, most=self.kernel_size // 2))

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from runner.models import convnet

        channels, height, width = shape
        options = (self.channels, self.kernel_size, self.padding, self.hidden, self.dropout)
        try:
            return convnet.ConvNet(channels, height, width, num_classes, *options, self.checkpoint_activations)
        except ValueError as error:
            remedy = "use larger inputs (data.size, if the data set has it), a smaller model.kernel_size, or model=tiny"
            raise ConfigError("kernel_size", self.kernel_size, str(error), remedy) from None


@dataclass
class ResNet(Model):
    """A residual network with torchvision's parameter names (`runner.models.resnet.ResNet`)."""

    depth: Literal[18, 34, 50, 101, 152] = 50
    stem: Literal["imagenet", "cifar"] = "imagenet"
    norm: Literal["batch", "group"] = "batch"

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from runner.models import resnet

        return resnet.ResNet(self.depth, shape[0], num_classes, self.stem, self.norm, self.checkpoint_activations)


@dataclass
class QNet(Model):
    """A multi-layer perceptron for action values or for classes of flattened images (`runner.models.qnet.QNet`)."""

    hidden: tuple[PositiveInt, ...] = (128, 128)
    dueling: bool = False

    num_dims: ClassVar[int | None] = None

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from runner.models import qnet

        return qnet.QNet(math.prod(shape), num_classes, self.hidden, self.dueling, self.checkpoint_activations)


@dataclass
class NatureCNN(Model):
    """Convolutions without padding that compute action values from images (`runner.models.nature_cnn.NatureCNN`)."""

    channels: tuple[PositiveInt, ...] = (32, 64, 64)
    kernel_sizes: tuple[PositiveInt, ...] = (8, 4, 3)
    strides: tuple[PositiveInt, ...] = (4, 2, 1)
    hidden: PositiveInt = 512
    dueling: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("channels", "kernel_sizes", "strides"):
            values = getattr(self, key)
            why = "channels, kernel_sizes and strides are as many numbers as there are convolutions"
            check(0 < len(values) == len(self.channels), key, list(values), why, see_comments(self))

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from runner.models import nature_cnn

        channels, height, width = shape
        options = (self.channels, self.kernel_sizes, self.strides, self.hidden, self.dueling)
        try:
            return nature_cnn.NatureCNN(channels, height, width, num_classes, *options, self.checkpoint_activations)
        except ValueError as error:
            smaller = "use model=minatar_cnn, smaller kernels, or " if max(self.kernel_sizes) > 3 else "use "
            remedy = f"{smaller}larger images (env.image_size=84)"
            raise ConfigError("kernel_sizes", list(self.kernel_sizes), str(error), remedy) from None


@dataclass
class GPT(Model):
    """A decoder-only transformer for token ids: `runner.models.gpt.GPT`. Its vocabulary is the classes of the data."""

    layers: PositiveInt = 12
    width: PositiveInt = 768
    heads: PositiveInt = 12
    kv_heads: PositiveInt | None = None
    context: PositiveInt = 1024
    dropout: Annotated[float, Range(least=0, below=1)] = 0.0
    norm: Literal["rms", "layer"] = "rms"
    positions: Literal["rotary", "learned"] = "rotary"
    bias: bool = False
    tied: bool = True

    num_dims: ClassVar[int | None] = 1
    takes_tokens: ClassVar[bool | None] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        of_head, rest = divmod(self.width, self.heads)
        why = f"{self.heads} heads cannot divide a width of {self.width}"
        check(not rest, "heads", self.heads, why, f"model.width={self.heads * max(1, of_head)}")
        why = f"rotary positions rotate pairs of components, and a head has {of_head}"
        check(of_head % 2 == 0 or self.positions == "learned", "heads", self.heads, why, "model.positions=learned")
        why, remedy = f"{self.heads} heads cannot share them equally", "a divisor of model.heads"
        check(self.heads % (self.kv_heads or 1) == 0, "kv_heads", self.kv_heads, why, remedy)

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from runner.models import gpt

        why = f"an input has {shape[0]} tokens"
        check(shape[0] <= self.context, "context", self.context, why, f"model.context={shape[0]}, or shorter inputs")
        sizes = (self.layers, self.width, self.heads, self.kv_heads, self.dropout)
        form = (self.norm, self.positions, self.bias, self.tied)
        return gpt.GPT(num_classes, self.context, *sizes, *form, self.checkpoint_activations)


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
            model = build_with_values(lambda: self.create(shape, num_classes))
            inputs = torch.zeros(1, *shape, device=next(model.parameters()).device)
            with torch.no_grad():
                outputs = model.eval()(inputs)
        except ConfigError:
            raise
        except Exception as error:  # libraries check few of their arguments
            if without_values := torch_errors.value_read(error):
                raise ConfigError(*without_values) from None
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            why = f"it cannot be built for images of {'×'.join(map(str, shape))} ({said})"
            remedy = "larger images (data.size, if the data set has it), other model.options, or another model.name"
            raise ConfigError("name", self.name, why, remedy) from None
        if not isinstance(outputs, torch.Tensor) or outputs.shape != (1, num_classes):
            why = f"it does not return one output for each of the {num_classes} classes"
            raise ConfigError("name", self.name, why, "choose a network for classification")
        return model.train()

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Return the names of the library's classification networks."""

    @abstractmethod
    def create(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """Return the network `name` with random weights; nothing is downloaded. It may raise any exception."""


@dataclass
class Torchvision(NamedModel):
    """A classification network of torchvision, without auxiliary classifiers (`runner.models.torchvision_networks`).

    The numbers of classes and input channels, and the image size of vision transformers, are taken from the data.
    """

    def names(self) -> Iterable[str]:
        from torchvision import models

        return models.list_models(module=models)

    def create(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from runner.models import torchvision_networks

        model = torchvision_networks.create(self.name, shape, num_classes, self.options or {})
        if self.checkpoint_activations and not torchvision_networks.checkpoint_activations(model):
            why = f"{self.name} has no blocks whose activations could be recomputed"
            raise ConfigError("checkpoint_activations", True, why, "model.checkpoint_activations=false")
        return model


_TAKEN = ("num_classes", "in_chans", "device", "dtype", "checkpoint_path", "cache_dir", "pretrained")
"""What the names of arguments begin with that are set elsewhere, or name files or addresses."""


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
        for key in self.options or {}:
            if key.startswith(_TAKEN):
                why = "it follows from the data, the device and model.weights"
                raise ConfigError(f"options.{key}", ABSENT, why, "leave it out; model.weights=FILE loads weights")

    def names(self) -> Iterable[str]:
        import timm  # pyright: ignore[reportMissingImports]

        return timm.list_models()

    def create(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        import timm  # pyright: ignore[reportMissingImports]

        options = {"num_classes": num_classes, "in_chans": shape[0], **(self.options or {})}
        return timm.create_model(self.name, pretrained=False, **options)
