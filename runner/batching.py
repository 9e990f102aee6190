"""The samples of each batch, as a pure function of (seed, step).

The sample stream is the concatenation of one permutation of the data set per epoch. With a batch size of B, global
batch k is `stream[k·B : (k+1)·B]`, and each micro-batch of each rank is a slice of a global batch. Therefore, all
batches have the same size, each sample is used exactly once per epoch, the batches do not depend on the number of ranks
or data workers, and a resumed run needs only the number of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from runner.config.errors import ConfigError
from runner.config.limits import PositiveInt
from runner.seeds import derive, sample_seeds
from runner.system.accelerator import has_streams


@dataclass
class Accumulation:
    """Gradient accumulation: each process computes its share of a batch as `steps` micro-batches, one after another.

    The gradient is that of the undivided share up to rounding, except with batch normalization. A number replaces
    `auto` before the run begins.
    """

    steps: PositiveInt | Literal["auto"] = 1

    @property
    def count(self) -> int:
        """The number of micro-batches; 1 as long as `steps` is `auto`, because no number has been chosen yet."""
        return self.steps if isinstance(self.steps, int) else 1


class MicroBatch(NamedTuple):
    """One forward and backward pass: positions [start, stop) of the sample stream, the fraction `weight` of the batch.

    `is_last` is true for the last micro-batch of this process before the optimizer step.
    """

    start: int
    stop: int
    weight: float
    is_last: bool


class Step(NamedTuple):
    """One iteration of the training loop: an optimizer step, whose batch the processes divide among themselves.

    If each process computes whole steps by itself (see `Plan.step_shard`), it is a round of several steps.

    Args:
        number: the number of the optimizer step, counted from 1; for a round, that of its last step.
        local: the number of the step whose batch this process trains on; another than `number` only in a round.
        micro_batches: the micro-batches of this process; empty if the run ends before step `local`.
    """

    number: int
    local: int
    micro_batches: list[MicroBatch]


@dataclass(frozen=True)
class Plan:
    """The work of one process: which samples are in its micro-batches, and from which seeds it draws.

    The defaults describe a run with a single process. `Parallel.divide` returns the plans of several processes.

    Args:
        batch_size: number of samples in one optimizer step, over all processes and micro-batches.
        accumulation: number of micro-batches per step and process.
        data_shard: (index, count): this process trains on the part `index`, counted from 0, of every global batch.
        step_shard: (index, count): this process trains on every `count`-th global batch, beginning with batch `index`.
        seed: the seed of the weights and of the order of the samples: the seed of the run, except in an ensemble.
        eval_shard: (index, count): this process evaluates the part `index` of the held-out data.
        chunks: number of chunks into which the parallel mode splits each micro-batch.
        rng_stream: index of the random number stream that the process uses once the weights are initialized.
        reads_batches: whether the process needs the samples of the batches; a stage inside a pipeline does not.
        num_members: number of models that evaluations measure one by one, besides their vote; 0 for a single model.
        shards_parameters: whether the process has only a shard of each parameter when the optimizer updates it.
        splits_network: whether other processes have other layers of the network.

    Raises:
        ConfigError: if the batch cannot be split into equal micro-batches.
    """

    batch_size: int
    accumulation: int = 1
    data_shard: tuple[int, int] = (0, 1)
    step_shard: tuple[int, int] = (0, 1)
    seed: int = 0
    eval_shard: tuple[int, int] = (0, 1)
    chunks: int = 1
    rng_stream: int = 0
    reads_batches: bool = True
    num_members: int = 0
    shards_parameters: bool = False
    splits_network: bool = False

    def __post_init__(self) -> None:
        count = self.data_shard[1]
        parts = self.accumulation * count
        if self.batch_size % parts:
            below = self.batch_size // parts * parts
            nearest = " or ".join(f"batch_size={size}" for size in (below, below + parts) if size > 0)
            why = f"it does not divide into {self.accumulation} micro-batches (accumulation.steps) on each of "
            why += f"{count} process{'es' * (count > 1)}"
            raise ConfigError("batch_size", self.batch_size, why, f"the nearest that do: {nearest}")

    def sharded(self, rank: int, world_size: int) -> Plan:
        """Return the plan of a process that trains and evaluates on its shard of the samples."""
        shard = (rank, world_size)
        return replace(self, data_shard=shard, eval_shard=shard, rng_stream=rank)

    @property
    def data_rank(self) -> int:
        """The rank of this process among those that train on different samples."""
        return self.data_shard[0] * self.step_shard[1] + self.step_shard[0]

    @property
    def num_data_ranks(self) -> int:
        return self.data_shard[1] * self.step_shard[1]

    @property
    def num_parts(self) -> int:
        """The number of backward passes, over all processes, that a batch takes."""
        return self.accumulation * self.chunks * self.data_shard[1]

    @property
    def steps_per_round(self) -> int:
        return self.step_shard[1]

    @property
    def samples_per_round(self) -> int:
        return self.batch_size * self.steps_per_round

    @property
    def micro_size(self) -> int:
        return self.batch_size // self.data_shard[1] // self.accumulation

    @property
    def chunk_size(self) -> int:
        return self.micro_size // self.chunks

    def describe(self) -> str:
        """Return how a global batch is divided: `64 samples = 2 processes × 1 micro-batch × 32`."""
        shards, parts, size = self.data_shard[1], self.accumulation, self.micro_size
        text = f"{self.batch_size} samples"
        if shards > 1 or parts > 1:
            text += f" = {shards} process{'es' * (shards > 1)} × {parts} micro-batch{'es' * (parts > 1)} × {size}"
        if self.steps_per_round > 1:
            text += f", divided over {self.steps_per_round} processes step by step"
        return text

    def steps(self, after_step: int, last_step: int) -> Iterator[Step]:
        """Yield the iterations of the training loop that compute the steps `after_step + 1` to `last_step`."""
        index, count = self.step_shard
        for before in range(after_step, last_step, count):
            local = before + 1 + index
            yield Step(min(before + count, last_step), local, self.micro_batches(local) if local <= last_step else [])

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Return this process's micro-batches of the optimizer step with number `step`, counted from 1."""
        index, count = self.data_shard
        size = self.micro_size
        start = (step - 1) * self.batch_size + index * (self.batch_size // count)
        return [
            MicroBatch(start + m * size, start + (m + 1) * size, size / self.batch_size, m == self.accumulation - 1)
            for m in range(self.accumulation)
        ]

    def stream(self, after_step: int) -> Iterator[MicroBatch]:
        """Return an infinite iterator over this process's micro-batches of all steps after `after_step`."""
        index, count = self.step_shard
        return itertools.chain.from_iterable(map(self.micro_batches, itertools.count(after_step + 1 + index, count)))


class SampleOrder:
    """The stream of sample indices: a new permutation for every epoch, determined by (seed, epoch).

    Args:
        num_samples: number of samples per epoch.
        seed: the seed for the permutations.
        device: device of the indices, to which the permutation, always drawn on the CPU, is copied once per epoch.
        weights: if given, the indices of an epoch are drawn with these weights, float64 [num_samples], with
            replacement, as by `torch.utils.data.WeightedRandomSampler`, in place of a permutation.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int,
        device: torch.device | str = "cpu",
        weights: torch.Tensor | None = None,
    ):
        self.num_samples, self.seed, self.device, self.weights = num_samples, seed, torch.device(device), weights
        self._permutations: dict[int, torch.Tensor] = {}

    def indices(self, start: int, stop: int) -> torch.Tensor:
        """Return the sample indices at positions [start, stop) of the stream: int64 [stop − start], on the device."""
        epoch, offset = divmod(start, self.num_samples)
        parts = []
        while (length := stop - start) > 0:
            parts.append(self._permutation(epoch)[offset : offset + length])
            start, epoch, offset = start + len(parts[-1]), epoch + 1, 0
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def epochs(self, start: int, stop: int) -> torch.Tensor:
        """Return the epoch, counted from 0, of each position in [start, stop): int64 [stop − start], on the device."""
        return torch.arange(start, stop, device=self.device) // self.num_samples

    def draws(self, start: int, stop: int, indices: torch.Tensor) -> torch.Tensor:
        """Return what tells the positions [start, stop) of an epoch apart: their `indices`, if each comes once."""
        if self.weights is None:
            return indices
        return torch.arange(start, stop, device=self.device) % self.num_samples

    def with_seeds(self, micros: Iterable[MicroBatch]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield, for each of `micros`, the sample indices and the seeds from which their augmentation draws."""
        for micro in micros:
            indices, epochs = self.indices(micro.start, micro.stop), self.epochs(micro.start, micro.stop)
            draws = self.draws(micro.start, micro.stop, indices)
            yield indices.tolist(), sample_seeds(self.seed, epochs, draws)

    def _permutation(self, epoch: int) -> torch.Tensor:
        if epoch not in self._permutations:
            generator = torch.Generator().manual_seed(derive(self.seed, "order", epoch))
            if self.weights is None:
                permutation = torch.randperm(self.num_samples, generator=generator)
            else:
                permutation = torch.multinomial(self.weights, self.num_samples, True, generator=generator)
            if has_streams(self.device):  # pinned, so that the copy does not block the host
                permutation = permutation.pin_memory().to(self.device, non_blocking=True)
            # The previous epoch is kept too, because a batch may span two epochs.
            self._permutations = {e: p for e, p in self._permutations.items() if e == epoch - 1}
            self._permutations[epoch] = permutation.to(self.device)
        return self._permutations[epoch]
