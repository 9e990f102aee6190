"""What a parallel mode knows about a run; it does not see the run itself."""

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
    """A process of a run.

    Args:
        rank_info: its rank.
        devices: the devices that it computes on; the first one holds its batches and its metrics.
        collectives: its collectives with the other processes.
        shared_state: what the launcher allocated for all processes of this machine (shared memory); None: nothing.
    """

    rank_info: RankInfo
    devices: list[torch.device]
    collectives: Collectives
    shared_state: Any = None


class Layout(NamedTuple):
    """One process's share of the work; the defaults describe a run with a single process."""

    data_shard: tuple[int, int] = (0, 1)
    """(index, count): the shard of every global batch that it trains on."""
    step_shard: tuple[int, int] = (0, 1)
    """(index, count): it trains on every `count`-th global batch."""
    eval_shard: tuple[int, int] = (0, 1)
    """(index, count): the shard of the held-out data that it evaluates."""
    seed_offset: int = 0
    """Added to the run's seed, for processes that train different models."""
    rng_stream: int = 0
    """Its stream of random numbers once the weights are initialized (dropout, exploration)."""
    non_equivalence_reason: str = ""
    """Why a single device does not compute the same; empty if it does."""

    @staticmethod
    def data_parallel(rank_info: RankInfo) -> Layout:
        """Return the layout in which every process trains and evaluates on its shard of the samples."""
        shard = (rank_info.rank, rank_info.world_size)
        return Layout(data_shard=shard, eval_shard=shard, rng_stream=rank_info.rank)


@dataclass(frozen=True)
class Context:
    """What a mode needs to know about a run, in one process.

    Args:
        process: this process: its rank, its devices and its collectives.
        layout: its share of the work.
        plan: the batch arithmetic that follows from the layout.
        workload: the workload of the run.
        precision: the precision of the run.
        channels_last: whether convolutions use the NHWC memory format.
        compile: whether to `torch.compile` the model.
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
        """The device of this process; the first one, if it has several."""
        return self.process.devices[0]

    @property
    def collectives(self) -> Collectives:
        """The collectives of this process."""
        return self.process.collectives

    @property
    def rank(self) -> int:
        """The rank of this process; rank 0 writes the results."""
        return self.process.rank_info.rank

    @property
    def world_size(self) -> int:
        """The number of processes of the run."""
        return self.process.rank_info.world_size
