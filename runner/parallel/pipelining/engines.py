"""The engines of a pipeline: several processes, with `torch.distributed.pipelining`, or one with several GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import pipelining

from runner.batching import Plan
from runner.config.errors import ConfigError
from runner.data.base import copied
from runner.parallel.collectives import bytes_of
from runner.parallel.pipelining.partition import BlockProfile
from runner.parallel.pipelining.schedules import STAGES_EACH
from runner.parallel.pipelining.stages import Loss, StageModule
from runner.parallel.pipelining.timeline import Timeline
from runner.system.copy_stream import Transfer, copy_stream
from runner.system.trees import Tree, map_tensors, num_rows, rows_of

_CLASSES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}

_MAX_DIMENSIONS = 16
"""The most dimensions of the activations between stages."""


class ProcessEngine:
    """An engine that runs one or more stages in each process; stage i runs in process i modulo the number of processes.

    `stages` are those of this process, by number; `activations` describe the outputs of all stages.
    """

    def __init__(
        self,
        stages: dict[int, StageModule],
        activations: Sequence[BlockProfile],
        schedule: str,
        plan: Plan,
        device: torch.device,
        timeline: Timeline,
    ):
        self.stages, self.activations, self.size, self.device = stages, activations, plan.chunk_size, device
        self.num_stages = len(activations)
        self.has_first, self.has_last = 0 in stages, self.num_stages - 1 in stages
        self.timeline, self.chunk = timeline, 0
        self._loss: Loss | None = None
        timed = []
        for number, stage in stages.items():
            example = {"input_args": self._example(number, number > 0), "output_args": self._example(number + 1, True)}
            if number == 0:
                stage = _FirstStage(stage, self)
            timed.append(_TimedStage(stage, number, self.num_stages, device, engine=self, **example))
        scheduled = timed[0] if STAGES_EACH[schedule] == (1, 1) else timed
        self._schedule = _CLASSES[schedule](scheduled, plan.chunks, loss_fn=self._loss_of, scale_grads=False)
        self._rows = torch.arange(plan.micro_size)

    def _example(self, number: int, requires_grad: bool) -> torch.Tensor:
        """Return a meta tensor like the activations before stage `number`, by which torch allocates its buffers.

        What the first stage takes are the numbers of the rows (see `train`).
        """
        if number == 0:
            return torch.empty(self.size, dtype=torch.int64, device="meta")
        example = self._empty(number - 1, "meta")
        return example.requires_grad_(requires_grad and example.is_floating_point())

    def _empty(self, number: int, device: torch.device | str) -> torch.Tensor:
        """Return an uninitialized tensor for the outputs of stage `number`, whose rows need not be the samples."""
        return torch.empty(self.activations[number].shape, dtype=self.activations[number].dtype, device=device)

    def _loss_of(self, outputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        return self._loss(outputs, self.of_chunk(self._targets))

    def of_chunk(self, tree: Tree) -> Tree:
        """Return the rows of the chunk whose forward pass in a stage was the last; its loss directly follows."""
        return rows_of(tree, self.chunk * self.size, (self.chunk + 1) * self.size)

    def train(self, inputs: Tree, targets: Tree, loss: Loss) -> None:
        """Run the forward and backward passes of all chunks.

        The `inputs` of all chunks are needed in the process of the first stage, their `targets` in that of the last.
        Torch divides single tensors among the chunks: those of the numbers of the rows, in place of trees.
        """
        self._loss, self.inputs, self._targets = loss, inputs, targets
        taken = (self._rows,) if self.has_first else ()
        self._schedule.step(*taken, target=self._rows if self.has_last else None)

    def infer(self, inputs: Tree) -> torch.Tensor:
        """Return the network's outputs for all `inputs`; called on rank 0, while the other ranks are in `serve`.

        While one stage computes a chunk of `size` samples, earlier stages compute the following chunks.
        """
        count = num_rows(inputs)
        self._announced(count)
        self._forward(count, inputs)
        return self._received(self.num_stages - 1)

    def serve(self) -> None:
        """Compute what rank 0 asks for with `infer`, until it calls `serve` itself; called on every rank."""
        while (count := self._announced(-1)) >= 0:
            self._forward(count, None)

    def _announced(self, count: int) -> int:
        """Return the `count` of rank 0: the number of samples to compute next; −1 if there are no more."""
        number = torch.tensor(count)
        dist.broadcast(number, 0)  # of a CPU tensor: over gloo, for any device
        return int(number)

    def _forward(self, count: int, inputs: Tree) -> None:
        """Run the forward passes of this rank's stages for `count` samples, whose `inputs` only rank 0 needs."""
        sent, outputs = [], []
        for start in range(0, count, self.size):
            stop = min(start + self.size, count)
            for number, stage in self.stages.items():
                x = stage(rows_of(inputs, start, stop)) if number == 0 else stage(self._received(number - 1))
                if number == self.num_stages - 1:
                    outputs.append(x.contiguous())
                else:
                    sent += self._begin_to_send(x, self._rank_of(number + 1))
        if self.has_last:
            whole = torch.cat(outputs) if outputs else self._empty(-1, self.device)[:0]
            sent += self._begin_to_send(whole, 0)
        for work, _ in sent:
            work.wait()

    def _begin_to_send(self, x: torch.Tensor, rank: int) -> list[tuple[Any, torch.Tensor]]:
        """Begin to send `x` after its shape; return what to wait for, with the tensors, which are kept until then.

        The shape may differ from that in training: texts, for example, are as long as the longest of their batch.
        """
        shape = torch.tensor([*x.shape, *[-1] * (_MAX_DIMENSIONS - x.dim())])  # on the CPU: over gloo, for any device
        return [(dist.isend(each, rank), each) for each in (shape, x)]

    def _received(self, number: int) -> torch.Tensor:
        """Return the outputs of stage `number`, in another process, for a chunk or, of the last stage, for all."""
        shape = torch.empty(_MAX_DIMENSIONS, dtype=torch.int64)
        dist.recv(shape, self._rank_of(number))
        sizes = [size for size in shape.tolist() if size >= 0]
        x = torch.empty(sizes, dtype=self.activations[number].dtype, device=self.device)
        dist.recv(x, self._rank_of(number))
        return x

    def _rank_of(self, number: int) -> int:
        return number % dist.get_world_size()


