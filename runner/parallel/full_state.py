"""The state of a model and its optimizer in the format that all parallel modes share: full tensors by parameter name.

Why this does not use `torch.distributed.checkpoint.state_dict`: see benchmarks/NOTES.md.
"""

from __future__ import annotations

from typing import Any

import torch

TensorDict = dict[str, "torch.Tensor"]
"""Tensors of a model by name, without the prefix of a wrapper."""


def collect(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, keep: bool
) -> tuple[TensorDict, dict[str, dict[str, Any]]]:
    """Return copies of the model's tensors, and of the optimizer state by parameter name, on the CPU.

    It must be called on every rank that holds a shard. Without `keep`, the result is empty.
    """

    def copied(state: dict[str, Any]) -> dict[str, Any]:
        copies = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                value = full_tensor(value.detach())
                value = value.to("cpu", copy=True).contiguous() if keep else None
            copies[key] = value
        return copies if keep else {}

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = {names[id(parameter)]: state for parameter, state in optimizer.state.items()}
    optimizer_state = {name: copied(states[name]) for name in names.values() if name in states}
    return copied(model.state_dict()), optimizer_state if keep else {}


def load(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: TensorDict, optimizer_state: dict[str, Any]
) -> None:
    """Load full tensors into the model and its optimizer, which may be sharded.

    Raises:
        RuntimeError: if names or shapes differ from those of the model.
    """
    own = model.state_dict()
    model.load_state_dict({name: shard_like(own[name], t) if name in own else t for name, t in tensors.items()})
    load_optimizer(model, optimizer, optimizer_state)


def load_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, dict[str, Any]]
) -> None:
    """Load optimizer state by parameter name."""
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {name: number for number, name in enumerate(order)}
    packed = optimizer.state_dict()
    packed["state"] = {numbers[name]: _state_of(parameters[name], optimizer_state[name]) for name in optimizer_state}
    optimizer.load_state_dict(packed)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a `DTensor`, of which each rank holds a shard, or any other tensor; a collective."""
    # Not `isinstance`, which would import torch.distributed.tensor (half a second) even if there is no DTensor.
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def shard_like(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Shard the full `tensor` as `like` is sharded."""
    if not hasattr(like, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # pyright: ignore[reportAttributeAccessIssue]
    # Every process has read the full tensor from the checkpoint, so nothing has to be sent.
    return distribute_tensor(tensor.to(like.device), mesh, placements, src_data_rank=None)


def _state_of(parameter: torch.nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer state of a parameter, with its tensors in the memory layout of the parameter.

    The fused CPU kernels iterate in memory order: with different layouts, they would silently pair wrong elements.
    """
    return {
        key: _laid_out_like(parameter, shard_like(parameter, value))
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        else value
        for key, value in state.items()
    }


def _laid_out_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` in the memory layout of `parameter`."""
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
