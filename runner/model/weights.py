"""Weights from files: safetensors, or a `state_dict` saved by torch; nothing in a file is run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runner.config.errors import ConfigError, check

SAVE_WEIGHTS = "save the weights alone: torch.save(model.state_dict(), 'weights.pt')"


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
    check(_is_state_dict(found), "weights", path, "it holds no state_dict", SAVE_WEIGHTS)
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
        raise ConfigError("weights", path, why, SAVE_WEIGHTS) from None


def load_weights(model: torch.nn.Module, path: str, reset_head: bool) -> None:
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
    blocks: Any = getattr(model, "blocks", None)
    last = {id(parameter) for parameter in blocks()[-1][1].parameters()} if blocks else set()
    return {name for name, parameter in model.named_parameters() if id(parameter) in last}


def _first_three(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
