"""The base class of launchers, which start the processes of a run, or join processes that were already started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from runner.parallel.collectives import Collectives
from runner.session import Session
from runner.system.signals import before_training


class Launcher:
    """The base class of all launchers; by itself, it trains in the current process, on `devices`."""

    def __init__(self, devices: list[torch.device]):
        self.devices = devices

    @contextmanager
    def connect(self) -> Iterator[Collectives]:
        """Yield the collectives of this process, for the checks before training.

        If `launch` starts the ranks, they are those of rank 0, not yet connected to the others. If torchrun or SLURM
        has started this process, it joins the process group.
        """
        before_training()
        yield Collectives(self.devices)

    def launch(
        self, train: Callable[[], Any], train_rank: Callable[[Collectives], Any], session: Session, directory: Path
    ) -> Any:
        """Train, in this process or in ranks that are started, and return the result of rank 0 or of this process.

        Args:
            train: function that trains in this process; called by launchers that do not start the ranks.
            train_rank: picklable function of the collectives, called in each rank that a launcher starts.
            session: the session of this process.
            directory: the run directory. A started rank N > 0 writes its output to its file `log_rank_N.txt`.

        Raises:
            ConfigError: if torch or a rank rejects the config.
            RankError: if a rank that the launcher has started fails, dies or hangs.
        """
        return train()
