"""A run as one of its processes sees it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from runner.batching import Plan
from runner.parallel.collectives import Collectives
from runner.precision import Precision
from runner.workloads.base import Workload


@dataclass(frozen=True)
class Session:
    """What one process knows of its run: its devices, its part of the work, and how long the run is.

    A session has no reference to the `Run`, so that parallel modes depend on nothing else of it.

    Args:
        collectives: the rank and the devices of this process, and its connection to the other processes.
        plan: which samples are in the micro-batches of this process, and from which seeds it draws.
        workload: the workload of the run.
        precision: the precision of the run.
        channels_last: whether convolutions use the NHWC memory format.
        compile: true to compile the model as a whole with `torch.compile`; `blocks` to compile each of its blocks;
            false to compile nothing.
        num_steps: number of optimizer steps of the whole run; 0 if nothing is trained.
        eval_every: number of steps between evaluations; 0 to evaluate only at the end.
        save_every: number of steps between checkpoints; 0 to save only at the end.
        steps_per_epoch: number of steps of one pass over the training data; None if the workload has no epochs.
    """

    collectives: Collectives
    plan: Plan
    workload: Workload
    precision: Precision
    channels_last: bool = False
    compile: bool | str = False
    num_steps: int = 0
    eval_every: int = 0
    save_every: int = 0
    steps_per_epoch: float | None = None

    @property
    def rank(self) -> int:
        """The rank of this process; rank 0 writes the results."""
        return self.collectives.rank

    @property
    def world_size(self) -> int:
        """The number of processes of the run."""
        return self.collectives.world_size

    @property
    def devices(self) -> list[torch.device]:
        """The devices on which this process computes; the first one holds the batches and the metrics."""
        return self.collectives.devices

    @property
    def device(self) -> torch.device:
        """The first device of this process."""
        return self.devices[0]

    @property
    def eval_metrics(self) -> dict[str, str]:
        """The evaluation metrics by which the run may end early (see `Workload.eval_metrics`), in this mode."""
        listed, count = self.workload.eval_metrics(), self.plan.num_members
        members = {f"member_{i}/{name}": goal for i in range(count) for name, goal in listed.items()}
        return listed | members | ({"disagreement": "min"} if count and self.workload.outputs_are_scores else {})

    def batches(self, model: torch.nn.Module, after_step: int) -> Iterator[Any]:
        """Yield the micro-batches of this process for all steps after `after_step`; None for each if it needs none.

        Raises:
            ConfigError, DataError, EnvironmentBrokenError: as in `Workload.batches`.
        """
        if not self.plan.reads_batches:
            return itertools.repeat(None)
        return self.workload.batches(model, self.plan, after_step, self.device)

    def is_due(self, every: int, step: int) -> bool:
        """Return whether a periodic action, such as an evaluation, is due after the iteration that ends with `step`.

        It is due if it is due at one of the steps of the iteration. Every action is due after the last step of the run.

        Args:
            every: number of steps between two actions; 0 if the action is due only at the end.
            step: the last step of the iteration.
        """
        return step == self.num_steps or (bool(every) and step % every < self.plan.steps_per_round)
