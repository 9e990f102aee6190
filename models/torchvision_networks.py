"""torchvision's classification networks by name, as chains of blocks, between which they can be split into stages.

Parameter names, initialization and the forward pass of the whole network are torchvision's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes
from torchvision import models
from torchvision.models.regnet import AnyStage, BlockParams

from runner.models.blocks import blocks_of
from runner.models.layers import Block, make_recomputable

Layers = list[tuple[str, nn.Module]]
_NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)


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


_POOL = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
_RELU_AND_POOL = nn.Sequential(nn.ReLU(inplace=True), *_POOL)

CHAINS: dict[type[nn.Module], dict[str, nn.Module]] = {
    models.AlexNet: {"classifier": nn.Flatten()},
    models.ConvNeXt: {},
    models.DenseNet: {"classifier": _RELU_AND_POOL},
    models.EfficientNet: {"classifier": nn.Flatten()},
    models.GoogLeNet: {"dropout": nn.Flatten()},
    models.Inception3: {"fc": nn.Flatten()},
    models.MNASNet: {"classifier": _POOL},
    models.MobileNetV2: {"classifier": _POOL},
    models.MobileNetV3: {"classifier": nn.Flatten()},
    models.RegNet: {"fc": nn.Flatten()},
    models.ResNet: {"fc": nn.Flatten()},
    models.ShuffleNetV2: {"fc": _POOL},
    models.SqueezeNet: {"": nn.Flatten()},
    models.SwinTransformer: {},
    models.VGG: {"classifier": nn.Flatten()},
    models.VisionTransformer: {"heads": _ClassToken()},
}
"""Networks whose forward pass calls their children in order; for each, what it computes before a child, or after all.

Vision transformers have a stem besides (`_ViTStem`).
"""


def blocks_of_chain(network: Any) -> Layers:
    """Return the blocks of `network`, whose class is in `CHAINS`, in forward order: stem, …, head.

    Blocks that group several layers are created in each call, so that they contain layers with which a wrapper has
    replaced others.
    """
    between = next(CHAINS[cls] for cls in type(network).__mro__ if cls in CHAINS)
    layers: Layers = []
    for name, child in [*network.named_children(), ("", None)]:
        if name in between:
            layers += _flattened([(f"before_{name}", between[name])])
        if isinstance(child, models.vision_transformer.Encoder):
            layers = [("stem", _ViTStem(network)), *_named("encoder.layers", child.layers), ("encoder.ln", child.ln)]
        elif child is not None:
            layers += _flattened([(name, child)])
    blocks: Layers = []
    for group in _grouped(layers):
        name = next((name for name, layer in group if any(True for _ in layer.parameters())), group[0][0])
        parts = {name.replace(".", "_"): layer for name, layer in group}
        blocks.append((name, group[0][1] if len(group) == 1 else Block(False, **parts)))
    return [("stem", blocks[0][1]), *blocks[1:-1], ("head", blocks[-1][1])]


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


def _named(prefix: str, container: nn.Module) -> Layers:
    return [(f"{prefix}.{name}", child) for name, child in container.named_children()]


def _flattened(layers: Layers) -> Iterator[tuple[str, nn.Module]]:
    """Yield `layers`, but recursively the children of each `nn.Sequential` (not of subclasses) and `AnyStage`."""
    for name, layer in layers:
        if type(layer) in (nn.Sequential, AnyStage):
            yield from _flattened(_named(name, layer))
        else:
            yield name, layer


def _grouped(layers: Layers) -> list[Layers]:
    """Return groups of layers that stay together, in forward order.

    A module with submodules begins and ends a group. Of the layers between two such modules, each convolution or linear
    layer begins a group, which the others (normalization, activation, pooling) join; those before the first one stay
    with it. A group without parameters joins the one before: learning rates that decay by block do not count it. In the
    networks of `CHAINS`, no group begins with an in-place activation, which would overwrite the inputs of a stage.
    """
    groups: list[Layers] = []
    is_module = has_main = False
    for name, layer in layers:
        after_module, is_module = is_module, any(True for _ in layer.children())
        is_main = is_module or (any(True for _ in layer.parameters()) and not isinstance(layer, _NORMS))
        if not groups or is_module or after_module or (is_main and has_main):
            groups.append([])
            has_main = False
        groups[-1].append((name, layer))
        has_main = has_main or is_main
    joined: list[Layers] = []
    for group in groups:
        if joined and not any(True for _, layer in group for _ in layer.parameters()):
            joined[-1] += group
        else:
            joined.append(group)
    return joined


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
    from_init_params = BlockParams.from_init_params

    def from_init_params_on_cpu(**sizes: Any) -> BlockParams:
        with torch.device("cpu"), _disable_current_modes():  # the widths are computed with tensors, also with fake ones
            return from_init_params(**sizes)

    with patch.object(BlockParams, "from_init_params", from_init_params_on_cpu):
        network = models.get_model(name, weights=None, num_classes=num_classes, **given)
    if channels != 3:
        _replace_first_convolution(network, channels)
    if type(network) in CHAINS:  # `fully_shard` changes the class in this way, too
        network.__class__ = type(type(network).__name__, (type(network),), {"blocks": blocks_of_chain})
    return network


def _replace_first_convolution(network: nn.Module, channels: int) -> None:
    name, old = next((name, each) for name, each in network.named_modules() if isinstance(each, nn.Conv2d))
    sizes: Any = (old.kernel_size, old.stride, old.padding)
    new = nn.Conv2d(channels, old.out_channels, *sizes, bias=old.bias is not None)
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    if new.bias is not None:
        nn.init.zeros_(new.bias)
    parent, _, attribute = name.rpartition(".")
    setattr(network.get_submodule(parent), attribute, new)
