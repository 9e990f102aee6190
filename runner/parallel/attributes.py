"""The state of modules that no state dict has: plain values in their attributes, and buffers that are not saved."""

from __future__ import annotations

import copy
import hashlib
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from runner.parallel.collectives import bytes_of
from runner.storage.state_dict import fit_buffers
from runner.storage.value_checks import UnexpectedContentError

_PLAIN = (bool, int, float, str, type(None))
_MAX_NUMBERS = 1 << 20  # in a tensor that an evaluation copies, so that it changes nothing of it
OF_TORCH = {*vars(torch.nn.Module()), "__deepcopy__"}
"""The attributes that each module has: its mode, hooks, parameters and buffers; and what copies a sharded one."""


def plain_values(module: torch.nn.Module) -> dict[str, Any]:
    """Return the numbers, texts and None in attributes of `module` and its submodules, by name."""
    found: dict[str, Any] = {}
    for prefix, each in module.named_modules():
        found |= {joined(prefix, key): _item(value) for key, value in vars(each).items() if _is_plain(key, value)}
    return found


def unsaved_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the dense buffers of `module` with `persistent=False`, by name."""
    found: dict[str, torch.Tensor] = {}
    for prefix, each in module.named_modules():
        for key in getattr(each, "_non_persistent_buffers_set", ()):
            buffer = each._buffers.get(key)
            if buffer is not None and buffer.layout == torch.strided and not hasattr(buffer, "fake_mode"):
                found[joined(prefix, key)] = buffer.detach()
    return found


def marks(module: torch.nn.Module) -> dict[str, Any]:
    """Return what tells changes of `plain_values` and `unsaved_buffers`, by name."""
    return plain_values(module) | {name: digest(each) for name, each in unsaved_buffers(module).items()}


def other_marks(module: torch.nn.Module) -> dict[str, Any]:
    """Return what tells changes of hooks and other attributes, such as lists, by name."""
    found: dict[str, Any] = {}
    for prefix, each in module.named_modules():
        has_extra_state = type(each).get_extra_state is not torch.nn.Module.get_extra_state
        if not has_extra_state and is_of_user(each):
            others = {key: value for key, value in vars(each).items() if key not in OF_TORCH}
            found |= {joined(prefix, key): _mark(each) for key, each in others.items() if not _is_plain(key, each)}
        found[joined(prefix, "hooks")] = len(each._forward_hooks) + len(each._forward_pre_hooks)
        hooks = {f"{key}.hooks": p._backward_hooks or () for key, p in each._parameters.items() if p is not None}
        found |= {joined(prefix, key): len(those) for key, those in hooks.items()}
    return found


def without_value(module: torch.nn.Module) -> list[str]:
    """Return the names of buffers that are None."""
    named = ((prefix, key, b) for prefix, each in module.named_modules() for key, b in each._buffers.items())
    return [joined(prefix, key) for prefix, key, buffer in named if buffer is None]


def saved_names(module: torch.nn.Module) -> dict[str, bool]:
    """Return the names of parameters and of buffers that are saved, and whether they have a value."""
    found: dict[str, bool] = {}
    for prefix, each in module.named_modules():
        tensors = {**each._parameters, **each._buffers}
        unsaved = getattr(each, "_non_persistent_buffers_set", ())  # which scripted modules have not
        found |= {joined(prefix, key): t is not None for key, t in tensors.items() if key not in unsaved}
    return found


def is_of_user(module: torch.nn.Module) -> bool:
    """Return whether a class of `module` is not torch's: FSDP puts one of torch before those of the user."""
    return any(each.__module__.partition(".")[0] not in ("torch", "builtins", "typing") for each in type(module).mro())


