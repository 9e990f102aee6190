"""The pipeline engine for one process with several CUDA devices, between which it copies on separate streams.

Huang et al., GPipe (2019), as implemented in torchgpipe (Kim et al., 2020): in clock cycle k, micro-batch k − j is
queued on stage j. The host does not wait for the devices, so that all devices compute at the same time. Copies between
devices overlap with the computation of the next micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from runner.parallel.pipelining.stages import Loss, StageModule
from runner.parallel.pipelining.timeline import Timeline
from runner.system.copy_stream import Transfer, copy_stream


class StreamEngine:
    """An engine that runs each stage, for `size` samples at a time, on the device of the same position in `devices`.

    Stages that share a device compute one after another.
    """

    def __init__(self, stages: Sequence[StageModule], devices: Sequence[torch.device], size: int, timeline: Timeline):
        self.stages, self.devices, self.size, self._timeline = list(stages), list(devices), size, timeline
        self._activation_copies = [copy_stream(one, other) for one, other in pairwise(devices)]
        self._gradient_copies = [copy_stream(other, one) for one, other in pairwise(devices)]

    def train(self, inputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> None:
        """Run the forward and backward passes of all micro-batches; see `ProcessEngine.train`."""
        chunks = inputs.split(self.size)
        micros = targets.to(self.devices[-1], non_blocking=True).split(self.size)
        last = len(self.stages) - 1
        inputs_of: dict[tuple[int, int], torch.Tensor] = {}
        outputs_of: dict[tuple[int, int], torch.Tensor] = {}
        pending: dict[int, Transfer] = {}
        for micro, stage in clock(len(chunks), len(self.stages)):
            x = self._activation_copies[stage - 1].receive(pending.pop(micro))[0] if stage else chunks[micro]
            x = x.detach().requires_grad_(stage > 0)
            with self._timeline.span(stage, "forward", micro, self.devices[stage]):
                y = self.stages[stage](x)
                y = loss(y, micros[micro]) if stage == last else y
            inputs_of[micro, stage], outputs_of[micro, stage] = x, y
            if stage < last:
                pending[micro] = self._activation_copies[stage].send((y.detach(),))

        for micro, position in clock(len(chunks), len(self.stages)):
            stage = last - position
            gradient = self._gradient_copies[stage].receive(pending.pop(micro))[0] if stage < last else None
            x, y = inputs_of.pop((micro, stage)), outputs_of.pop((micro, stage))
            with self._timeline.span(stage, "backward", micro, self.devices[stage]):
                if y.requires_grad:  # not that of a first stage whose parameters are frozen
                    y.backward(gradient)
            if stage:
                assert x.grad is not None
                pending[micro] = self._gradient_copies[stage - 1].send((x.grad,))

    def infer(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the network's outputs, on the device of `inputs`."""
        chunks = inputs.split(self.size)
        outputs: list[torch.Tensor] = []
        pending: dict[int, Transfer] = {}
        for micro, stage in clock(len(chunks), len(self.stages)):
            x = self._activation_copies[stage - 1].receive(pending.pop(micro))[0] if stage else chunks[micro]
            y = self.stages[stage](x)
            if stage < len(self.stages) - 1:
                pending[micro] = self._activation_copies[stage].send((y,))
            else:
                outputs.append(y)
        return torch.cat(outputs).to(inputs.device)


def clock(num_micros: int, num_stages: int) -> Iterator[tuple[int, int]]:
    """Yield the indices (micro-batch, stage) of all computations, in the order in which the host queues them.

    In each clock cycle, a stage computes at most one micro-batch.
    """
    for tick in range(num_micros + num_stages - 1):
        for stage in range(num_stages):
            if 0 <= tick - stage < num_micros:
                yield tick - stage, stage
