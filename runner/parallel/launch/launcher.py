"""The base class of launchers, which start or join the processes of a run. This one trains in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from runner.parallel.collectives import Collectives
from runner.parallel.context import Context, Process
from runner.parallel.launch.cluster import RankInfo
from runner.system.signals import before_training


class Launcher:
    """A launcher that trains in this process.

    Args:
        devices: devices of this process.
    """

    def __init__(self, devices: list[torch.device]):
        self.devices = devices

    @contextmanager
    def connect(self) -> Iterator[Process]:
        """Yield the `Process` that describes this process, for the checks before training.

        If the ranks are started later, by `launch`, this process is described as rank 0. If torchrun or SLURM has
        started this process, it joins the process group here.

        Raises:
            SystemExit: if a stop signal arrives before training begins.
        """
        before_training()
        yield Process(RankInfo(), self.devices, Collectives())

    def launch(
        self, train: Callable[[], Any], train_rank: Callable[[Process], Any], context: Context, directory: Path
    ) -> Any:
        """Train on every rank of the run, and return the result.

        A launcher that starts the ranks returns the result of rank 0; any other returns the result of this process.

        Args:
            train: trains in this process; called by launchers that do not start the ranks.
            train_rank: trains in the process that it gets as argument; called in each process that a launcher starts,
                so it must be picklable.
            context: context of this process.
            directory: the run directory. Started ranks write their output to `log_rank_N.txt` in it, except rank 0.

        Raises:
            RankError: if a rank that the launcher has started fails, dies or hangs.
        """
        return train()
