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
        """Yield this process before training, as rank 0 if the launcher has yet to start the ranks.

        If torchrun or SLURM has started this process, it joins the process group here.

        Raises:
            SystemExit: if a stop signal arrives before training begins.
        """
        before_training()
        yield Process(RankInfo(), self.devices, Collectives())

    def launch(
        self, train: Callable[[], Any], train_rank: Callable[[Process], Any], context: Context, directory: Path
    ) -> Any:
        """Train on every rank of the run; return the result of this rank, or of rank 0 if the ranks are started here.

        Args:
            train: trains in this process, if this process is a rank of the run.
            train_rank: trains in a process that this launcher starts; picklable.
            context: context of this process.
            directory: the run directory; each started rank N > 0 writes its output to `log_rank_N.txt` in it.

        Raises:
            RankError: if one of the ranks that were started here fails, dies or hangs.
        """
        return train()
