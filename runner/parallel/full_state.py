"""The state of a model and its optimizer in the format that all parallel modes share: full tensors by parameter name.

benchmarks/NOTES.md explains why this file does not use `torch.distributed.checkpoint.state_dict`.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from typing import Any

import torch

from runner.storage.state_dict import fit_buffers, fitted, with_versions
from runner.storage.value_checks import TensorSpec, UnexpectedContentError, check_like, is_finite
from runner.torch_optimizer import is_of_user, parts_of

log = logging.getLogger(__name__)

_PROBE = (3, 5, 2, 4, 6, 7, 8)  # the shape of a test parameter: a state tensor that has it follows the parameter

TensorDict = dict[str, "torch.Tensor"]
"""The tensors of a model by name. The names have no prefix of a wrapper, such as DDP's `module.`."""


def collect(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, keep: bool
) -> tuple[TensorDict, dict[str, dict[str, Any]]]:
    """Return two dicts of copies on the CPU: the model's tensors by name, and the optimizer state by parameter name.

    Called on every rank that holds a shard of the model. With `keep=False`, the rank only sends its shards, and both
    results are empty.
    """

    named = model.named_parameters()
    states = {name: copied(optimizer.state[p], keep) for name, p in named if p in optimizer.state}
    tensors = model.state_dict()
    return with_versions(copied(tensors, keep), tensors), states if keep else {}