class _FirstStage(torch.nn.Module):
    """The first stage, which takes the numbers of the rows of a chunk in place of its inputs."""

    def __init__(self, stage: StageModule, engine: ProcessEngine):
        super().__init__()
        self.stage, self.engine = stage, engine

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        # Copied: an operation in place on one chunk would count as one on all, of which they are views.
        return self.stage(copied(self.engine.of_chunk(self.engine.inputs)))


class _TimedStage(pipelining.PipelineStage):
    def __init__(self, *arguments: Any, engine: ProcessEngine, **options: Any):
        super().__init__(*arguments, **options)
        self._engine, self._timeline = engine, engine.timeline

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        self._engine.chunk = fwd_chunk_id
        with self._timeline.span(self.stage_index, "forward", fwd_chunk_id, self.device):
            outputs = super().forward_one_chunk(fwd_chunk_id, *arguments, **options)
        name, _, shape, _ = self._engine.activations[self.stage_index]
        if not self.is_last and outputs.shape != shape:  # for which the next process has no buffers
            why = f"{name} returns the shape {[*outputs.shape]}, and {[*shape]} in the first batch; "
            why += "between processes, it has to stay the same"
            remedy = "let collate pad all batches to one length, or choose parallel.engine=streams"
            raise ConfigError("parallel", "pipeline", why, remedy)
        return outputs

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        with self._timeline.span(self.stage_index, "backward", bwd_chunk_id, self.device):
            return super().backward_one_chunk(bwd_chunk_id, *arguments, **options)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        with self._timeline.span(self.stage_index, "weights", bwd_chunk_id, self.device):
            return super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **options)


def add_up(tensor: torch.Tensor, ranks: Sequence[int]) -> None:
    """Replace `tensor` on each of `ranks` by the sum of theirs, which one of them computes: the bits are the same."""
    total, (first, *others) = tensor.contiguous(), ranks
    if dist.get_rank() != first:
        dist.send(bytes_of(total), first)
        dist.recv(bytes_of(total), first)
    else:
        for other in others:
            received = torch.empty_like(total)
            dist.recv(bytes_of(received), other)
            total += received
        for other in others:
            dist.send(bytes_of(total), other)
    tensor.copy_(total)


