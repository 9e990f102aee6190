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
            example because the machine of the job was lost; the result in its run directory may tell.
        reason: what the engine knows about an end without an exit code.
    """

    number: int
    code: int | None
    reason: str = ""


class Pool(ABC):
    """The running jobs of a sweep."""

    def has_room(self) -> bool:
        """Return whether a small job could start now."""
        return True

    @abstractmethod
    def submit(self, job: Job) -> Started | None:
        """Start `job`, and return where; None if the job has to wait until others end.

        Raises:
            ConfigError: if the job cannot ever run here, because it needs more than there is.
        """

    def adopt(self, job: Job, started: Started) -> bool:
        """Return whether `job`, which an earlier command started, still runs; if so, `wait` will return its end.

        Args:
            job: the job.
            started: where the earlier command started it, according to the ledger, which anybody may have written.
        """
        return False

    @abstractmethod
    def wait(self, seconds: float) -> list[Ended]:
        """Return the jobs that have ended since the last call; wait up to `seconds` for one to end."""

    @abstractmethod
    def stop(self, numbers: list[int]) -> list[int]:
        """Ask these jobs to save a checkpoint and to exit with code 75; return those that cannot be asked.

        Those that cannot be asked run on; `wait` does not return their ends.
        """

    @abstractmethod
    def kill(self) -> None:
        """End all jobs at once, without saving, except those that an earlier command started."""


@dataclass
class Engine(ABC):
    """The options of a sweep, and the engine that runs its jobs.

    Args:
        retries: how often a job is started again after it crashed, or was lost; its checkpoints are resumed.
        on_failure: `continue` with the other jobs after a job failed, or `stop`: let the running jobs save and exit.
        search: how the values are searched: `random`, `tpe` or `grid`; None: all combinations are run.
        trials: number of combinations that a search tries.
        seeds: number of seeds with which a search runs each combination; their mean is compared.
        metric: what a search compares, by its TensorBoard tag; None: the best value of the workload's best metric.
        goal: whether the `min` or the `max` of `metric` is best; None: as the workload says.
        prune: how a search finds the jobs that are not worth finishing: `median` or `halving`; None: it finishes all.
        sampler_seed: seed of the sampler of a search.
        detach: whether the sweep runs in the background, and survives the terminal.
    """

    retries: int = 0
    on_failure: str = "continue"
    search: str | None = None
    trials: int = 20
    seeds: int = 1
    metric: str | None = None
    goal: str | None = None
    prune: str | None = None
    sampler_seed: int = 0
    detach: bool = False

    def __post_init__(self) -> None:
        check_range(self, "retries", least=0, most=1000)
        check_choice(self, "on_failure", ("continue", "stop"))
        if self.search is not None:
            check_choice(self, "search", ("random", "tpe", "grid"))
        check_range(self, "trials", least=1, most=10_000)
        check_range(self, "seeds", least=1, most=100)
        check_range(self, "sampler_seed", least=0, most=2**31 - 1)
        if self.goal is not None:
            check_choice(self, "goal", ("min", "max"))
        if self.prune is not None:
            check_choice(self, "prune", ("median", "halving"))

    def prepare(self) -> None:
        """Begin in the background what takes long, while the jobs are planned."""

    @abstractmethod
    def connect(self, num_jobs: int, path: Path) -> AbstractContextManager[Pool]:
        """Return a context manager that yields the pool, and ends all of its processes when it is left.

        Args:
            num_jobs: number of jobs of the sweep.
            path: the directory of the sweep.

        Raises:
            ConfigError: if the engine is not available.
        """
