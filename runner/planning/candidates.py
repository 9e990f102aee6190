"""The ways to train a run that `runner tune` compares, and how each of them affects the results of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from runner.config.errors import ConfigError
from runner.config.options import option_files
from runner.config.overrides import override_key
from runner.config.schema import component_fields, option_fields
from runner.device import default_threads
from runner.model.base import without_memory
from runner.parallel.base import Parallel
from runner.parallel.compiling import modules_of_blocks
from runner.parallel.multiprocess import MultiProcess
from runner.parallel.pipeline import Pipeline
from runner.parallel.pipelining.schedules import SCHEDULES
from runner.planning.planned_session import first_process, prepared
from runner.precision import TF32, BFloat16
from runner.run import Run
from runner.session import Session
from runner.system.cpu import usable_core_numbers

BITWISE, LAST_BITS, ROUNDING = "bitwise", "last bits", "rounding"
SIXTEEN_BITS, STATISTICS, ASYNCHRONOUS, OTHER = "16 bits", "statistics", "asynchronous", "other"

RESULTS = {
    BITWISE: "the same numbers",
    LAST_BITS: "the same sums in another order, as with another number of threads",
    ROUNDING: "products of fewer bits (TF32)",
    SIXTEEN_BITS: "16-bit arithmetic",
    STATISTICS: "batch normalization sees other groups of samples",
    ASYNCHRONOUS: "workers do not wait for each other",
    OTHER: "something else is trained",
}
"""The kinds of effect that a candidate may have on the results of a run, with a description of each kind."""

ALLOWED = (BITWISE, LAST_BITS)
"""The kinds of effect in `RESULTS` that need no permission from the user."""

PERMISSIONS = {"rounding": ROUNDING, "16bit": SIXTEEN_BITS, "statistics": STATISTICS, "asynchronous": ASYNCHRONOUS}
"""The kinds of effect that a user may allow in addition to `ALLOWED`, by the name to type."""

_BITWISE_KEYS = ("data.workers", "data.prefetch", "data.pin_memory", "model.checkpoint_activations")

Compose = Callable[[Sequence[str]], Run]
Overrides = tuple[str, ...]


class Candidate(NamedTuple):
    """A way to train a run.

    Args:
        overrides: the overrides to add to those of the run; empty for the baseline.
        run: the run with these overrides; None if it is refused.
        session: the session of rank 0 of this run, without data; None if it is refused.
        results: how the candidate affects the results of the run, a key of `RESULTS`; empty if the run is refused.
        refusal: why the run is refused; empty if it is not.
    """

    overrides: Overrides
    run: Run | None = None
    session: Session | None = None
    results: str = ""
    refusal: str = ""


class Group(NamedTuple):
    """Candidates that differ in one respect, such as the parallel mode.

    Args:
        name: the name of the group.
        options: function that takes the fastest run so far, and returns the overrides to try with it.
        is_expensive: whether a candidate takes long to start, as a compiled one does.
    """

    name: str
    options: Callable[[Run], list[Overrides]]
    is_expensive: bool = False


class Candidates:
    """The ways to train a run that are worth measuring. An option that the user has typed is kept.

    Args:
        compose: function that takes further overrides, and returns the run with them; it may raise ConfigError.
        typed: the overrides of the run.
        config_dir: a directory with the user's option files, which may define parallel modes; None if there is none.

    Raises:
        ConfigError: if the run is refused without further overrides.
    """

    def __init__(self, compose: Compose, typed: Sequence[str], config_dir: str | None = None):
        self._compose, self._config_dir = compose, config_dir
        self._keys = {override_key(text).partition("@")[0] for text in typed}
        self.base = compose(())
        self._session = prepared(self.base)
        self._on_cpu = self._session.device.type == "cpu"
        self._cores = len(usable_core_numbers())
        model = without_memory(self.base.workload.build_model)
        modules = list(model.modules())
        self._normalizes = any(isinstance(module, _BatchNorm) for module in modules)
        self._convolves = any(isinstance(module, torch.nn.Conv2d) for module in modules)
        self._compiles_blocks = bool(modules_of_blocks(model))

    def judged(self, overrides: Overrides) -> Candidate:
        """Return the candidate with `overrides`; if a check fails, its `refusal` says why. No data is read."""
        try:
            run = self._compose(overrides)
            session = run.session(first_process(run))
            run.workload.check_plan(session.plan)
            run.precision.check_device(session.device)
            run.parallel.check(replace(session, workload=self.base.workload))  # whose data has been read
        except ConfigError as error:
            return Candidate(overrides, refusal=" ".join(str(error).split()))
        return Candidate(overrides, run, session, self._results(run, session, overrides))

    def _results(self, run: Run, session: Session, overrides: Overrides) -> str:
        base, before = self.base, self._session
        if _difference(run, session) != _difference(base, before):
            return ASYNCHRONOUS if session.plan.steps_per_round > 1 else OTHER
        acts = "env" in component_fields(type(run.workload))
        if acts and session.plan.num_data_ranks != before.plan.num_data_ranks:
            return OTHER  # each process trains on transitions from its own environments
        if self._normalizes and _normalized_together(run, session) != _normalized_together(base, before):
            return STATISTICS
        if type(run.precision) is not type(base.precision):
            other = ROUNDING if isinstance(run.precision, TF32) else OTHER
            return SIXTEEN_BITS if isinstance(run.precision, BFloat16) else other
        keys = {text.partition("=")[0] for text in overrides}
        other_threads = "data.workers" in keys and self._on_cpu and run.device.threads is None
        return BITWISE if keys <= set(_BITWISE_KEYS) and not other_threads else LAST_BITS

    def groups(self) -> list[Group]:
        """Return the groups in the order in which they are tried: compiled candidates come last."""
        precisions = ["bf16"] if self._on_cpu else ["tf32", "bf16", "16"]
        data = getattr(self.base.workload, "data", None)
        loads = data is not None and "workers" in option_fields(type(data))
        workers = sorted({0, 1, max(1, self._cores // 2), self._cores}) if loads else []
        compiled = [False, True, *(["blocks"] if self._compiles_blocks else [])]
        return [
            self._values("precision", precisions),
            Group("mode", lambda run: self._modes()),
            Group("pipeline", self._pipelines),
            self._values("channels_last", [True, False] if self._convolves else []),
            self._values("accumulation", [1, 2, 4]),
            self._values("data.workers", workers),
            self._values("compile", compiled)._replace(is_expensive=True),
        ]

    def _values(self, key: str, values: Sequence[Any]) -> Group:
        options = [(f"{key}={str(value).lower()}",) for value in values if self._is_free(key)]
        return Group(key, lambda run: options)

    def _is_free(self, key: str) -> bool:
        """Return whether the user has typed neither `key` nor, if it is a config group, an option of it."""
        return not any(typed == key or typed.startswith(f"{key}.") for typed in self._keys)

    def _modes(self) -> list[Overrides]:
        """Return overrides that choose a parallel mode with a number of processes, or a number of threads.

        The numbers of threads and processes are powers of two up to the number of cores or GPUs.
        """
        base, free = self.base.parallel, self._is_free("parallel")
        single: Overrides = () if type(base) is Parallel else ("parallel=single",)
        threads: list[Overrides] = []
        counts = [2**power for power in range(9) if 2**power <= self._cores]
        if self._on_cpu and self._is_free("device.threads") and (free or not isinstance(base, MultiProcess)):
            default = default_threads(self._session.device, self.base.workload.num_data_workers)
            threads = [(*single, f"device.threads={count}") for count in reversed(counts) if count != default]
        most = self._cores if self._on_cpu else torch.cuda.device_count()
        modes: list[Overrides] = [()]
        if free:
            folders = [] if self._config_dir is None else [Path(self._config_dir).expanduser()]
            modes = [(f"parallel={name}",) for name in option_files(*folders)["parallel"]]
        counts = [2**power for power in range(1, 9) if 2**power <= most]
        processes = [words for count in counts for mode in modes for words in self._processes(mode, count)]
        in_turn = [words for pair in zip_longest(processes, threads) for words in pair if words is not None]
        return [*([single] if free and single else []), *in_turn]

    def _processes(self, mode: Overrides, count: int) -> list[Overrides]:
        """Return overrides for `count` processes of a mode; none if the mode has a single process."""
        try:
            parallel = self._compose(mode).parallel
        except ConfigError:
            return []
        if not (isinstance(parallel, MultiProcess) and parallel.in_processes and self._is_free("parallel.processes")):
            return []
        if parallel == self.base.parallel and count == self._session.world_size:
            return []  # the baseline
        words = (*mode, f"parallel.processes={count}")
        synchronized = "sync_batch_norm" in option_fields(type(parallel)) and self._is_free("parallel.sync_batch_norm")
        return [words, *([(*words, "parallel.sync_batch_norm=true")] if synchronized and self._normalizes else [])]

    def _pipelines(self, run: Run) -> list[Overrides]:
        """Return overrides for the other schedules of a pipeline, and for half and twice as many micro-batches."""
        if not isinstance(run.parallel, Pipeline):
            return []
        found: list[Overrides] = []
        if self._is_free("parallel.schedule") and run.parallel.in_processes:
            found += [(f"parallel.schedule={schedule}",) for schedule in SCHEDULES]
        if self._is_free("parallel.split_size") and self._is_free("parallel.num_micro_batches"):
            plan = run.session(first_process(run)).plan
            size = plan.chunk_size
            found += [(f"parallel.split_size={each}",) for each in (2 * size, size // 2) if each]
        return found


def _difference(run: Run, session: Session) -> str:
    return run.parallel.difference if session.world_size > 1 else ""


def _normalized_together(run: Run, session: Session) -> tuple[int, int, bool]:
    """Return into how many groups batch normalization divides a step, in a form that can be compared between runs.

    Returns:
        (shards of a batch, normalized one by one pieces of each shard, whether a piece is that of all shards).
    """
    shards = session.plan.data_shard[1]
    pieces = session.plan.accumulation * session.plan.chunks
    synchronizes = bool(getattr(run.parallel, "sync_batch_norm", False)) and shards > 1
    return (1, 1, False) if synchronizes and pieces == 1 else (shards, pieces, synchronizes)
