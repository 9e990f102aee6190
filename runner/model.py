"""Networks and their options; their layers are in `models/`, which knows nothing of this project."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from runner.config import ConfigError, check, check_choice, check_range


@dataclass
class Model:
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

    how: ClassVar[tuple[str, ...]] = ("checkpoint_activations", "weights", "reset_head")
    """Options that may differ on a resume: they change how the network computes, or where it once started."""

    num_dims: ClassVar[int | None] = 3
    """Of one input: images have channels, height and width; None: any, which the network flattens."""

    def __post_init__(self) -> None:
        if self.weights is None:
            check(not self.reset_head, "reset_head", True, "without weights every layer is fresh", "name model.weights")
            return
        suffixes, path = (".safetensors", ".pt", ".pth"), Path(self.weights).expanduser()
        check(path.suffix in suffixes, "weights", self.weights, f"it is none of {', '.join(suffixes)}", _CONVERT)
        check(path.is_file(), "weights", self.weights, f"there is no such file in {path.parent.absolute()}", _FRESH)

    def build(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """The network for inputs of `shape`, of images (channels, height, width); weights from the global generator.

        Raises:
            ConfigError: when the network cannot take such inputs, or its weights are not this network's.
        """
        model = self.network(shape, num_classes)
        if self.weights is not None:
            _load_weights(model, self.weights, self.reset_head)
        return model

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """A network with fresh weights.

        One that can be cut has `stages()`: (name, module) in the order of the forward pass, the last being the head.
        """
        raise NotImplementedError


@dataclass
class ConvNet(Model):
    """Convolutions with poolings, and two linear layers: 20-20-50-10 as it stands (`models.convnet.ConvNet`).

    Args:
        channels: output channels of each convolution.
        kernel_size: pixels of a side of their kernels.
        padding: pixels of zeros around their inputs.
        hidden: width of the layer before the classes.
        dropout: share of the hidden layer that is dropped in training.
    """

    channels: tuple[int, ...] = (20, 20)
    kernel_size: int = 5
    padding: int = 0
    hidden: int = 50
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = bool(self.channels) and min(self.channels) > 0
        check(positive, "channels", list(self.channels), "each convolution needs a width > 0", "as in [20,20]")
        check_range(self, "kernel_size", least=1, most=31)
        # Half a kernel keeps the size; a wider border would hold positions that see nothing but zeros.
        check_range(self, "padding", least=0, most=self.kernel_size // 2)
        check_range(self, "hidden", least=1)
        check_range(self, "dropout", least=0, below=1)

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from models import convnet  # here, not above: the config's errors are told before torch is loaded

        channels, height, width = shape
        try:
            return convnet.ConvNet(
                channels,
                height,
                width,
                num_classes,
                channels=self.channels,
                kernel_size=self.kernel_size,
                padding=self.padding,
                hidden=self.hidden,
                dropout=self.dropout,
                checkpoint_activations=self.checkpoint_activations,
            )
        except ValueError as error:
            larger = "larger inputs (data.size, where the data set has it), a smaller kernel, or model=tiny"
            raise ConfigError("kernel_size", self.kernel_size, str(error), larger) from None


@dataclass
class ResNet(Model):
    """A residual network with torchvision's parameter names (`models.resnet.ResNet`).

    Args:
        depth: layers with weights: 18, 34, 50, 101 or 152.
        stem: `imagenet`, or `cifar` for inputs of about 32×32, which it leaves their size.
        norm: `batch`, or `group`, which treats each sample alone: the same numbers however a batch is split.
    """

    depth: int = 50
    stem: str = "imagenet"
    norm: str = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        depths = (18, 34, 50, 101, 152)
        named = ", ".join(map(str, depths))
        check(self.depth in depths, "depth", self.depth, f"it is none of {named}", "see conf/model/resnet50.yaml")
        check_choice(self, "stem", ("imagenet", "cifar"))
        check_choice(self, "norm", ("batch", "group"))

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from models import resnet  # as above, and torchvision

        return resnet.ResNet(
            self.depth,
            in_channels=shape[0],
            num_classes=num_classes,
            stem=self.stem,
            norm=self.norm,
            checkpoint_activations=self.checkpoint_activations,
        )


_CONVERT = "save the weights alone: torch.save(model.state_dict(), 'weights.pt')"
_FRESH = "give the path of a file, or null for fresh weights"


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """The tensors in a file of weights by their plain names, on the CPU.

    Args:
        path: `.safetensors`, or what `torch.save` made of a `state_dict`, or of a dictionary that holds one as
            `state_dict`, `model_state_dict` or `model`. What wrappers put before the names is taken off: `module.`
            (DataParallel and DistributedDataParallel), `_orig_mod.` (torch.compile).

    Raises:
        ConfigError: when it holds anything else. Nothing in the file is run.
    """
    found = _content(path)
    if isinstance(found, Mapping):
        found = next((found[key] for key in ("state_dict", "model_state_dict", "model") if key in found), found)
    check(_is_state_dict(found), "weights", path, "it holds no state_dict", _CONVERT)
    if all(_WRAPPED.match(name) for name in found):
        return {_WRAPPED.sub("", name, count=1): tensor for name, tensor in found.items()}
    return dict(found)


_WRAPPED = re.compile(r"(module\.|_orig_mod\.)+")


def _is_state_dict(found: Any) -> bool:
    if not isinstance(found, Mapping) or not found:
        return False
    return all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items())


def _content(path: str) -> Any:
    file = Path(path).expanduser()
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file  # here, not above: it loads torch

            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises anything from EOFError to UnicodeDecodeError
        # The first sentence only: torch's next ones tell how to run the code in the file.
        sentence = re.split(r"[.] |\n", str(error))[0]
        why = f"it cannot be read as weights: {type(error).__name__}: {sentence}"
        raise ConfigError("weights", path, why, _CONVERT) from None


def _load_weights(model: torch.nn.Module, path: str, reset_head: bool) -> None:
    """Take over the weights in `path`: all of them, or all but the last stage's."""
    own, tensors, head = model.state_dict(), read_weights(path), _head(model)
    if reset_head:
        check(bool(head), "reset_head", True, "this network does not say which stage is its last", "leave it false")
        tensors |= {name: own[name] for name in head}
    # Batch normalisations of old count no batches; torch fills that in, which is why loading is not strict.
    missing = [name for name in own if name not in tensors and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in tensors if name not in own]
    reshaped = [name for name, tensor in tensors.items() if name in own and tensor.shape != own[name].shape]
    if missing or unexpected or reshaped:
        shapes = [f"{name} {list(tensors[name].shape)} instead of {list(own[name].shape)}" for name in reshaped]
        lists = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
        why = "; ".join(f"{kind}: {_first_three(names)}" for kind, names in lists.items() if names)
        remedy = _OTHER_CLASSES if head.issuperset(missing + unexpected + reshaped) else _OTHER_NETWORK
        raise ConfigError("weights", path, f"these are not this network's tensors ({why})", remedy)
    model.load_state_dict(tensors, strict=False)


_OTHER_CLASSES = "they are for other classes: model.reset_head=true takes all layers but the last"
_OTHER_NETWORK = "name weights of this very network, or choose the network that these are of"


def _head(model: torch.nn.Module) -> set[str]:
    """The names of the last stage's parameters; none, where a network has no stages."""
    stages: Any = getattr(model, "stages", None)
    last = {id(parameter) for parameter in stages()[-1][1].parameters()} if stages else set()
    return {name for name, parameter in model.named_parameters() if id(parameter) in last}


def _first_three(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
