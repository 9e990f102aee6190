"""Each process keeps a part of every tensor: `torch.distributed.fsdp.fully_shard` (FSDP2)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from runner.batching import MicroBatch
from runner.parallel.processes import Processes
from runner.precision import Precision
from runner.workloads.base import Sums, Workload

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from runner.run import Run

log = logging.getLogger(__name__)


@dataclass
class FSDP(Processes):
    """Parameters, gradients and moments are cut over the processes; a block's parameters are gathered when it computes.

    Rajbhandari et al., ZeRO (2020), stage 3; Zhao et al., PyTorch FSDP (2023). A block is a stage of the network, where
    it says what its stages are. In 16 bits the parameters are sent in 16 bits, the gradients in 32. An evaluation
    gathers the whole model, since processes with unequal shares of the samples could not take turns. `channels_last` is
    for the images alone: FSDP2 cuts contiguous weights only. Batch normalisation is treated as under ddp.

    Args:
        reshard_after_forward: drop a block's gathered parameters after its forward pass, and gather them again for the
            backward pass: less memory, more sending (stage 3); otherwise they are kept until then (stage 2).
        offload: keep the parts in the host's memory, and compute on the GPU.
    """

    reshard_after_forward: bool = True
    offload: bool = False

    def place(self, model: torch.nn.Module, device: torch.device, run: Run) -> torch.nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        if run.channels_last:  # of the images: FSDP2 can cut no weights in that layout
            model.register_forward_pre_hook(_to_channels_last)
        if self.offload and device.type == "cpu":
            log.warning("parallel.offload: the parts are in the host's memory anyway, without a GPU")
        model.to(device)
        dtype = run.precision.compute_dtype(device)
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (self.world_size,)),
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32),
            "offload_policy": CPUOffloadPolicy() if self.offload and device.type != "cpu" else OffloadPolicy(),
        }
        for block in blocks(model):
            fully_shard(block, **options)
        fully_shard(model, **options)
        if run.compile:
            model.compile()
        return model

    def accumulate(
        self, model: torch.nn.Module, workload: Workload, batch: Any, precision: Precision, micro: MicroBatch
    ) -> torch.Tensor:
        cast("FSDPModule", model).set_requires_gradient_sync(micro.is_last)
        # FSDP averages over the processes; the weights of all micro-batches add up to one over all of them.
        summed = micro._replace(weight=micro.weight * self.world_size)
        return super().accumulate(model, workload, batch, precision, summed)

    def evaluate(
        self, model: torch.nn.Module, workload: Workload, precision: Precision, device: torch.device
    ) -> tuple[dict[str, float], Sums]:
        self.average_buffers(model)
        from torch.distributed.fsdp import FSDPModule

        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        result = super().evaluate(model, workload, precision, device)
        for module in sharded:
            module.reshard()
            # By itself the root keeps its own parameters, which the backward pass needs first.
            module.set_reshard_after_forward(self.reshard_after_forward and module is not model, recurse=False)
        return result

    def full_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Sums, dict[str, Any]]:
        self.average_buffers(model)
        return super().full_state(model, optimizer)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, _cut_tensors()) else tensor

    def part(self, like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import distribute_tensor

        if not isinstance(like, _cut_tensors()):
            return tensor
        # Every process has read the whole tensor from the checkpoint: none has to be sent.
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The stages of a network that are modules of its own, with parameters; a stage that is a view of some is none."""
    stages: Any = getattr(model, "stages", None)
    own = {id(module) for module in model.modules()}
    found = [stage for _, stage in stages()] if stages else []
    return [stage for stage in found if id(stage) in own and any(True for _ in stage.parameters())]


def _to_channels_last(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs)


def _cut_tensors() -> type[DTensor]:
    from torch.distributed.tensor import DTensor  # here: half a second

    return DTensor
