"""Hooks and optimizers compute with whole tensors where a mode has divided them into shards (`DTensor`)."""

from __future__ import annotations

import functools
from typing import Any

import torch

from runner.parallel.full_state import full_tensor, is_shard, local_part, shard_like
from runner.system.trees import map_tensors, tensors_of

_OF_SHARDS = {"size", "dim", "ndimension", "numel", "nelement", "__len__", "get_device"}
_OF_SHARDS |= {"is_floating_point", "is_complex", "requires_grad_", "retain_grad", "backward", "register_hook"}
_OF_SHARDS |= {"register_post_accumulate_grad_hook", "attribute"}
"""Functions that need no values: torch's own answers, for a shard, are those of the whole tensor."""

_WITH_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""The attributes that are views of the values of a tensor."""

_ELEMENTWISE = {"copy_", "zero_", "fill_", "zeros_like", "ones_like", "full_like", "empty_like"}
"""Functions that are elementwise, but that torch does not tag as such."""

_NUMBERS = (int, float, bool, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


class WholeTensors(torch.overrides.TorchFunctionMode):
    """Within it, functions compute with whole tensors in place of shards, and the shards get what they change.

    Elementwise functions of shards of one shape compute with the shards. All others gather them, in all processes, and
    so does one of a shard that has been indexed or viewed, which stays whole to the end. `item()` of a sum of shards is
    that of the process's part, `p[0].zero_()` is lost, and `mse_loss` of uneven shards is wrong as of torch 2.14.1.
    """

    def __init__(self) -> None:
        super().__init__()
        self._viewed: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._write_viewed()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._write_viewed()
        given, name = (args, kwargs or {}), _name_of(func)
        owners = [self._owner(each) for each in tensors_of(given) if is_shard(each)]
        shards = {id(each): each for each in owners}
        if not shards or name in _OF_SHARDS or getattr(func, "__module__", "") == "torch.autograd":
            return func(*args, **given[1])
        if name in ("=data", "=grad"):
            return self._assign(func, name, *args)
        if not shards.keys() & self._viewed.keys():
            if name in ("detach", "data"):
                alias = func(*args)
                self._aliases[id(alias)] = alias, self._owner(args[0])
                return alias
            if (result := _elementwise(func, name, given)) is not None:
                return result
        wholes = {key: self._whole(each) for key, each in shards.items()}
        versions = {key: each._version for key, each in wholes.items()}
        args, kwargs = map_tensors(lambda each: wholes[id(self._owner(each))] if is_shard(each) else each, given)
        result = func(*args, **kwargs)
        for key, whole in wholes.items():
            if whole._version != versions[key]:
                _write(shards[key], whole)
            if _may_alias(result, whole):
                self._viewed[key] = shards[key], whole, _version(shards[key])
        as_shards = {id(whole): shards[key] for key, whole in wholes.items()}
        return map_tensors(lambda each: as_shards.get(id(each), each), result)

    def _owner(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the shard of which `shard` is an alias, by `data` or `detach`."""
        return self._aliases[id(shard)][1] if id(shard) in self._aliases else shard

    def _whole(self, shard: torch.Tensor) -> torch.Tensor:
        if id(shard) in self._viewed:
            return self._viewed[id(shard)][1]
        return full_tensor(shard if torch.is_grad_enabled() else shard.detach())

    def _assign(self, func: Any, name: str, tensor: torch.Tensor, value: Any) -> None:
        """Assign `value` to the `data` or `grad` of `tensor`; torch would drop data."""
        value = full_tensor(value) if isinstance(value, torch.Tensor) and not is_shard(tensor) else value
        if not is_shard(tensor) or value is None:
            func(tensor, value)
        elif name == "=grad":
            func(tensor, value if is_shard(value) else shard_like(tensor, value))
        else:
            self._viewed.pop(id(self._owner(tensor)), None)
            _write(tensor, full_tensor(value))

    def _write_viewed(self) -> None:
        """Write what views have changed to the shards, but to those that have been written since themselves."""
        for key, (shard, whole, version) in self._viewed.items():
            if _version(shard) == version:
                _write(shard, whole)
                self._viewed[key] = shard, whole, _version(shard)


def _name_of(func: Any) -> str:
    """Return the name of a function, which for attributes is that of the attribute, or `=` and that if it is set."""
    if func.__name__ not in ("__get__", "__set__"):
        return func.__name__
    name = func.__self__.__name__
    if func.__name__ == "__set__":
        return f"={name}" if name in ("data", "grad") else "attribute"
    return name if name in _WITH_VALUES else "attribute"


@functools.cache
def _is_elementwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    return name in _ELEMENTWISE or any(torch.Tag.pointwise in getattr(packet, each).tags for each in overloads)


def _elementwise(func: Any, name: str, given: Any) -> Any:
    """Return the result that `func` has for shards if it is elementwise and they have one shape; otherwise None."""
    tensors = [each for each in tensors_of(given) if each.dim()]
    if not tensors or not is_shard(first := tensors[0]) or not _is_elementwise(name):
        return None
    if any(each.shape != first.shape for each in tensors):
        return None
    args, kwargs = map_tensors(
        lambda each: each if is_shard(each) or not each.dim() else shard_like(first, each), given
    )
    result = func(*args, **kwargs)
    is_whole = is_shard(result) and result.shape == first.shape and result.placements == first.placements  # pyright: ignore
    return result if is_whole else None


def _may_alias(result: Any, whole: torch.Tensor) -> bool:
    """Return whether `result` has a view of `whole`, or something that may have one, such as an array."""

    def storage(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else -1

    tensors = tensors_of(result)
    if not tensors:
        items = result if isinstance(result, list | tuple) else (result,)
        return not all(isinstance(each, (*_NUMBERS, list)) for each in items)
    return any(each is not whole and storage(each) == storage(whole) for each in tensors)


def _version(shard: torch.Tensor) -> int:
    return local_part(shard.detach())._version


@torch.no_grad()
def _write(shard: torch.Tensor, whole: torch.Tensor) -> None:
    local_part(shard.detach()).copy_(local_part(shard_like(shard, whole.detach())))
