"""Fake tensors and fake process groups, to execute a step of a run without memory for tensors and without other ranks.

Fake tensors have no values: https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_fake_tensor.html
Both are private in torch. A public mode in which a training step can be traced would replace most of this file
(https://github.com/pytorch/pytorch/issues/77085).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def fake_tensors() -> Iterator[Any]:
    """Within this context, every tensor is fake or treated as fake; yields the `FakeTensorMode`, their `fake_mode`."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.nn.Module, "_apply", _apply))
        stack.enter_context(patch.object(FakeTensor, "__deepcopy__", _deepcopy, create=True))
        for name, function in vars(torch.nn.init).items():
            if name.endswith("_") and not name.startswith("_") and callable(function):
                stack.enter_context(patch.object(torch.nn.init, name, lambda tensor, *_, **__: tensor))  # no values
        kernels = stack.enter_context(torch.library._scoped_library("aten", "IMPL", "Meta"))
        for name in _FUSED_UPDATES:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
                kernels.impl(name, _nothing)
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


def build_with_values(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return the module that `build` creates; within `fake_tensors`, also if `build` reads values of tensors.

    Such a module is created with memory, but without random weights, and its parameters and buffers are made fake.
    """
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is None:
        return build()
    from torch._subclasses import fake_tensor

    random = torch.random.get_rng_state()
    try:
        return build()
    except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException):
        torch.random.set_rng_state(random)
    with fake_tensor.unset_fake_temporarily():
        module = build()
    copies: dict[int, Any] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in copies:  # a tied weight stays one
                    like = {"dtype": tensor.dtype, "device": tensor.device, "layout": tensor.layout}
                    fake = torch.empty_strided(tensor.shape, tensor.stride(), **like)
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    copies[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                tensors[name] = None if tensor is None else copies[id(tensor)]
    return module


_FUSED_UPDATES = tuple(
    f"_fused_{name}_{overload}" for name in ("sgd", "adam", "adamw", "adagrad") for overload in ("", ".tensor_lr")
)
"""Operators that update all parameters in place. For some of them, torch has no meta kernel: a fake mode would create
real tensors and compute the update, which takes 4 s for ResNet50."""


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Within this context, the default process group has `world_size` ranks; only this process, `rank`, exists.

    Collectives return at once, and the values in their outputs mean nothing.

    Raises:
        ValueError: if there is a default process group already.
    """
    import torch.testing._internal.distributed.fake_pg  # registers the backend
    from torch import distributed
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed import device_mesh
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.parallel import distributed as ddp

    def unfaked_device_mesh(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():  # it reads values of small tensors
            return make_device_mesh(*arguments, **options)

    @wraps(DistributedDataParallel.__init__)
    def initialize(replica: Any, *arguments: Any, **options: Any) -> None:
        create(replica, *arguments, **options)
        replica.register_comm_hook(None, lambda _, bucket: _all_reduced(bucket))

    create, make_device_mesh = DistributedDataParallel.__init__, device_mesh.init_device_mesh
    store = torch.testing._internal.distributed.fake_pg.FakeStore()
    distributed.init_process_group("fake", rank=rank, world_size=world_size, store=store)
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(device_mesh, "init_device_mesh", unfaked_device_mesh))
            # These would read what other ranks have sent, such as shapes and orders of parameters.
            stack.enter_context(patch.object(ddp, "_verify_param_shape_across_processes", _nothing))
            stack.enter_context(patch.object(ddp, "_sync_module_states", _nothing))
            stack.enter_context(patch("torch.distributed.Reducer._rebuild_buckets", _nothing))
            stack.enter_context(patch.object(DistributedDataParallel, "__init__", initialize))
            yield
    finally:
        distributed.destroy_process_group()


def _all_reduced(bucket: Any) -> Any:
    """Return a future of the bucket's gradients: that of a fake all-reduce in DDP's default hook has no result."""
    from torch import distributed

    distributed.all_reduce(bucket.buffer())
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
    return memo[id(tensor)]


def _apply(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """Do what `Module._apply` does, but replace tensors: fake ones cannot be swapped, as weak references exist."""
    for child in module.children() if recurse else ():
        child._apply(function)
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    for name, tensor in [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]:
        with torch.no_grad():
            new = function(tensor)
        if new is not tensor:
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            setattr(module, name, torch.nn.Parameter(new, tensor.requires_grad) if is_parameter else new)
    return module
