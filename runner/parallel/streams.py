"""The engine of a pipeline in one process: several CUDA devices, and copies between them on streams of their own.

Huang et al., GPipe (2019), in the manner of torchgpipe (Kim et al., 2020): work is queued in the order of a clock, in
whose tick k the stage j computes micro-batch k − j. The host waits for no device, so that all of them are busy; a copy
is on streams beside those that compute, and overlaps with the next micro-batch's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from runner.parallel.pieces import Piece
from runner.parallel.timeline import Timeline

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Streams:
    """Pieces of a network on consecutive devices; where they share one, it is all computed in order.

    Args:
        pieces: all of them, on their devices.
        devices: of each piece.
        size: samples in a micro-batch.
        timeline: notes what the pieces do when.
        cuda: stands in for `torch.cuda` in tests.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        devices: Sequence[torch.device],
        size: int,
        timeline: Timeline,
        cuda: Any = None,
    ):
        self.pieces, self.devices, self.size, self._timeline = list(pieces), list(devices), size, timeline
        cuda = cuda or torch.cuda
        self._down = [courier(one, other, cuda) for one, other in pairwise(devices)]
        self._up = [courier(other, one, cuda) for one, other in pairwise(devices)]

    def train(self, inputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> None:
        """The forward and the backward passes of all micro-batches; see `Scheduled.train`."""
        chunks = inputs.split(self.size)
        micros = targets.to(self.devices[-1], non_blocking=True).split(self.size)
        last = len(self.pieces) - 1
        entered: dict[tuple[int, int], torch.Tensor] = {}
        left: dict[tuple[int, int], torch.Tensor] = {}
        under_way: dict[int, Parcel] = {}
        for micro, stage in clock(len(chunks), len(self.pieces)):
            x = self._down[stage - 1].receive(under_way.pop(micro)) if stage else chunks[micro]
            x = x.detach().requires_grad_(stage > 0)
            with self._timeline.span(stage, "forward", micro, self.devices[stage]):
                y = self.pieces[stage](x)
                y = loss(y, micros[micro]) if stage == last else y
            entered[micro, stage], left[micro, stage] = x, y
            if stage < last:
                under_way[micro] = self._down[stage].send(y.detach())

        for micro, place in clock(len(chunks), len(self.pieces)):
            stage = last - place
            gradient = self._up[stage].receive(under_way.pop(micro)) if stage < last else None
            x, y = entered.pop((micro, stage)), left.pop((micro, stage))
            with self._timeline.span(stage, "backward", micro, self.devices[stage]):
                y.backward(gradient)
            if stage:
                assert x.grad is not None
                under_way[micro] = self._up[stage - 1].send(x.grad)

    def infer(self, inputs: torch.Tensor) -> torch.Tensor:
        """The network's outputs, on the device of `inputs`."""
        chunks = inputs.split(self.size)
        outputs: list[torch.Tensor] = []
        under_way: dict[int, Parcel] = {}
        for micro, stage in clock(len(chunks), len(self.pieces)):
            x = self._down[stage - 1].receive(under_way.pop(micro)) if stage else chunks[micro]
            y = self.pieces[stage](x)
            if stage < len(self.pieces) - 1:
                under_way[micro] = self._down[stage].send(y)
            else:
                outputs.append(y)
        return torch.cat(outputs).to(inputs.device)


def clock(num_micros: int, num_stages: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, stage) in the order in which work is queued: in a tick no two are of one stage."""
    for tick in range(num_micros + num_stages - 1):
        for stage in range(num_stages):
            if 0 <= tick - stage < num_micros:
                yield tick - stage, stage


class Parcel(NamedTuple):
    """Activations, or their gradients, on their way."""

    tensor: torch.Tensor
    arrived: Any
    """The event after the copy (`torch.cuda.Event`); None where there is nothing to wait for."""


class Courier:
    """Between two pieces on one device: there is nothing to copy."""

    def send(self, tensor: torch.Tensor) -> Parcel:
        """Queue the copy of `tensor` behind what its device's current stream has been given so far."""
        return Parcel(tensor, None)

    def receive(self, parcel: Parcel) -> torch.Tensor:
        """The tensor on the other device, to be used on its current stream, which waits for the copy."""
        return parcel.tensor


class StreamCourier(Courier):
    """Copies from one CUDA device to another on streams of their own; the host never waits.

    torch makes the current streams of both devices wait for a copy between them: side streams are made current for
    it, so that those that compute go on.
    """

    def __init__(self, source: torch.device, target: torch.device, cuda: Any):
        self.source, self.target, self.cuda = source, target, cuda
        self.leaving, self.arriving = cuda.Stream(source), cuda.Stream(target)

    def send(self, tensor: torch.Tensor) -> Parcel:
        self.leaving.wait_event(self.cuda.current_stream(self.source).record_event())  # the tensor is computed
        with self.cuda.stream(self.leaving), self.cuda.stream(self.arriving):
            copy = tensor.to(self.target, non_blocking=True)
            arrived = self.arriving.record_event()
        # Each belongs to the stream that made it: without this, its memory could go to another tensor as soon as
        # Python lets go of it, while the other stream has yet to read it.
        tensor.record_stream(self.leaving)
        return Parcel(copy, arrived)

    def receive(self, parcel: Parcel) -> torch.Tensor:
        current = self.cuda.current_stream(self.target)
        current.wait_event(parcel.arrived)
        parcel.tensor.record_stream(current)
        return parcel.tensor


def courier(source: torch.device, target: torch.device, cuda: Any) -> Courier:
    """What carries tensors from `source` to `target`."""
    return Courier() if source == target else StreamCourier(source, target, cuda)