def set_values(module: torch.nn.Module, values: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Set plain values of attributes, and buffers, by name; `weights` are the tensors of the model at that time.

    Raises:
        UnexpectedContentError: if a name or a type is none that a run saves.
    """
    fit_buffers(module, values, weights)
    buffers, modules = dict(module.named_buffers(remove_duplicate=False)), dict(module.named_modules())
    for name, value in values.items():
        prefix, _, key = name.rpartition(".")
        if name in buffers and isinstance(value, torch.Tensor):
            buffers[name].copy_(value)
        elif prefix in modules and type(value) in _PLAIN and key not in OF_TORCH:
            vars(modules[prefix])[key] = value
        else:
            raise UnexpectedContentError(f"the attributes, {name}: {type(value).__name__}, which the network has not")


@contextmanager
def attributes_kept(modules: Sequence[torch.nn.Module]) -> Iterator[Callable[[], list[str]]]:
    """A context at whose end attributes of modules are those of before; it gives a function that names changed ones.

    Lists, dicts and sets have the same items again, and names of buffers stand for the same tensors.
    """
    parts = [(name, part) for each in modules for name, part in each.named_modules()]
    before = [(name, part, {**vars(part)}, _contents(part)) for name, part in parts]
    tensors = [(each, each._version, each.clone()) for _, part in parts for each in _own_tensors(part)]

    def changed() -> list[str]:
        return [
            joined(name, key)
            for name, part, own, contents in before
            for key, value in vars(part).items()
            if key not in own or value is not own[key] or (key in contents and not _same(value, contents[key]))
            if key != "_buffers" and (key not in own or type(value) not in _PLAIN or value != own[key])
        ]

    try:
        yield changed
    finally:
        for _, part, own, contents in before:
            vars(part).clear()
            vars(part).update(own)
            for key, content in contents.items():
                own[key].clear()
                (own[key].extend if isinstance(content, list | deque) else own[key].update)(content)
        for each, version, content in tensors:
            if each._version != version:
                each.copy_(content)


def _contents(module: torch.nn.Module) -> dict[str, Any]:
    """Return copies of the lists, dicts and sets in attributes; of those of torch, only of the dict of buffers."""
    own = {k: v for k, v in vars(module).items() if k[0] != "_" or k == "_buffers"}
    return {key: copy.copy(value) for key, value in own.items() if isinstance(value, list | deque | dict | set)}


def _own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors in attributes of a module of the user, and in lists there, that could be written in place."""
    for key, value in vars(module).items() if is_of_user(module) else ():
        for each in value if isinstance(value, list | tuple | deque) else [value]:
            is_tensor = type(each) is torch.Tensor and each.layout == torch.strided and not hasattr(each, "fake_mode")
            is_small = is_tensor and each.numel() <= _MAX_NUMBERS
            if is_small and key not in OF_TORCH and each.is_leaf and not each.requires_grad:
                yield each


def _same(value: Any, content: Any) -> bool:
    if isinstance(value, list | deque):
        return len(value) == len(content) and all(map(operator.is_, value, content))
    if isinstance(value, dict):
        return value.keys() == content.keys() and all(value[key] is content[key] for key in value)
    return value == content


def _item(value: Any) -> Any:
    """Return a number of NumPy as one of Python, which a checkpoint can hold; other values as they are."""
    is_number = type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_number else value


def _is_plain(key: str, value: Any) -> bool:
    return type(_item(value)) in _PLAIN and key not in OF_TORCH


def joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def digest(tensor: torch.Tensor) -> bytes:
    """Return a hash of the type, the shape and all bits of a dense tensor."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if not (tensor.is_meta or hasattr(tensor, "fake_mode")):  # of a plan, or a module that is called with other weights
        content: Any = bytes_of(tensor).cpu().numpy()
        digest.update(content)
    return digest.digest()


def _mark(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        is_weight = value.requires_grad or value.layout != torch.strided or hasattr(value, "device_mesh")
        return None if is_weight or hasattr(value, "fake_mode") else digest(value)
    if isinstance(value, dict):
        return [(str(key), _mark(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | set | deque):
        return [_mark(each) for each in value]
    return value if type(value) in _PLAIN else None
