"""torchvision's classification networks by name, as chains of blocks, between which they can be split into stages.

Parameter names, initialization and the forward pass of the whole network are torchvision's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes
from torchvision import models
from torchvision.models.regnet import AnyStage, BlockParams

from models.blocks import blocks_of
from models.frozen_batch_norm import FrozenBatchNorm
from models.recompute import Block, make_recomputable

Layers = list[tuple[str, nn.Module]]
_FLATTEN = nn.Flatten()
_NORMS = (_BatchNorm, FrozenBatchNorm, nn.LayerNorm, nn.GroupNorm)


class _SpatialMean(nn.Module):
    """The mean over height and width: [n, channels, height, width] → [n, channels]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean([2, 3])


class _ViTStem(nn.Module):
    """The layers of a vision transformer before its encoder: images → tokens [n, 1 + num_patches, hidden_dim]."""

    def __init__(self, vit: models.VisionTransformer):
        super().__init__()
        self.conv_proj, self.dropout = vit.conv_proj, vit.encoder.dropout
        self.class_token, self.pos_embedding = vit.class_token, vit.encoder.pos_embedding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.conv_proj(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(x), -1, -1), patches], dim=1)
        return self.dropout(tokens + self.pos_embedding)


class _ClassToken(nn.Module):
    """The outputs of the class token: [n, tokens, hidden_dim] → [n, hidden_dim]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0]


def _vit(vit: models.VisionTransformer) -> Layers:
    layers = [("stem", _ViTStem(vit)), *_named("encoder.layers", vit.encoder.layers)]
    return [*layers, ("encoder.ln", vit.encoder.ln), ("token", _ClassToken()), *_named("heads", vit.heads)]


def _children(*names: str, **functions: nn.Module) -> Callable[[nn.Module], Layers]:
    """Return a function that lists layers by name: one of `functions`, which a forward pass calls, or a submodule."""
    return lambda network: [(name, functions.get(name) or network.get_submodule(name)) for name in names]


def _all_children(network: nn.Module) -> Layers:
    return [*network.named_children()]


def _flatten_before(name: str) -> Callable[[nn.Module], Layers]:
    """Return a function that lists all children of a network in order, with a flatten layer before the child `name`."""

    def layers(network: nn.Module) -> Layers:
        children = list(network.named_children())
        place = [child for child, _ in children].index(name)
        return [*children[:place], ("flatten", _FLATTEN), *children[place:]]

    return layers


_POOL = nn.Sequential(nn.AdaptiveAvgPool2d(1), _FLATTEN)
_RELU_AND_POOL = nn.Sequential(nn.ReLU(inplace=True), *_POOL)

CHAINS: dict[type[nn.Module], Callable[[Any], Layers]] = {
    models.AlexNet: _flatten_before("classifier"),
    models.ConvNeXt: _all_children,
    models.DenseNet: _children("features", "pool", "classifier", pool=_RELU_AND_POOL),
    models.EfficientNet: _flatten_before("classifier"),
    models.GoogLeNet: _flatten_before("dropout"),
    models.Inception3: _flatten_before("fc"),
    models.MNASNet: _children("layers", "mean", "classifier", mean=_SpatialMean()),
    models.MobileNetV2: _children("features", "pool", "classifier", pool=_POOL),
    models.MobileNetV3: _flatten_before("classifier"),
    models.RegNet: _flatten_before("fc"),
    models.ResNet: _flatten_before("fc"),
    models.ShuffleNetV2: _children(
        *("conv1", "maxpool", "stage2", "stage3", "stage4", "conv5", "mean", "fc"), mean=_SpatialMean()
    ),
    models.SqueezeNet: _children("features", "classifier", "flatten", flatten=_FLATTEN),
    models.SwinTransformer: _all_children,
    models.VGG: _flatten_before("classifier"),
    models.VisionTransformer: _vit,
}


def blocks_of_chain(network: nn.Module) -> Layers:
    """Return the blocks of `network`, whose class is in `CHAINS`, in forward order: stem, …, head.

    Blocks that group several layers are created in each call, so that they contain layers with which a wrapper has
    replaced others.
    """
    layers = next(CHAINS[cls] for cls in type(network).__mro__ if cls in CHAINS)
    groups = list(_grouped(_flattened(layers(network))))
    names = ["stem", *(_name(group) for group in groups[1:-1]), "head"]
    blocks = [group[0][1] if len(group) == 1 else _block(group) for group in groups]
    return list(zip(names, blocks, strict=True))


def checkpoint_activations(network: nn.Module) -> int:
    """Let the backward pass recompute the activations in the blocks of `network`; return the number of such blocks.

    Blocks without submodules are left out, and those that `network.blocks()` groups, which its forward pass does not
    use.
    """
    called = {id(module) for module in network.modules()}
    blocks = [block for _, block in blocks_of(network) if id(block) in called and any(True for _ in block.children())]
    for block in blocks:
        make_recomputable(block)
    return len(blocks)


def _named(prefix: str, container: Iterable[nn.Module] | nn.Module) -> Layers:
    return [(f"{prefix}.{name}", child) for name, child in nn.Module.named_children(container)]  # pyright: ignore


def _flattened(layers: Layers) -> Iterator[tuple[str, nn.Module]]:
    """Yield `layers`, but recursively the children of each `nn.Sequential` (not of subclasses) and `AnyStage`."""
    for name, layer in layers:
        if type(layer) in (nn.Sequential, AnyStage):
            yield from _flattened(_named(name, layer))
        else:
            yield name, layer


def _grouped(layers: Iterable[tuple[str, nn.Module]]) -> Iterator[Layers]:
    """Yield groups of layers that stay together, in forward order.

    Each group contains one main layer: a convolution, a linear layer, or a module with submodules. The others are
    simple (normalization, activation, pooling). Between a main layer with submodules and one without, they join the
    latter; otherwise, the one before. In the networks of `CHAINS`, no group begins with an in-place activation, which
    would overwrite the inputs of a stage.
    """
    group: Layers = []
    waiting: Layers = []  # simple layers after a module with submodules: the next layer decides on their group
    for name, layer in layers:
        has_children = any(True for _ in layer.children())
        is_simple = not has_children and (isinstance(layer, _NORMS) or not any(True for _ in layer.parameters()))
        composite = bool(group) and any(True for _ in group[0][1].children())
        if is_simple:
            (waiting if composite else group).append((name, layer))
        elif has_children:
            if group:
                yield group + waiting
            group, waiting = [(name, layer)], []
        else:
            if group:
                yield group if composite else group + waiting
            group, waiting = [*(waiting if composite else []), (name, layer)], []
    yield group + waiting


def _name(group: Layers) -> str:
    return next((name for name, layer in group if any(True for _ in layer.parameters())), group[0][0])


def _block(group: Layers) -> Block:
    return Block(False, **{name.replace(".", "_"): layer for name, layer in group})


def create(name: str, shape: tuple[int, ...], num_classes: int, options: Mapping[str, Any]) -> nn.Module:
    """Return the network `name` with random weights, initialized as in torchvision.

    If the inputs do not have three channels, the first convolution is replaced; its weights are initialized as in
    torchvision's residual networks (He et al., 2015, fan out). If the class of the network is in `CHAINS`, it has the
    method `blocks()`.
    """
    channels, height, width = shape
    cls, given = inspect.signature(models.get_model_builder(name)).return_annotation, dict(options)
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
    if type(network) in CHAINS:  # `fully_shard` changes the class in this way, too
        network.__class__ = type(type(network).__name__, (type(network),), {"blocks": blocks_of_chain})
    return network


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
    parent, _, attribute = name.rpartition(".")
    setattr(network.get_submodule(parent), attribute, new)
