"""The ways to train a run that `runner tune` compares, and how each of them affects the results of the run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from runner.config.errors import ConfigError
from runner.config.options import option_files
from runner.config.overrides import override_key
from runner.config.schema import component_fields, option_fields
from runner.model.base import structure
from runner.models.layers import normalizes_batches
from runner.parallel.base import Parallel
from runner.parallel.compiling import modules_of_blocks
from runner.parallel.multiprocess import MultiProcess
from runner.parallel.pipeline import Pipeline
from runner.parallel.pipelining.schedules import SCHEDULES
from runner.parallel.session import Session
from runner.planning.fake_step import first_process, prepared
from runner.precision import TF32
from runner.run import Run
from runner.system.cpu import usable_core_numbers

BITWISE, LAST_BITS, ROUNDING = "bitwise", "last bits", "rounding"
SIXTEEN_BITS, STATISTICS, ASYNCHRONOUS, OTHER = "16bit", "statistics", "asynchronous", "other"

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

PERMISSIONS = (ROUNDING, SIXTEEN_BITS, STATISTICS, ASYNCHRONOUS)
"""The kinds of effect in `RESULTS` that a user may allow in addition."""

Compose = Callable[[Sequence[str]], Run]
Overrides = tuple[str, ...]


@dataclass
class Candidate:
    """A way to train a run, and what is known of it.

    Args:
        overrides: the overrides to add to those of the run; empty for the baseline.
        run: the run with these overrides; None if it is refused.
        results: how the candidate affects the results of the run, a key of `RESULTS`; empty if the run is refused.
        status: `measured`, `not tried`, or the `status` of a `TrialError`.
        reason: why it was not measured.
        startup_seconds: seconds until its first step was done; it includes the compilation of the model.
        memory_bytes: sum of the peak memory of its processes.
        seconds: the seconds of an optimizer step in each round.
        ratios: the same, divided by the seconds of a step of the baseline in the same round; empty for the baseline.
    """

    overrides: Overrides
    run: Run | None = None
    results: str = ""
    status: str = "not tried"
    reason: str = ""
    startup_seconds: float = 0.0
    memory_bytes: float = 0.0
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """The median of the seconds of an optimizer step."""
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """The time of a step, divided by that of the baseline: the median over all rounds."""
        return statistics.median(self.ratios or [1.0])

    @property
    def uncertainty(self) -> float:
        """Twice the standard error of `ratio`, from the absolute deviations; 0.1 with fewer than three rounds."""
        if len(self.ratios) < 3:
            return 0.1 if self.ratios else 0.0
        spread = statistics.median(abs(each - self.ratio) for each in self.ratios)
        deviation = 1.4826 * spread  # of a normal distribution
        return 2 * 1.2533 * deviation / len(self.ratios) ** 0.5

    def is_faster_than(self, other: Candidate) -> bool:
        """Return whether the steps are clearly faster: by at least 1 %, and by more than the ratios are uncertain."""
        unclear = math.hypot(self.uncertainty, other.uncertainty)
        return other.ratio - self.ratio > max(0.01 * other.ratio, unclear)


class OptionGroup(NamedTuple):
    """Candidates that differ in one respect: `options` returns the overrides to try with the fastest run so far.

    `weight` is the share of the time that the group has, relative to the groups after it.
    """

    name: str
    options: Callable[[Run], list[Overrides]]
    weight: int = 1


class Candidates:
    """The ways to train a run that are worth measuring. An option that the user has typed is kept.

    `compose` returns the run with further overrides, or raises ConfigError; `typed` are the overrides of the run.
    """

    def __init__(self, compose: Compose, typed: Sequence[str]):
        self._compose = compose
        self._keys = {override_key(text).partition("@")[0] for text in typed}
        self.base = compose(())
        self._session = prepared(self.base)
        self._model = structure(self.base.workload.build_model)
        self._normalizes = normalizes_batches(self._model)

    def judged(self, overrides: Overrides) -> Candidate:
        """Return the candidate with `overrides`; if a check fails, its `reason` says why. No data is read."""
        try:
            run = self._compose(overrides)
            session = run.session(first_process(run))
            run.workload.check_plan(session.plan)
            run.precision.check_device(session.device)
            run.parallel.check(replace(session, workload=self.base.workload))  # whose data has been read
        except ConfigError as error:
            return Candidate(overrides, status="refused", reason=" ".join(str(error).split()))
        return Candidate(overrides, run, self._results(run, session) if overrides else BITWISE)

    def _results(self, run: Run, session: Session) -> str:
        base, before = self.base, self._session
        if _difference(run, session) != _difference(base, before):
            return ASYNCHRONOUS if session.plan.steps_per_round > 1 else OTHER
        acts = "env" in component_fields(type(run.workload))
        if acts and session.plan.num_data_ranks != before.plan.num_data_ranks:
            return OTHER  # each process trains on transitions from its own environments
        if self._normalizes and _normalized_together(run, session) != _normalized_together(base, before):
            return STATISTICS
        if type(run.precision) is not type(base.precision):
            return ROUNDING if isinstance(run.precision, TF32) else SIXTEEN_BITS
        return LAST_BITS

    def groups(self) -> list[OptionGroup]:
        """Return the groups in the order in which they are tried: compiled candidates, which start slowly, come last.

        The numbers of threads and processes are powers of two up to the number of cores or GPUs.
        """
        cores, on_cpu = len(usable_core_numbers()), self._session.device.type == "cpu"
        counts = [2**power for power in range(9) if 2**power <= (cores if on_cpu else torch.accelerator.device_count())]
        threads = [count for count in reversed(counts) if on_cpu and count != torch.get_num_threads()]
        has_images = any(isinstance(module, torch.nn.Conv2d) for module in self._model.modules())
        data = getattr(self.base.workload, "data", None)
        loads = data is not None and "workers" in option_fields(type(data))
        return [
            *self._values("precision", ["bf16"] if on_cpu else ["tf32", "bf16", "16"]),
            OptionGroup("parallel", lambda run: self._modes(counts[1:]), weight=4),
            OptionGroup("pipeline", self._pipelines, weight=2),
            *self._values("device.threads", threads),
            *self._values("channels_last", [not self.base.channels_last] if has_images else []),
            *self._values("accumulation", [1, 2, 4]),
            *self._values("data.workers", sorted({0, 1, max(1, cores // 2), cores}) if loads else []),
            *self._values(
                "compile", [False, True, *["blocks"] * bool(modules_of_blocks(self._model)), "step"], weight=8
            ),
        ]

    def _values(self, key: str, values: Any, weight: int = 1) -> list[OptionGroup]:
        options = [(f"{key}={str(value).lower()}",) for value in values if self._is_free(key)]
        return [OptionGroup(key, lambda run: options, weight)] if options else []

    def _is_free(self, key: str) -> bool:
        """Return whether the user has typed neither `key` nor, if it is a config group, an option of it."""
        return not any(typed == key or typed.startswith(f"{key}.") for typed in self._keys)

    def _modes(self, counts: Sequence[int]) -> list[Overrides]:
        """Return overrides for `single`, and for each other mode with each number of processes, the fewest first."""
        names = option_files()["parallel"]
        modes: list[Overrides] = [(f"parallel={name}",) for name in names] if self._is_free("parallel") else [()]
        found: list[tuple[int, Overrides]] = []
        for mode in modes:
            try:
                parallel = self._compose(mode).parallel
            except ConfigError:
                continue
            if type(parallel) is Parallel:
                found.append((1, mode))
            if not (isinstance(parallel, MultiProcess) and parallel.in_processes):
                continue
            for count in counts if self._is_free("parallel.processes") else ():
                words = (*mode, f"parallel.processes={count}")
                found.append((count, words))
                synchronizes = "sync_batch_norm" in option_fields(type(parallel))
                if self._normalizes and synchronizes and self._is_free("parallel.sync_batch_norm"):
                    found.append((count, (*words, "parallel.sync_batch_norm=true")))
        return [words for _, words in sorted(found, key=lambda each: each[0])]

    def _pipelines(self, run: Run) -> list[Overrides]:
        """Return overrides for the other schedules of a pipeline, and for half and twice as many micro-batches."""
        if not isinstance(run.parallel, Pipeline):
            return []
        found: list[Overrides] = []
        if self._is_free("parallel.schedule") and run.parallel.in_processes:
            found += [(f"parallel.schedule={schedule}",) for schedule in SCHEDULES]
        if self._is_free("parallel.split_size") and self._is_free("parallel.num_micro_batches"):
            size = run.session(first_process(run)).plan.chunk_size
            found += [(f"parallel.split_size={each}",) for each in (2 * size, size // 2) if each]
        return found


def _difference(run: Run, session: Session) -> str:
    return run.parallel.difference if session.world_size > 1 else ""


def _normalized_together(run: Run, session: Session) -> tuple[int, int, bool]:
    """Return how batch normalization divides a step: shards, pieces of each, whether the shards are synchronized."""
    shards = session.plan.data_shard[1]
    pieces = session.plan.accumulation * session.plan.chunks
    synchronizes = bool(getattr(run.parallel, "sync_batch_norm", False)) and shards > 1
    return (1, 1, False) if synchronizes and pieces == 1 else (shards, pieces, synchronizes)
