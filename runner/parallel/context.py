"""The information about a run that is passed to a parallel mode, which has no access to the `Run` itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from runner.batching import Plan
from runner.parallel.collectives import Collectives
from runner.parallel.launch.cluster import RankInfo
from runner.parallel.pipelining.block_time import TimeBlock, measured_seconds
from runner.precision import Precision
from runner.workloads.base import Workload


class Process(NamedTuple):
    """A process of a run.

    Args:
        rank_info: the rank of the process.
        devices: the devices on which the process computes; the first one holds the batches and the metrics.
        collectives: the collectives that connect the process to the other processes.
        shared_state: memory that the launcher has allocated and that all processes of this machine share; None if the
            parallel mode needs no shared memory.
    """

    rank_info: RankInfo
    devices: list[torch.device]
    collectives: Collectives
    shared_state: Any = None


class Layout(NamedTuple):
    """Which data, seed and random numbers one process uses; the defaults describe a run with a single process."""

    data_shard: tuple[int, int] = (0, 1)
    """(index, count): every global batch is divided into `count` shards, and the process trains on shard `index`."""
    step_shard: tuple[int, int] = (0, 1)
    """(index, count): the process trains on every `count`-th global batch, starting with batch `index`."""
    eval_shard: tuple[int, int] = (0, 1)
    """(index, count): the held-out data is divided into `count` shards, and the process evaluates shard `index`."""
    seed_offset: int = 0
    """A number that is added to the run's seed; 0, unless the processes train different models."""
    reads_batches: bool = True
    """Whether the process needs the samples of the batches; a stage in the middle of a pipeline does not."""
    rng_stream: int = 0
    """The index of the random number stream that the process uses after the initialization of the weights."""
    num_members: int = 0
    """The number of models that evaluations measure one by one, besides their vote; 0 if there is a single model."""
    non_equivalence_reason: str = ""
    """Why the results differ from those of a single device; empty if the results are the same up to rounding."""

    @staticmethod
    def data_parallel(rank_info: RankInfo) -> Layout:
        """Return the layout in which every process trains and evaluates on its own shard of the samples."""
        shard = (rank_info.rank, rank_info.world_size)
        return Layout(data_shard=shard, eval_shard=shard, rng_stream=rank_info.rank)


@dataclass(frozen=True)
class Context:
    """The information about a run that a parallel mode needs in one process.

    Args:
        process: this process: its rank, its devices and its collectives.
        layout: which data, seed and random numbers this process uses.
        plan: which samples are in each micro-batch of this process.
        workload: the workload of the run.
        precision: the precision of the run.
        channels_last: whether convolutions use the NHWC memory format.
        compile: true to compile the model as a whole with `torch.compile`; `blocks` to compile each of its blocks;
            false to compile nothing.
        time_block: function that takes the arguments of `measured_seconds`, and returns the time of the forward and
            backward pass of a block. Modes that split a network into stages choose the stages from these times. In
            `runner.planning.fake_step`, where tensors have no values, the function returns the number of floating-point
            operations in place of the time.
    """

    process: Process
    layout: Layout
    plan: Plan
    workload: Workload
    precision: Precision
    channels_last: bool = False
    compile: bool | str = False
    time_block: TimeBlock = measured_seconds

    @property
    def device(self) -> torch.device:
        """The device of this process; the first one if the process has several."""
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

    @property
    def eval_metrics(self) -> dict[str, str]:
        """The evaluation metrics by which the run may end early (see `Workload.eval_metrics`), in this mode."""
        listed, count = self.workload.eval_metrics(), self.layout.num_members
        members = {f"member_{i}/{name}": goal for i in range(count) for name, goal in listed.items()}
        return listed | members | ({"disagreement": "min"} if count and self.workload.outputs_are_scores else {})