def without_state(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that has no state, for those who want that of the model alone."""
    return torch.optim.SGD([{"params": [*model.parameters()]}])  # of which a stage may have none


def copied(state: dict[str, Any], keep: bool = True) -> dict[str, Any]:
    """Return copies of the values of `state`, full tensors on the CPU; with `keep=False`, only take part in that."""
    copies = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            value = full_tensor(value.detach())
            value = value.to("cpu", copy=True) if keep else None
            value = value.contiguous() if value is not None and value.layout == torch.strided else value
        else:
            value = copy.deepcopy(value)
        copies[key] = value
    return copies if keep else {}


def load(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: TensorDict, optimizer_state: dict[str, Any]
) -> None:
    """Load full tensors into the model, of which a rank takes its shards, and into the optimizer.

    Raises:
        UnexpectedContentError: if names, shapes or dtypes differ from those of the model and the optimizer, a tensor is
            not finite, or a value `step` in `optimizer_state` is negative. If only `optimizer_state` is wrong, the
            model has been changed already.
    """
    load_module(model, tensors, "the model")
    for name, parameter in model.named_parameters():
        saved = tensors.get(name, parameter).dtype
        if saved != parameter.dtype:  # in another precision, so is what the optimizer keeps in that of a weight
            for key, value in optimizer_state.get(name, {}).items():
                is_like = key != "step" and isinstance(value, torch.Tensor) and value.dtype == saved
                optimizer_state[name][key] = value.to(parameter.dtype) if is_like else value
    load_optimizer(model, optimizer, optimizer_state)


def load_module(module: torch.nn.Module, tensors: TensorDict, where: str) -> None:
    """Load full tensors into `module`, which is called `where` in an `UnexpectedContentError`.

    Names and the shapes of parameters must be those of `module`; buffers get the shapes that they had (see `fitted`).
    """
    held = module.state_dict()
    fits = fitted(module, tensors, tensors)
    new = {n: each for n, each in fits.items() if each[1] not in getattr(each[0], "_non_persistent_buffers_set", ())}
    like = held | {name: tensors[name] for name in new}
    check_like(dict(tensors), {n: t if isinstance(t, torch.Tensor) else object for n, t in like.items()}, where)
    if new:
        fit_buffers(module, {name: tensors[name] for name in new}, tensors)
        held = module.state_dict()
    # Not strictly, as the names have been compared: torch would add, and then refuse, `num_batches_tracked` of batch
    # normalization layers in other stages of a pipeline.
    shards = {name: shard_like(held[name], value) for name, value in tensors.items()}
    module.load_state_dict(with_versions(shards, tensors, held), strict=False)


def load_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, dict[str, Any]]
) -> None:
    """Load `optimizer_state`, by parameter name and then by key. Parameters without saved state keep what they have.

    Shapes are checked because fused kernels would read and write beyond the end of a tensor that is too short.
    """
    parameters = dict(model.named_parameters())
    names = {parameter: name for name, parameter in parameters.items()}
    expected = {}  # in the order in which `optimizer.state_dict` numbers the parameters
    for part in parts_of(optimizer):
        for group in part.param_groups:
            of_dims = {} if is_of_user(part) else _states_of_a_step(optimizer, group)
            expected |= {names[parameter]: of_dims.get(parameter.dim()) for parameter in group["params"]}
    numbers = {name: number for number, name in enumerate(expected)}
    check_like(optimizer_state, {name: dict for name in numbers if name in optimizer_state}, "the optimizer")
    packed = optimizer.state_dict()
    for name, state in optimizer_state.items():
        like = {key: parameters[name] if spec is None else spec for key, spec in (expected[name] or {}).items()}
        if like:  # the optimizer of the checkpoint may have had momentum when this one has none
            check_like(state, like, f"the optimizer, {name}")
            if "step" in state and state["step"] < 0:  # most optimizers compute a divisor from it
                raise UnexpectedContentError(f"the optimizer, {name}, step: it is negative")
            packed["state"][numbers[name]] = _state_of(parameters[name], state)
    optimizer.load_state_dict(packed)
    for name in optimizer_state:  # torch has converted numbers, as NAdam's product of momenta, to the weight's type
        state, form = optimizer.state[parameters[name]], expected[name]
        if form is None:  # of a class of the user's, whose whole numbers torch would convert
            own, device = _state_of(parameters[name], optimizer_state[name]), parameters[name].device
            state.update({k: v.to(device) if torch.is_tensor(v) and k != "step" else v for k, v in own.items()})
        for key, spec in (form or {}).items():
            if isinstance(spec, TensorSpec) and not spec.shape and key in state and key != "step":
                state[key] = state[key].to(spec.dtype)


def _states_of_a_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> dict[int, dict[str, TensorSpec | type | None]]:
    """Return what `_state_of_a_step` returns for the first parameter of each number of dimensions in `group`."""
    firsts = {parameter.dim(): parameter for parameter in reversed(group["params"])}
    return {dim: _state_of_a_step(optimizer, group, first) for dim, first in firsts.items()}


def _state_of_a_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], first: torch.Tensor
) -> dict[str, TensorSpec | type | None]:
    """Return a dict from the keys of the state of a parameter like `first`, such as `exp_avg`, to the format."""
    shape = _PROBE[: max(1, first.dim())]
    parameter = torch.nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.zeros(shape)
    copied = copy.copy(optimizer)
    copied.state = defaultdict(dict)
    for key, value in optimizer.state.get(first, {}).items():  # Adagrad of torch 2.11 has state before a step
        follows = key != "step" and isinstance(value, torch.Tensor) and value.shape == first.shape
        copied.state[parameter][key] = torch.zeros(shape) if follows else copy.copy(value)
    copied.param_groups = [{**group, "params": [parameter]}]
    copied.step()
    forms: dict[str, TensorSpec | type | None] = {}
    for key, value in copied.state[parameter].items():
        forms[key] = type(value)
        if isinstance(value, torch.Tensor):
            # Any other shape, as in Adafactor, depends on the parameter's in a way that only the optimizer knows.
            forms[key] = None if value.shape == shape else TensorSpec(value.dtype, (None,) * value.dim())
    return forms


def not_finite(tensors: TensorDict) -> list[str]:
    """Return the names of the tensors that are not finite; other values are."""
    return [name for name, each in tensors.items() if isinstance(each, torch.Tensor) and not is_finite(each)]


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a `DTensor`, or any other tensor unchanged; called on every rank."""
    # Not `isinstance`, which would import torch.distributed.tensor (half a second) even if there is no DTensor.
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard of a `DTensor` that this rank has, which shares its memory; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def shard_like(like: Any, tensor: Any) -> Any:
    """Return the full `tensor`, sharded in the same way as `like`; other values as they are."""
    if not is_shard(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements
    # Every process has read the full tensor from the checkpoint, so nothing has to be sent.
    return distribute_tensor(tensor.to(like.device), mesh, placements, src_data_rank=None)


def blank_copy(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return a copy of `module` whose parameters and buffers have no values; None if it cannot be copied."""
    blank = {
        id(p): torch.nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()
    }
    try:
        return copy.deepcopy(module, blank | {id(b): torch.empty_like(b, device="meta") for b in module.buffers()})
    except Exception as error:  # of any type: it holds a lock, for example
        log.debug("%s cannot be copied", type(module).__name__, exc_info=error)
        return None


def whole_copy(blank: torch.nn.Module, module: Any, _: Any = None) -> torch.nn.Module:
    """Return a copy of `module` that is not sharded, in the form of its `blank_copy`; called on every rank."""
    parameters = {name: full_tensor(each.detach()).clone() for name, each in module.named_parameters()}
    whole = {id(p): torch.nn.Parameter(parameters[name], p.requires_grad) for name, p in blank.named_parameters()}
    buffers = dict(module.named_buffers())
    return copy.deepcopy(blank, whole | {id(b): buffers[name].clone() for name, b in blank.named_buffers()})


def is_shard(tensor: Any) -> bool:
    """Return whether `tensor` is a `DTensor`."""
    return hasattr(tensor, "device_mesh")


def _state_of(parameter: torch.nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """Return `state`, the optimizer state of `parameter`, with tensors in the memory layout of the parameter."""
    copies = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            # The fused CPU kernels iterate in memory order: with different layouts, they would pair wrong elements.
            shard = shard_like(parameter, value)
            value = torch.empty_like(parameter, dtype=shard.dtype, device=shard.device).copy_(shard)
        elif isinstance(value, torch.Tensor):
            value = value.clone()  # so that it does not refer to the memory-mapped file
        copies[key] = value
    return copies
