"""`parallel=fsdp`: `torch.distributed.fsdp.fully_shard` (FSDP2)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch.utils._pytree import tree_map_only

from runner.batching import MicroBatch, Plan
from runner.data.base import copied
from runner.models.layers import normalizes_batches
from runner.parallel.batch_norm import convert_sync_batch_norm
from runner.parallel.compiling import compile_in_place, modules_of_blocks, refuse_step
from runner.parallel.multiprocess import MultiProcess
from runner.parallel.session import Session
from runner.tracking.metrics import BatchSums, MetricSums

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

log = logging.getLogger(__name__)


@dataclass
class FSDP(MultiProcess):
    """Fully sharded data parallelism: parameters, gradients and optimizer state are sharded over the processes.

    Rajbhandari et al., ZeRO (2020), stage 3; Zhao et al., PyTorch FSDP (2023). The parameters of a block are gathered
    when the block is used; the network's `blocks()` defines the blocks. With a 16-bit precision, parameters are
    gathered in 16 bits, except if the network has batch normalization, whose operators need float32 parameters.
    Gradients are reduced in float32, clipped by `Parallel`. Batch normalization is as in ddp without `sync_batch_norm`.

    All processes take part in gathering a block: in an evaluation, they make as many forward passes as the one that has
    the most samples. `conf/parallel/fsdp.yaml` explains the options.
    """

    description: ClassVar[str] = "FSDP2"

    reshard_after_forward: bool = True
    offload: bool = False

    def divide(self, session: Session) -> Plan:
        refuse_step(session.compile, "its collectives would be inside the compiled step")
        return replace(session.plan.sharded(session.rank, session.world_size), shards_parameters=True)

    def _place(self, model: torch.nn.Module, session: Session) -> torch.nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        device = session.device
        if session.channels_last:  # images only: FSDP2 cannot shard weights in this memory format
            model.register_forward_pre_hook(_inputs_to_channels_last)
        if self.offload and device.type == "cpu":
            log.warning("parallel.offload has no effect: without a GPU the shards are in host memory anyway")
        model.to(device)
        convert_sync_batch_norm(model, device, torch.nn.SyncBatchNorm)
        dtype = None if normalizes_batches(model) else session.precision.compute_dtype(device)
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (session.world_size,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32),
            "offload_policy": CPUOffloadPolicy() if self.offload and device.type != "cpu" else OffloadPolicy(),
        }
        for block in _blocks_without_tied_weights(model):
            fully_shard(block, reshard_after_forward=self.reshard_after_forward, **options)
        # By default, FSDP does not reshard the root's own parameters, because the backward pass needs them first.
        fully_shard(model, reshard_after_forward=False, **options)
        compile_in_place(model, session.compile)
        return model

    def accumulate(self, model: torch.nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> BatchSums:
        cast("FSDPModule", model).set_requires_gradient_sync(micro.is_last)
        # FSDP averages over the processes, but the weights of their micro-batches already add up to one.
        micro = micro._replace(weight=micro.weight * self._session.world_size)
        return super().accumulate(model, batch, micro, log_due)

    def evaluate(self, model: torch.nn.Module) -> tuple[dict[str, float], MetricSums]:
        from torch.distributed.fsdp import FSDPModule

        found = super().evaluate(model)
        for module in model.modules():  # what a forward pass leaves gathered may be averaged weights
            if isinstance(module, FSDPModule):
                module.reshard()
        return found

    def _sums(self, infer: Callable[[Any], Any]) -> MetricSums:
        sums = super()._sums(infer)
        with torch.no_grad(), self._session.precision.autocast():
            while infer(None) is not None:
                pass
        return sums

    def _infer(self, model: torch.nn.Module, inputs: torch.Tensor | None) -> Any:
        """Return the outputs for `inputs`. If only others have some, make a pass of zeros; if none has, return None."""
        spec = None if inputs is None else (tuple(inputs.shape), inputs.dtype)
        specs = [each for each in self._session.collectives.all_gather(spec) if each is not None]
        if not specs:
            return None
        shape, dtype = specs[0]
        zeros = torch.zeros(shape, dtype=dtype, device=self._session.device)
        return model(zeros if inputs is None else copied(inputs))


def _blocks_without_tied_weights(model: torch.nn.Module) -> list[torch.nn.Module]:
    def num_names(module: torch.nn.Module) -> dict[torch.nn.Parameter, int]:
        return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))

    everywhere = num_names(model)
    return [block for block in modules_of_blocks(model) if num_names(block).items() <= everywhere.items()]


def _inputs_to_channels_last(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    def converted(x: torch.Tensor) -> torch.Tensor:
        is_image = x.dim() == 4 and x.layout == torch.strided
        return x.contiguous(memory_format=torch.channels_last) if is_image else x

    return tree_map_only(torch.Tensor, converted, inputs)
