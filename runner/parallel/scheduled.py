"""The engine of a pipeline over processes: one or more pieces in each, on `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import pipelining

from runner.parallel.pieces import Border, Piece
from runner.parallel.timeline import Timeline

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}
_SINGLE = ("gpipe", "1f1b")
"""Those that take one stage a process."""

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Scheduled:
    """Pieces of a network in several processes: piece i in process i modulo their number.

    Args:
        pieces: this process's, by number.
        borders: before, between and after all pieces; what crosses them is sent between the processes.
        schedule: one of `SCHEDULES`.
        size: samples in a micro-batch.
        num_micros: micro-batches that go through together.
        device: of this process.
        timeline: notes what the pieces do when.
    """

    def __init__(
        self,
        pieces: dict[int, Piece],
        borders: Sequence[Border],
        schedule: str,
        size: int,
        num_micros: int,
        device: torch.device,
        timeline: Timeline,
    ):
        self.pieces, self.borders, self.size, self.device = pieces, borders, size, device
        self.num_pieces = len(borders) - 1
        self.has_first, self.has_last = 0 in pieces, self.num_pieces - 1 in pieces
        self._loss: Loss | None = None
        stages = [
            _Stage(
                piece,
                number,
                self.num_pieces,
                device,
                input_args=_example(borders[number], size, number > 0),
                output_args=_example(borders[number + 1], size, True),
                timeline=timeline,
            )
            for number, piece in pieces.items()
        ]
        own = stages[0] if schedule in _SINGLE else stages
        self._schedule = SCHEDULES[schedule](own, num_micros, loss_fn=self._loss_of, scale_grads=False)

    def _loss_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        return self._loss(outputs, targets)

    def train(self, inputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> None:
        """The forward and the backward passes of all micro-batches.

        Args:
            inputs: of all of them; read where the first piece is.
            targets: of all of them; read where the last piece is.
            loss: of a micro-batch's outputs and targets; what it returns is differentiated.
        """
        self._loss = loss
        # As the example that torch was shown: it takes contiguous inputs only, and targets where there is a loss.
        own = (inputs.contiguous(),) if self.has_first else ()
        self._schedule.step(*own, target=targets if self.has_last else None)

    def infer(self, inputs: torch.Tensor) -> torch.Tensor:
        """The network's outputs, in every process. While a stage computes, those before it go on with what follows."""
        sent, outputs = [], []
        for chunk in inputs.split(self.size):
            for number, piece in self.pieces.items():
                x = piece(chunk if number == 0 else self._received(number, len(chunk)))
                if number == self.num_pieces - 1:
                    outputs.append(x.contiguous())
                else:
                    sent.append((dist.isend(x, self._rank_of(number + 1)), x))  # kept until it is gone
        whole = torch.cat(outputs) if self.has_last else self.borders[-1].empty(len(inputs), self.device)
        for work, _ in sent:
            work.wait()
        dist.broadcast(whole, self._rank_of(self.num_pieces - 1))
        return whole

    def _received(self, number: int, count: int) -> torch.Tensor:
        x = self.borders[number].empty(count, self.device)
        dist.recv(x, self._rank_of(number - 1))
        return x

    def _rank_of(self, number: int) -> int:
        return number % dist.get_world_size()


def _example(border: Border, count: int, requires_grad: bool) -> torch.Tensor:
    """What torch is told of the activations that cross a border; it makes room for them once."""
    example = border.empty(count, torch.device("meta"))
    return example.requires_grad_(requires_grad and example.is_floating_point())


class _Stage(pipelining.PipelineStage):
    """torch's stage, whose work is noted."""

    def __init__(self, *arguments: Any, timeline: Timeline, **options: Any):
        super().__init__(*arguments, **options)
        self._timeline = timeline

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        with self._timeline.span(self.stage_index, "forward", fwd_chunk_id, self.device):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        with self._timeline.span(self.stage_index, "backward", bwd_chunk_id, self.device):
            return super().backward_one_chunk(bwd_chunk_id, *arguments, **options)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        with self._timeline.span(self.stage_index, "weights", bwd_chunk_id, self.device):
            return super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **options)
