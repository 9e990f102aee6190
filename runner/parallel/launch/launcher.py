"""Where a run's processes come from; the base is a run of one process, this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from runner.parallel.collectives import Collectives
from runner.parallel.context import Context, Process
from runner.parallel.launch.cluster import RankInfo


class Launcher:
    """Trains in this process.

    Args:
        devices: of this process.
    """

    def __init__(self, devices: list[torch.device]):
        self.devices = devices

    @contextmanager
    def connect(self) -> Iterator[Process]:
        """A context that gives this process, before anything is trained: as rank 0 where it will start the others.

        Where another launcher has started it, it joins the others here, and leaves them at the end.
        """
        yield Process(RankInfo(), self.devices, Collectives())

    def launch(
        self, train: Callable[[], Any], train_rank: Callable[[Process], Any], context: Context, directory: Path
    ) -> Any:
        """Train in every process of the run; returns rank 0's result.

        Args:
            train: trains in this process, where it is one of the run's.
            train_rank: trains in a process that is started here; picklable.
            context: this process's.
            directory: the run's; ranks that are started here write what they print to `log_rank_N.txt` in it.

        Raises:
            RankError: when one of several processes fails, dies or hangs.
        """
        return train()
