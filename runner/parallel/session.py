"""A run as one of its processes sees it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from runner.batching import Plan
from runner.config import user_code
from runner.config.errors import ABSENT, check
from runner.parallel.collectives import Collectives
from runner.parallel.compiling import compile_whole
from runner.precision import Precision
from runner.workloads.base import Workload


@dataclass(frozen=True)
class Session:
    """What one process knows of its run: its devices, its part of the work, and how long the run is.

    A session has no reference to the `Run`, so that parallel modes depend on nothing else of it.

    Args:
        plan: which samples are in the micro-batches of this process, and from which seeds it draws.
        num_steps: number of optimizer steps of the whole run; 0 if nothing is trained.
        eval_every, save_every: number of steps between evaluations, and between checkpoints; 0: only at the end.
        steps_per_epoch: number of steps of one pass over the training data; None if the workload has no epochs.
        reads_parameters: whether a loss or a step of the user's reads parameters outside of the network's forward pass.
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
    reads_parameters: bool = False

    @property
    def rank(self) -> int:
        return self.collectives.rank

    @property
    def world_size(self) -> int:
        return self.collectives.world_size

    @property
    def devices(self) -> list[torch.device]:
        """The devices on which this process computes; the first one holds the batches and the metrics."""
        return self.collectives.devices

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    @property
    def eval_metrics(self) -> dict[str, str]:
        """The evaluation metrics by which the run may end early (see `Workload.eval_metrics`), in this mode."""
        listed, count = self.workload.eval_metrics(), self.plan.num_members
        members = {f"member_{i}/{name}": goal for i in range(count) for name, goal in listed.items()}
        return listed | members | ({"disagreement": "min"} if count and self.workload.outputs_are_scores else {})

    def batches(self, model: torch.nn.Module, after_step: int) -> Iterator[Any]:
        """Yield the micro-batches of this process for all steps after `after_step`; None for each if it needs none."""
        if not self.plan.reads_batches:
            return itertools.repeat(None)
        network: Any = model  # by which agents act; calling compiled code takes as long as such a forward pass on a CPU
        if self.compile == "step" and self.device.type != "cpu":
            network = compile_whole(model, self.device)
        return self.workload.batches(network, self.plan, after_step, self.device)

    def check_same_samples(self) -> None:
        """Raise a `ConfigError`, on every rank, if a process has other samples than the first; called on every rank."""
        first, *others = self.collectives.all_gather(self.workload.samples_identity())
        for rank, other in enumerate(others, start=1):
            why = f"process {rank} has other samples than process 0: what the code returns depends on the process"
            remedy = "seed what it draws, and let no order depend on a set or on the names of files as they are found"
            check(other == first, "data", user_code.given().names().get("data", ABSENT), why, remedy)

    def is_due(self, every: int, step: int) -> bool:
        """Return whether an action that is due every so many steps is due in the iteration that ends with `step`.

        Every action is due after the last step of the run; with `every=0`, only then.
        """
        return step == self.num_steps or (bool(every) and step % every < self.plan.steps_per_round)
