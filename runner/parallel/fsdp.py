"""`parallel=fsdp`: `torch.distributed.fsdp.fully_shard` (FSDP2)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import nn

from runner.batching import MicroBatch, Plan
from runner.config import user_code
from runner.config.errors import check
from runner.config.hooks import Hooks
from runner.data.base import copied
from runner.parallel.batch_norm import convert_sync_batch_norm
from runner.parallel.collectives import Collectives
from runner.parallel.compiling import compile_in_place, modules_of_blocks, refuse_step
from runner.parallel.full_state import blank_copy, whole_copy
from runner.parallel.multiprocess import MultiProcess, Within, finds_unused
from runner.parallel.session import Session
from runner.parallel.whole_tensors import WholeTensors
from runner.system.trees import map_tensors
from runner.torch_optimizer import parts_of, takes_shards
from runner.tracking.metrics import BatchSums, MetricSums

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

log = logging.getLogger(__name__)

T = TypeVar("T")

_ROUNDED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass
class FSDP(MultiProcess):
    """Fully sharded data parallelism: parameters, gradients and optimizer state are sharded over the processes.

    Rajbhandari et al., ZeRO (2020), stage 3; Zhao et al., PyTorch FSDP (2023). The parameters of a block are gathered
    when the block is used; the network's `blocks()` defines the blocks. With a 16-bit precision, those of a block of
    linear and convolutional layers, which autocast would round all the same, are gathered in 16 bits. Gradients are
    reduced in float32, clipped by `Parallel`. Batch normalization is as in ddp without `sync_batch_norm`.

    A parameter that some processes do not use in a step has a gradient of zeros there, and none if no process uses it.
    Hooks of parameters are called with the gradients of the process, before they are reduced.

    All processes take part in gathering a block: in an evaluation, they make as many forward passes as the one that has
    the most samples. `conf/parallel/fsdp.yaml` explains the options.
    """

    description: ClassVar[str] = "FSDP2"

    reshard_after_forward: bool = True
    offload: bool = False
    find_unused: bool | Literal["auto"] = "auto"

    def divide(self, session: Session) -> Plan:
        refuse_step(session.compile, "its collectives would be inside the compiled step")
        return replace(session.plan.sharded(session.rank, session.world_size), shards_parameters=True)

    def _place(self, model: torch.nn.Module, session: Session) -> torch.nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        device = session.device
        if session.channels_last:  # images only: FSDP2 cannot shard weights in this memory format
            model.register_forward_pre_hook(_inputs_to_channels_last, with_kwargs=True)
        if self.offload and device.type == "cpu":
            log.warning("parallel.offload has no effect: without a GPU the shards are in host memory anyway")
        model.to(device)
        convert_sync_batch_norm(model, device, nn.SyncBatchNorm)
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (session.world_size,)),
            "offload_policy": CPUOffloadPolicy() if self.offload and device.type != "cpu" else OffloadPolicy(),
        }
        hooks = {name: [*(p._backward_hooks or {}).values()] for name, p in model.named_parameters()}
        units = [] if session.reads_parameters else _blocks_without_tied_weights(model)
        if session.reads_parameters and session.rank == 0:
            log.info("fsdp gathers all parameters at once: the loss, or a step, reads them outside of the network")
        why, remedy = "it has no dimensions, and FSDP divides the first one of each", "parallel=ddp, or a shape of [1]"
        for name, parameter in model.named_parameters():
            check(parameter.dim() > 0, "parallel", "fsdp", f"parameter {name}: {why}", remedy)
        # A step of a user's may call parts of the network by themselves, for which FSDP would gather no parameters.
        self._root = root = Within(model) if session.workload.has_steps else model
        blank = blank_copy(model) if any(map(user_code.find, Hooks._fields)) else None
        for unit in (*units, root):
            # By default, FSDP does not reshard the root's own parameters, because the backward pass needs them first.
            reshard = self.reshard_after_forward and unit is not root
            others = {id(p) for block in units for p in block.parameters()} if unit is root else set()
            trained = [(name, p) for name, p in unit.named_parameters() if p.requires_grad and id(p) not in others]
            owner = type(model if unit is root else unit).__name__
            dtypes = {str(p.dtype): name for name, p in trained}
            why = f"parameters of {owner} have several dtypes, which FSDP does not gather together"
            found = ", ".join(f"{name} {dtype.removeprefix('torch.')}" for dtype, name in dtypes.items())
            check(len(dtypes) < 2, "parallel", "fsdp", f"{why} ({found})", "parallel=ddp")
            dtype = session.precision.compute_dtype(device) if _is_rounded_by_autocast(unit, others) else None
            policy = MixedPrecisionPolicy(dtype, dtype and torch.float32, cast_forward_inputs=False)
            fully_shard(unit, reshard_after_forward=reshard, mp_policy=policy, **options)
        # FSDP refuses to copy what it shards, as a hook does that averages weights.
        for name, part in blank.named_modules() if blank is not None else ():
            module = model.get_submodule(name)
            if module is model or isinstance(module, FSDPModule):
                vars(module)["__deepcopy__"] = partial(whole_copy, part, module)
        self._gathered, self._others, self._seen = GatheredParameters(model, hooks), (), None
        for unit in (*units, root):  # after FSDP's own hook, which gathers the parameters
            unit.register_forward_pre_hook(self._gathered.watch)
        self._finds_unused = finds_unused(self.find_unused, model)
        if set_unused := getattr(root, "set_reduce_scatter_unused_params", None):  # since torch 2.14
            cast(Callable[[bool], None], set_unused)(self._finds_unused)
        compile_in_place(model, session.compile)
        return model

    def accumulate(self, model: torch.nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> BatchSums | None:
        cast("FSDPModule", self._root).set_requires_gradient_sync(micro.is_last)
        # FSDP averages over the processes, but the weights of their micro-batches already add up to one.
        micro = micro._replace(weight=micro.weight * self._session.world_size)
        sums = super().accumulate(model, batch, micro, log_due)
        if micro.is_last and self._finds_unused:
            for name in self._gathered.unused(self._session.collectives):
                model.get_parameter(name).grad = None
        for parameter in self._others if micro.is_last else ():
            parameter.grad = None
        return sums

    @contextmanager
    def _not_trained(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        # Gathered parameters require gradients as they did when they were gathered first.
        self._others = parameters
        try:
            yield
        finally:
            self._others = ()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        def within(part: torch.optim.Optimizer) -> AbstractContextManager[Any]:
            return nullcontext() if takes_shards(type(part)) else WholeTensors()

        if len(parts_of(optimizer)) > 1:
            cast("Any", optimizer).step(within=within)
        else:
            with within(optimizer):
                optimizer.step()

    def _loss(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, BatchSums]:
        return self._whole(super()._loss, model, batch)

    def _whole(self, function: Callable[..., T], model: torch.nn.Module, batch: Any) -> T:
        return function(model, batch) if self._root is model else self._root(function, batch)

    def evaluate(self, model: torch.nn.Module) -> tuple[dict[str, float], MetricSums]:
        found = super().evaluate(model)
        self._reshard()  # what a forward pass leaves gathered may be averaged weights
        return found

    @contextmanager
    def calling_hooks(self) -> Iterator[None]:
        passes = self._root.register_forward_hook(self._reshard)
        try:
            with WholeTensors():
                yield
        finally:
            passes.remove()

    def _reshard(self, *_: Any) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _sums(self, infer: Callable[[Any], Any]) -> MetricSums:
        sums = super()._sums(infer)
        with torch.no_grad(), self._session.precision.autocast():
            while infer(None) is not None:
                pass
        return sums

    def _infer(self, model: torch.nn.Module, inputs: Any) -> Any:
        """Return the outputs for `inputs`. If only others have some, make another pass; if none has, return None."""
        all_gather = self._session.collectives.all_gather
        has_inputs, has_seen = zip(*all_gather((inputs is not None, self._seen is not None)), strict=True)
        if not any(has_inputs):
            self._seen = None
            return None
        if inputs is not None:
            self._seen = inputs
        if not all(map(any, zip(has_inputs, has_seen, strict=True))):  # a process without a single sample
            like = None if inputs is None else map_tensors(lambda each: torch.empty_like(each, device="meta"), inputs)
            some = next(each for each in all_gather(like) if each is not None)
            if self._seen is None:
                self._seen = map_tensors(partial(torch.zeros_like, device=self._session.device), some)
        return self._whole(super()._infer, model, copied(self._seen))


class GatheredParameters:
    """The parameters that FSDP gathers for a forward pass, in place of the shards: their hooks, and which are used.

    Args:
        model: the sharded network.
        hooks: the hooks of gradients that its parameters had before, by name.
    """

    def __init__(self, model: torch.nn.Module, hooks: Mapping[str, Sequence[Callable[[torch.Tensor], Any]]]):
        self._names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._model, self._hooks = model, hooks
        self._watched, self._used = set[str](), set[str]()

    def watch(self, *_: Any) -> None:
        """Add the hooks to parameters that are gathered for the first time: FSDP keeps them, but not their memory."""
        if len(self._watched) == len(self._names):
            return
        used = self._used  # not `self`: garbage collection does not see hooks that autograd holds, and what they hold
        for name, parameter in self._model.named_parameters():
            if name in self._names and name not in self._watched and not hasattr(parameter, "device_mesh"):
                self._watched.add(name)
                parameter.requires_grad_()  # which eval() of the user's may switch off, and FSDP does not switch on
                for hook in self._hooks[name]:
                    parameter.register_hook(hook)
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: used.add(name))

    def unused(self, collectives: Collectives) -> list[str]:
        """Return the parameters that no rank has used since the last call, and that have no gradient therefore."""
        used = torch.tensor([name in self._used for name in self._names], dtype=torch.int32)
        self._used.clear()
        counts = collectives.all_reduce({"used": used})["used"].tolist()
        if torch.__version__ < "2.14" and any(0 < count < collectives.world_size for count in counts):
            raise RuntimeError(
                "some processes do not use all parameters, whose gradients FSDP mixes up before torch 2.14"
            )
        return [name for name, count in zip(self._names, counts, strict=True) if count == 0]


def _is_rounded_by_autocast(unit: torch.nn.Module, others: set[int]) -> bool:
    """Return whether autocast rounds all parameters of `unit` but `others`, which have units of their own."""
    owners = [m for m in unit.modules() if any(id(p) not in others for p in m.parameters(recurse=False))]
    return all(type(module) in _ROUNDED for module in owners)


def _blocks_without_tied_weights(model: torch.nn.Module) -> list[torch.nn.Module]:
    def num_names(module: torch.nn.Module) -> dict[torch.nn.Parameter, int]:
        return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))

    everywhere = num_names(model)
    return [block for block in modules_of_blocks(model) if num_names(block).items() <= everywhere.items()]


def _inputs_to_channels_last(_: torch.nn.Module, inputs: Any, options: Any) -> Any:
    def converted(x: torch.Tensor) -> torch.Tensor:
        is_image = x.dim() == 4 and x.layout == torch.strided
        return x.contiguous(memory_format=torch.channels_last) if is_image else x

    return map_tensors(converted, (inputs, options))