class StreamEngine:
    """An engine that runs each stage, for `size` samples at a time, on the device of the same position in `devices`.

    Huang et al., GPipe (2019), as implemented in torchgpipe (Kim et al., 2020): the host does not wait for the devices,
    so that all compute at the same time, except stages that share one. Copies between devices overlap with computation.
    """

    def __init__(self, stages: Sequence[StageModule], devices: Sequence[torch.device], size: int, timeline: Timeline):
        self.stages, self.devices, self.size, self._timeline = list(stages), list(devices), size, timeline
        self._activation_copies = [copy_stream(one, other) for one, other in pairwise(devices)]
        self._gradient_copies = [copy_stream(other, one) for one, other in pairwise(devices)]

    def train(self, inputs: Tree, targets: Tree, loss: Loss) -> None:
        """Run the forward and backward passes of all micro-batches; see `ProcessEngine.train`."""
        chunks = copied(self._chunks(inputs))  # as in `_FirstStage`
        micros = self._chunks(map_tensors(lambda each: each.to(self.devices[-1], non_blocking=True), targets))
        last = len(self.stages) - 1
        inputs_of: dict[tuple[int, int], torch.Tensor] = {}
        outputs_of: dict[tuple[int, int], torch.Tensor] = {}
        pending: dict[int, Transfer] = {}
        for micro, stage in clock(len(chunks), len(self.stages)):
            x = self._activation_copies[stage - 1].receive(pending.pop(micro))[0] if stage else chunks[micro]
            x = x.detach().requires_grad_() if stage else x
            with self._timeline.span(stage, "forward", micro, self.devices[stage]):
                y = self.stages[stage](x)
                y = loss(y, micros[micro]) if stage == last else y
            inputs_of[micro, stage], outputs_of[micro, stage] = x, y
            if stage < last:
                is_copied = self.devices[stage] != self.devices[stage + 1]
                # Otherwise, an operation in place would change what the stage before needs for its backward pass.
                pending[micro] = self._activation_copies[stage].send((y.detach() if is_copied else y.detach().clone(),))

        for micro, position in clock(len(chunks), len(self.stages)):
            stage = last - position
            gradient = self._gradient_copies[stage].receive(pending.pop(micro))[0] if micro in pending else None
            x, y = inputs_of.pop((micro, stage)), outputs_of.pop((micro, stage))
            with self._timeline.span(stage, "backward", micro, self.devices[stage]):
                # Not that of a first stage whose parameters are frozen, or of outputs that the next one detaches.
                if y.requires_grad and (stage == last or gradient is not None):
                    y.backward(gradient)
            if stage and x.grad is not None:
                pending[micro] = self._gradient_copies[stage - 1].send((x.grad,))

    def _chunks(self, tree: Tree) -> list[Tree]:
        return [rows_of(tree, start, start + self.size) for start in range(0, num_rows(tree), self.size)]

    def infer(self, inputs: Tree) -> torch.Tensor:
        """Return the network's outputs, on the first device."""
        chunks = self._chunks(inputs)
        outputs: list[torch.Tensor] = []
        pending: dict[int, Transfer] = {}
        for micro, stage in clock(len(chunks), len(self.stages)):
            x = self._activation_copies[stage - 1].receive(pending.pop(micro))[0] if stage else chunks[micro]
            y = self.stages[stage](x)
            if stage < len(self.stages) - 1:
                pending[micro] = self._activation_copies[stage].send((y,))
            else:
                outputs.append(y)
        return torch.cat(outputs).to(self.devices[0])


def clock(num_micros: int, num_stages: int) -> Iterator[tuple[int, int]]:
    """Yield the indices (micro-batch, stage) of all computations, in the order in which the host queues them.

    In each clock cycle, a stage computes at most one micro-batch.
    """
    for tick in range(num_micros + num_stages - 1):
        for stage in range(num_stages):
            if 0 <= tick - stage < num_micros:
                yield tick - stage, stage
