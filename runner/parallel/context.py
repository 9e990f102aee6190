"""What a parallel mode is handed of a run, instead of the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from runner.batching import Plan
from runner.parallel.collectives import Collectives
from runner.parallel.launch.cluster import RankInfo
from runner.precision import Precision
from runner.workloads.base import Workload


class Process(NamedTuple):
    """A process of a run, as it sees itself.

    Args:
        rank_info: its rank among the others.
        devices: that it computes on; the first one holds its batches and its metrics.
        collectives: with the others.
        shared_state: what the launcher allocated for all processes of one machine (shared memory); None: nothing.
    """

    rank_info: RankInfo
    devices: list[torch.device]
    collectives: Collectives
    shared_state: Any = None


class Layout(NamedTuple):
    """Which part of the work one process does; the defaults are those of a run of one process."""

    data_shard: tuple[int, int] = (0, 1)
    """(index, count): the part of every global batch that it trains on."""
    step_shard: tuple[int, int] = (0, 1)
    """(index, count): it trains on one of every `count` global batches."""
    eval_shard: tuple[int, int] = (0, 1)
    """(index, count): the part of the held-out data that it evaluates."""
    seed_offset: int = 0
    """Added to the run's seed: processes that train models of their own differ by it."""
    rng_stream: int = 0
    """Which stream of random numbers it draws from once the weights are made (dropout, exploration)."""
    non_equivalence_reason: str = ""
    """Why no single device computes the same; empty where one does."""

    @staticmethod
    def data_parallel(rank_info: RankInfo) -> Layout:
        """Every process trains on its shard of each batch, and evaluates its shard of the held-out data."""
        shard = (rank_info.rank, rank_info.world_size)
        return Layout(data_shard=shard, eval_shard=shard, rng_stream=rank_info.rank)


@dataclass(frozen=True)
class Context:
    """One process's view of a run, as far as a mode needs it.

    Args:
        process: this one: its rank, its devices, and its collectives with the others.
        layout: the part of the work that it does.
        plan: the batch arithmetic that follows from it.
        channels_last: convolutions compute in NHWC memory format.
        compile: `torch.compile` the model.
    """

    process: Process
    layout: Layout
    plan: Plan
    workload: Workload
    precision: Precision
    channels_last: bool = False
    compile: bool = False

    @property
    def device(self) -> torch.device:
        """The device of this process; of several, the first."""
        return self.process.devices[0]

    @property
    def collectives(self) -> Collectives:
        """This process's collectives with the others."""
        return self.process.collectives

    @property
    def rank(self) -> int:
        """This process among those of the run; rank 0 writes."""
        return self.process.rank_info.rank

    @property
    def world_size(self) -> int:
        """How many processes the run has."""
        return self.process.rank_info.world_size
