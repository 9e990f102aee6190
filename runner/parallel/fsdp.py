"""`parallel=fsdp`: `torch.distributed.fsdp.fully_shard` (FSDP2)."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from runner.batching import MicroBatch
from runner.parallel.compiling import compile_in_place, modules_of_blocks
from runner.parallel.context import Context, Layout
from runner.parallel.full_state import TensorDict
from runner.parallel.launch.cluster import RankInfo
from runner.parallel.multiprocess import MultiProcess, average_buffers
from runner.tracking.metrics import BatchSums, MetricSums

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

log = logging.getLogger(__name__)


@dataclass
class FSDP(MultiProcess):
    """Fully sharded data parallelism: parameters, gradients and optimizer state are sharded over the processes.

    Rajbhandari et al., ZeRO (2020), stage 3; Zhao et al., PyTorch FSDP (2023). The parameters of a block are gathered
    when the block is used; the network's `blocks()` defines the blocks. With a 16-bit precision, parameters are
    gathered in 16 bits, and gradients are reduced in float32. `channels_last` applies to images but not to weights,
    because FSDP2 shards only contiguous weights. Batch normalization works as in ddp without `sync_batch_norm`.

    Before an evaluation, every process gathers the whole model. Gathering it block by block during the evaluation would
    require that all processes make the same number of forward passes.

    Args:
        reshard_after_forward: whether to free a block's gathered parameters after its forward pass, and gather them
            again for its backward pass. `true` (stage 3) takes less memory, but more communication. `false` (stage 2)
            keeps the gathered parameters until the backward pass.
        offload: keep the shards in host memory, and copy the parameters of a block to the GPU when the block is used.
    """

    description: ClassVar[str] = "FSDP2"
    shards_parameters: ClassVar[bool] = True

    reshard_after_forward: bool = True
    offload: bool = False

    def layout(self, rank_info: RankInfo) -> Layout:
        return Layout.data_parallel(rank_info)

    def _place(self, model: torch.nn.Module, context: Context) -> torch.nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        device = context.device
        if context.channels_last:  # images only: FSDP2 cannot shard weights in this memory format
            model.register_forward_pre_hook(_inputs_to_channels_last)
        if self.offload and device.type == "cpu":
            log.warning("parallel.offload has no effect: without a GPU the shards are in host memory anyway")
        model.to(device)
        dtype = context.precision.compute_dtype(device)
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (context.world_size,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32),
            "offload_policy": CPUOffloadPolicy() if self.offload and device.type != "cpu" else OffloadPolicy(),
        }
        for block in _without_tied_weights(model):
            fully_shard(block, reshard_after_forward=self.reshard_after_forward, **options)
        # By default, FSDP does not reshard the root's own parameters, because the backward pass needs them first.
        fully_shard(model, reshard_after_forward=False, **options)
        compile_in_place(model, context.compile)
        return model

    def accumulate(self, model: torch.nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> BatchSums:
        cast("FSDPModule", model).set_requires_gradient_sync(micro.is_last)
        # FSDP averages over the processes, but the weights of their micro-batches already add up to one.
        return self._accumulate(model, batch, micro.weight * self._context.world_size)

    def evaluate(self, model: torch.nn.Module) -> tuple[dict[str, float], MetricSums]:
        average_buffers(model, self._context.collectives)
        from torch.distributed.fsdp import FSDPModule

        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        result = super().evaluate(model)
        for module in sharded:
            module.reshard()
            module.set_reshard_after_forward(self.reshard_after_forward and module is not model, recurse=False)
        return result

    def full_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[TensorDict, dict[str, Any]]:
        average_buffers(model, self._context.collectives)
        return super().full_state(model, optimizer)


def _without_tied_weights(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks of `model` that share no parameter with another part of the model.

    Blocks with shared parameters are left out. FSDP shards their parameters together with those of the root module, so
    that tied weights stay tied.
    """
    everywhere = _counts(model)
    return [block for block in modules_of_blocks(model) if _counts(block).items() <= everywhere.items()]


def _counts(module: torch.nn.Module) -> dict[int, int]:
    """Return a dict from the `id` of each parameter of `module` to the number of names that `module` has for it."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


def _inputs_to_channels_last(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Convert images, which are inputs with four dimensions, to the NHWC memory format; a forward pre-hook."""
    return tuple(x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs)
