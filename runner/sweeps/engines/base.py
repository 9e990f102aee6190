"""The interface of engines, which run the jobs of a sweep. Each job is a command, `python -m runner OVERRIDES`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from runner.config.errors import ConfigError, check
from runner.config.limits import NonNegativeInt, NumThreads, Range
from runner.system.import_path import is_installed


class Demand(NamedTuple):
    """The processes that train, the GPUs, and the CPU threads of each process that a job needs."""

    processes: int = 1
    gpus: int = 0
    threads: int | None = None  # the engine chooses the number


class Job(NamedTuple):
    number: int  # from 0
    arguments: list[str]  # of its command, `python -m runner`
    console: Path  # the file to which the command prints
    demand: Demand = Demand()
    earlier: str = ""  # what `submit` returned for it in a command that was killed; anybody may have written it
    is_changed: bool = False  # whether its config has changed since then
    overrides: Sequence[str] = ()  # they are also among the arguments
    directory: Path = Path()  # its run directory
    config_hash: str = ""
    refusal: str = ""  # the error message, if the config is already known to be invalid
    stack_key: str = ""  # jobs with the same one can be computed together; empty: only alone


class Ended(NamedTuple):
    number: int
    code: int | None  # negative if a signal killed it (-9 for SIGKILL); None: unknown
    reason: str = ""  # why it is unknown, for example because the machine has failed


class Pool(AbstractContextManager["Pool"]):
    """The running jobs of a sweep: a context, at whose end those that still run are killed."""

    def __exit__(self, *_: object) -> None:
        self.kill()

    def has_room(self) -> bool:
        """Return False if no job can start now, however little it needs. If True, `submit` may still return None."""
        return True

    @abstractmethod
    def submit(self, job: Job) -> str | None:
        """Start `job`, or take over the process that a killed command started for it.

        Return its devices or queue entry, as the user sees them, for example `GPU 0`; None if it cannot start yet.

        Raises:
            ConfigError: if the job can never run here, because it needs more resources than there are.
        """

    def stack_size(self, count: int) -> int:
        """Return how many jobs to submit together, of `count` that can be computed together."""
        return 1

    def submit_stack(self, jobs: Sequence[Job]) -> str | None:
        """Start several jobs in one process, which computes them together; otherwise, as `submit`."""
        raise NotImplementedError(f"{type(self).__name__} runs each job by itself")

    @abstractmethod
    def wait(self, seconds: float) -> list[Ended]:
        """Return the jobs that have ended since the last call. If none has, wait for one, but at most `seconds`.

        Raises:
            ConfigError: if a cluster rejects the first jobs, probably because of an invalid option.
        """

    @abstractmethod
    def stop(self, numbers: list[int]) -> None:
        """Ask the jobs with these numbers to save a checkpoint and to exit with code 75."""

    @abstractmethod
    def kill(self) -> None:
        """Kill all jobs immediately, without saving."""


MAX_TRIALS = 10_000
"""The maximum number of trials of a search."""

MAX_STACK = 256
"""The maximum number of jobs that are computed together."""

_ONLY_IN_SEARCH = ("trials", "seeds", "prune", "sampler_seed")
"""Options that have no effect without a search."""


@dataclass
class Engine(ABC):
    """The options of a sweep, which conf/sweep/_sweep.yaml describes, and the engine that runs its jobs."""

    retries: Annotated[int, Range(least=0, most=1000)] = 0
    fail_fast: bool = False
    search: Literal["random", "tpe", "grid"] | None = None
    trials: Annotated[int, Range(least=1, most=MAX_TRIALS)] = 20
    seeds: Annotated[int, Range(least=1, most=100)] = 1
    metric: str | list[str] | None = None
    goal: Literal["min", "max"] | list[Literal["min", "max"] | None] | None = None
    prune: Literal["median", "halving"] | None = None
    sampler_seed: NonNegativeInt = 0
    stack: Annotated[int, Range(least=1, most=MAX_STACK)] | Literal["auto"] = 1

    def __post_init__(self) -> None:
        if self.search is not None and not is_installed("optuna"):
            remedy = "pip install optuna, or sweep.search=null to run all combinations of listed values"
            raise ConfigError("search", self.search, "it needs Optuna, which is not installed", remedy)
        if self.stack != 1 and not is_installed("greenlet"):
            why, remedy = "it needs greenlet, which is not installed", "pip install greenlet, or sweep.stack=1"
            raise ConfigError("stack", self.stack, why, remedy)
        for key in _ONLY_IN_SEARCH if self.search is None else ():
            given, default = getattr(self, key), getattr(Engine, key)
            check(given == default, key, given, "only a search has this option", "add sweep.search=tpe")
        if self.search == "grid" and self.trials != Engine.trials:
            why = "sweep.search=grid tries all combinations"
            raise ConfigError("trials", self.trials, why, "leave it out, or sweep.search=random")

    def prepare(self, *modules: str) -> None:
        """Begin slow preparations for the first job, such as the import of `modules`, which the jobs need."""

    def demand_elsewhere(self, threads: int | None) -> Demand | None:
        """Return the demand of a job that needs devices that this machine, perhaps a login node, does not have; None if
        the engine runs jobs only here.

        Raises:
            ConfigError: if the option for the number of GPUs is not set.
        """

    @abstractmethod
    def connect(self, num_jobs: int, path: Path) -> AbstractContextManager[Pool]:
        """Return the pool for the sweep in `path`, as a context.

        Raises:
            ConfigError: if the engine cannot be used, for example because a package is not installed.
        """


class Resources(NamedTuple):
    """The numbers of cores and GPUs to request for a job, and the number of CPU threads of each of its processes."""

    cores: int
    gpus: int
    threads: int


@dataclass
class ClusterEngine(Engine):
    """An engine whose jobs may run on other machines. It requests a core for each thread of each process."""

    threads: NumThreads = 1
    gpus: Annotated[int, Range(least=0, most=1024)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        why, remedy = "on other machines, each job is computed alone", "leave it out, or sweep=local"
        check(self.stack == 1, "stack", self.stack, why, remedy)

    def demand_elsewhere(self, threads: int | None) -> Demand | None:
        why = "this machine does not have the devices of the jobs, so it is not known how many GPUs each needs"
        check(self.gpus is not None, "sweep.gpus", None, why, "for example sweep.gpus=1")
        return Demand(1, self.gpus or 0, threads)

    def resources(self, demand: Demand) -> Resources:
        """Return the resources to request for a job, with enough cores for at least one process per GPU."""
        gpus = demand.gpus if self.gpus is None else self.gpus
        threads = demand.threads or self.threads
        return Resources(max(demand.processes, gpus) * threads, gpus, threads)
