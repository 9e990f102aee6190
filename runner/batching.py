"""Which samples make up which batch: a pure function of (seed, step).

The sample stream is one permutation an epoch, laid end to end; global batch k is `stream[k·B : (k+1)·B]`, and the
micro-batch m of rank r is a slice of it. So there is no ragged last batch, each sample comes exactly once an epoch, the
batches are the same for any number of ranks or data workers, and a resume needs only the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from runner.config import check, check_range
from runner.seeds import derive


@dataclass
class Accumulation:
    """How many micro-batches make one optimizer step on each process: less memory, the same gradient."""

    steps: int = 1

    def __post_init__(self) -> None:
        check_range(self, "steps", least=1)


class MicroBatch(NamedTuple):
    """One forward and backward pass: the samples at the positions [start, stop) of the stream."""

    start: int
    stop: int
    weight: float
    """Its share of the global batch: losses are means, so a gradient counts this much."""
    is_last: bool
    """Whether the gradient of the step is complete on this process after it."""


@dataclass(frozen=True)
class Plan:
    """The batch arithmetic of a run, seen from one process.

    Args:
        batch_size: the global batch of one optimizer step, over all processes and micro-batches.
        accumulation: micro-batches per step and process.
        shard: (index, count): this process trains on part `index` of `count` of every global batch.
        seed: the root seed, which orders the samples.
        turn: (index, count): this process trains on one of every `count` global batches; (0, 1): on each.

    Raises:
        ConfigError: when the batch cannot be cut into equal micro-batches.
    """

    batch_size: int
    accumulation: int = 1
    shard: tuple[int, int] = (0, 1)
    seed: int = 0
    turn: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        parts = self.accumulation * self.shard[1]
        below = self.batch_size // parts * parts
        nearest = " or ".join(f"batch_size={size}" for size in (below, below + parts) if size > 0)
        check(
            self.batch_size % parts == 0,
            "batch_size",
            self.batch_size,
            f"it does not divide into {self.accumulation} micro-batches (accumulation.steps) on each of "
            f"{self.shard[1]} processes",
            f"the nearest that do: {nearest}",
        )

    @property
    def worker(self) -> int:
        """Which of the processes that get samples of their own this is: environments and exploration differ by it."""
        return self.shard[0] * self.turn[1] + self.turn[0]

    @property
    def num_workers(self) -> int:
        """How many processes get samples of their own."""
        return self.shard[1] * self.turn[1]

    def steps(self, after_step: int, last_step: int) -> Iterator[tuple[int, list[MicroBatch]]]:
        """The number of every step after `after_step`, and this process's micro-batches of it.

        Where processes take turns, a round of steps is done at once, one by each. Its number is that of its last step,
        the same on every process; it has no micro-batches where the run ends before this process's turn.
        """
        index, count = self.turn
        for before in range(after_step, last_step, count):
            own = before + 1 + index
            yield min(before + count, last_step), self.micro_batches(own) if own <= last_step else []

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """This process's part of the global batch of `step`, which counts from 1."""
        index, count = self.shard
        size = self.batch_size // count // self.accumulation
        start = (step - 1) * self.batch_size + index * (self.batch_size // count)
        return [
            MicroBatch(start + m * size, start + (m + 1) * size, size / self.batch_size, m == self.accumulation - 1)
            for m in range(self.accumulation)
        ]

    def stream(self, after_step: int) -> Iterator[MicroBatch]:
        """The micro-batches of all steps after `after_step`, without end."""
        index, count = self.turn
        return itertools.chain.from_iterable(map(self.micro_batches, itertools.count(after_step + 1 + index, count)))


class SampleOrder:
    """The stream of sample indices: a new permutation every epoch, made from (seed, epoch).

    Args:
        num_samples: of one epoch.
        device: where the indices are wanted. They are drawn on the CPU, so that every device gets the same, and copied
            once an epoch.
    """

    def __init__(self, num_samples: int, seed: int, device: torch.device | str = "cpu"):
        self.num_samples, self.seed, self.device = num_samples, seed, torch.device(device)
        self._permutations: dict[int, torch.Tensor] = {}

    def indices(self, start: int, stop: int) -> torch.Tensor:
        """The samples at positions [start, stop) of the stream: int64 [stop − start], on the device."""
        epoch, offset = divmod(start, self.num_samples)
        parts = []
        while (length := stop - start) > 0:
            parts.append(self._permutation(epoch)[offset : offset + length])
            start, epoch, offset = start + len(parts[-1]), epoch + 1, 0
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def epochs(self, start: int, stop: int) -> torch.Tensor:
        """The epoch, from 0, of each position of [start, stop): int64 [stop − start], on the device."""
        return torch.arange(start, stop, device=self.device) // self.num_samples

    def _permutation(self, epoch: int) -> torch.Tensor:
        if epoch not in self._permutations:
            generator = torch.Generator().manual_seed(derive(self.seed, "order", epoch))
            permutation = torch.randperm(self.num_samples, generator=generator)
            if self.device.type == "cuda":  # pinned, so that the copy does not hold up the host
                permutation = permutation.pin_memory().to(self.device, non_blocking=True)
            # The last epoch is kept too: a batch may straddle the border.
            self._permutations = {e: p for e, p in self._permutations.items() if e == epoch - 1}
            self._permutations[epoch] = permutation.to(self.device)
        return self._permutations[epoch]
