"""One process of a run, from its log to its result."""

from __future__ import annotations

from runner.record import LogFile
from runner.run import Result, Run
from runner.train import train


def session(run: Run) -> Result:
    """Train `run` in this process, one of those that do."""
    with LogFile(run.directory, run.parallel.rank):
        return train(run)
