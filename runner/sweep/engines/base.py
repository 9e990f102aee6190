"""The interface of engines, which run the jobs of a sweep. Each job is a command, `python -m runner OVERRIDES`.

An `Engine` holds the options of one file in conf/sweep/; while a sweep runs, its `Pool` holds the jobs. Only strings
and exit codes pass between the scheduler and a job, so that no job can change another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from runner.config.errors import check_choice, check_range


class Demand(NamedTuple):
    """What a job needs.

    Args:
        processes: number of processes that train.
        gpus: number of GPUs; 0 if the job computes on the CPU.
        threads: CPU threads of each process; None: as many as the engine gives it.
    """

    processes: int = 1
    gpus: int = 0
    threads: int | None = None


class Job(NamedTuple):
    """A job of a sweep.

    Args:
        number: the number of the job, from 0.
        arguments: the arguments of its command.
        console: the file for everything that the command prints.
        demand: what the job needs.
    """

    number: int
    arguments: list[str]
    console: Path
    demand: Demand


class Started(NamedTuple):
    """Where a job was started.

    Args:
        slot: the devices that it keeps, or its number in a queue; for the user.
        pid: its process on this machine; 0 if it runs elsewhere.
    """

    slot: str
    pid: int = 0


class Ended(NamedTuple):
    """The end of a job.

    Args:
        number: the number of the job.
        code: the exit code of its command; negative: the number of the signal that killed it; None: unknown, for
            example because the machine of the job was lost.
        reason: what the engine knows about an end without an exit code.
    """

    number: int
    code: int | None
    reason: str = ""


class Pool(ABC):
    """The running jobs of a sweep."""

    @abstractmethod
    def submit(self, job: Job) -> Started | None:
        """Start `job`, and return where; None if the job has to wait until others end.

        Raises:
            ConfigError: if the job cannot ever run here, because it needs more than there is.
        """

    @abstractmethod
    def wait(self, seconds: float) -> list[Ended]:
        """Return the jobs that have ended since the last call; wait up to `seconds` for one to end."""

    @abstractmethod
    def stop(self, numbers: list[int]) -> None:
        """Ask these jobs to save a checkpoint and to exit with code 75."""

    @abstractmethod
    def kill(self) -> None:
        """End all jobs at once, without saving."""


@dataclass
class Engine(ABC):
    """The options of a sweep, and the engine that runs its jobs.

    Args:
        retries: how often a job is started again after it crashed, or was lost; its checkpoints are resumed.
        on_failure: `continue` with the other jobs after a job failed, or `stop`: let the running jobs save and exit.
    """

    retries: int = 0
    on_failure: str = "continue"

    def __post_init__(self) -> None:
        check_range(self, "retries", least=0, most=1000)
        check_choice(self, "on_failure", ("continue", "stop"))

    @abstractmethod
    def connect(self, num_jobs: int, path: Path) -> AbstractContextManager[Pool]:
        """Return a context manager that yields the pool, and ends all of its processes when it is left.

        Args:
            num_jobs: number of jobs of the sweep.
            path: the directory of the sweep.

        Raises:
            ConfigError: if the engine is not available.
        """
