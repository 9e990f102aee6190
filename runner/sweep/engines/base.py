"""The interface of engines, which run the jobs of a sweep. Each job is a command, `python -m runner OVERRIDES`.

An `Engine` holds the options of a file in conf/sweep/. Its `Pool` manages the jobs while a sweep runs. The scheduler
and a job exchange only strings and exit codes, so that no job can affect another job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from runner.config.errors import check, check_choice, check_range


class Demand(NamedTuple):
    """The processes, GPUs and CPU threads that a job needs.

    Args:
        processes: the number of processes that train.
        gpus: the number of GPUs; 0 if the job trains on the CPU.
        threads: the number of CPU threads of each process; None: the engine chooses the number.
    """

    processes: int = 1
    gpus: int = 0
    threads: int | None = None


class Job(NamedTuple):
    """A job of a sweep.

    Args:
        number: the number of the job, starting at 0.
        arguments: the command-line arguments of the job.
        console: the file for everything that the command prints.
        demand: the processes, GPUs and CPU threads that the job needs.
    """

    number: int
    arguments: list[str]
    console: Path
    demand: Demand


class Started(NamedTuple):
    """The place where a job was started.

    Args:
        slot: the devices or the queue entry of the job, as the user sees them, for example `GPU 0`.
        pid: the ID of the job's process on this machine; 0 if the job was not started as a process of this machine.
    """

    slot: str
    pid: int = 0


class Ended(NamedTuple):
    """The end of a job.

    Args:
        number: the number of the job.
        code: the exit code of the command; negative if a signal killed the command (-9 for SIGKILL); None if the engine
            does not know it, for example because the machine failed. The result in the run directory may then show
            how the job ended.
        reason: why there is no exit code, as far as the engine knows.
    """

    number: int
    code: int | None
    reason: str = ""


class Pool(ABC):
    """The running jobs of a sweep."""

    def has_room(self) -> bool:
        """Return False if the pool knows that no job can start now, however few resources it needs.

        If the result is True, `submit` may still return None. The default implementation always returns True.
        """
        return True

    @abstractmethod
    def submit(self, job: Job) -> Started | None:
        """Start `job`, and return the place where it was started; None if it cannot be started yet.

        Raises:
            ConfigError: if the job can never run here, because it needs more resources than there are.
        """

    def adopt(self, job: Job, started: Started) -> bool:
        """Try to take over `job`, which an earlier command started, and return whether this succeeded.

        A job can be taken over while it is still running. `wait` later returns its end. The default implementation
        takes over no jobs.

        Args:
            job: the job. Only its number and its console are valid.
            started: the place where the earlier command started the job, as read from the file `sweep.json`. A subclass
                must check this value before using it, because anybody may have written the file.
        """
        return False

    @abstractmethod
    def wait(self, seconds: float) -> list[Ended]:
        """Return the jobs that have ended since the last call.

        If no job has ended, wait until one does, but at most `seconds` seconds.

        Raises:
            ConfigError: if a cluster rejects the first jobs, probably because of an invalid option.
        """

    @abstractmethod
    def stop(self, numbers: list[int]) -> list[int]:
        """Ask jobs to save a checkpoint and to exit with code 75; return the numbers of jobs that cannot be asked.

        Jobs that cannot be asked keep running, and `wait` does not return their ends.

        Args:
            numbers: the numbers of the jobs.
        """

    @abstractmethod
    def kill(self) -> None:
        """Kill all jobs immediately, without saving, except jobs that an earlier command started."""


MOST_TRIALS = 10_000
"""The maximum number of trials of a search."""

_ONLY_IN_SEARCH = ("trials", "seeds", "metric", "goal", "prune", "sampler_seed")
"""Options that have no effect without a search."""


@dataclass
class Engine(ABC):
    """The options of a sweep, and the engine that runs its jobs.

    Args:
        retries: how many times a job that crashed or was lost is started again; it resumes from its last checkpoint.
        on_failure: what happens to the other jobs when a job fails: `continue` runs them; `stop` starts no more jobs,
            and lets the running jobs save a checkpoint and exit.
        search: how a search chooses combinations of values: `random`, `tpe` or `grid`; None: all combinations are run,
            without a search.
        trials: the number of combinations that a search tries.
        seeds: the number of seeds with which a search runs each combination; the search compares the mean over seeds.
        metric: the TensorBoard tag of the metric whose last value a search compares. None: the search compares the best
            value of the metric by which the workload selects its best checkpoint.
        goal: `min` if smaller values of `metric` are better, `max` if larger values are better. None: the workload
            determines the goal; this works only for the metric by which the workload selects its best checkpoint.
        prune: how a search chooses unpromising jobs and stops them: `median` or `halving`; None: no job is stopped.
        sampler_seed: the seed of the sampler of a search.
        detach: whether the sweep runs in the background, and continues when the terminal is closed.
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
        for key in _ONLY_IN_SEARCH if self.search is None else ():
            given, default = getattr(self, key), getattr(Engine, key)
            check(given == default, key, given, "only a search has this option", "add sweep.search=tpe")
        check_range(self, "trials", least=1, most=MOST_TRIALS)
        check_range(self, "seeds", least=1, most=100)
        check_range(self, "sampler_seed", least=0, most=2**31 - 1)
        if self.goal is not None:
            check_choice(self, "goal", ("min", "max"))
        if self.prune is not None:
            check_choice(self, "prune", ("median", "halving"))

    def prepare(self, overrides: Sequence[str] = (), config_dir: str | None = None) -> None:
        """Start slow preparations in the background before the first job starts.

        The default implementation does nothing.

        Args:
            overrides: overrides of the first job; empty if they are not known. An engine may compose the config of this
                job ahead of time. The other jobs then start faster, too, because most of their options are the same.
            config_dir: the directory of `--config-dir`; None if the flag was not typed.
        """

    def demand_elsewhere(self, threads: int | None) -> Demand | None:
        """Return the demand of a job that needs devices that this machine does not have.

        The job may still run on another machine, for example if this machine is the login node of a cluster. If the
        engine runs jobs only on this machine, return None.

        Args:
            threads: the number of CPU threads of each process; None: the engine chooses the number.

        Raises:
            ConfigError: if the engine can run the job on another machine, but its option for the number of GPUs is not
                set.
        """
        return None

    @abstractmethod
    def connect(self, num_jobs: int, path: Path) -> AbstractContextManager[Pool]:
        """Return a context manager that yields the pool. At the end of the context, `Pool.kill` is called.

        Args:
            num_jobs: the number of jobs in the sweep.
            path: the directory of the sweep.

        Raises:
            ConfigError: if the engine cannot be used, for example because a package is not installed.
        """
