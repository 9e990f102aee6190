"""Candidates for a faster way to train a run, and how each of them affects the results of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from models.blocks import blocks_of
from runner.config.errors import ConfigError
from runner.config.options import option_files
from runner.config.overrides import override_key
from runner.config.schema import component_fields, option_fields
from runner.device import default_threads
from runner.model.base import without_memory
from runner.parallel.base import Parallel
from runner.parallel.compiling import BLOCKS, modules_of_blocks
from runner.parallel.context import Context, Process, Tuning
from runner.parallel.multiprocess import MultiProcess
from runner.planning.fake_step import trace_blocks
from runner.planning.planned_session import first_process, layout_of, prepared
from runner.precision import TF32, BFloat16
from runner.run import Run
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

PERMISSIONS = {
    "rounding": ROUNDING,
    "16bit": SIXTEEN_BITS,
    "statistics": STATISTICS,
    "asynchronous": ASYNCHRONOUS,
}
"""The kinds of effect that a user may allow in addition to `ALLOWED`, by the name to type."""

_BITWISE_KEYS = ("data.workers", "data.prefetch", "data.pin_memory", "model.checkpoint_activations")

Compose = Callable[[Sequence[str]], Run]
Overrides = tuple[str, ...]


class Candidate(NamedTuple):
    """A way to train a run.

    Args:
        overrides: the overrides to add to those of the run; empty for the run as it is.
        run: the run with these overrides; None if it is refused.
        results: how the candidate affects the results of the run, a key of `RESULTS`; empty if the run is refused.
        refusal: why the run is refused; empty if it is not.
    """

    overrides: Overrides
    run: Run | None
    results: str = ""
    refusal: str = ""


@dataclass
class Candidates:
    """The ways to train a run that are worth measuring.

    An option that the user has typed is kept: no candidate sets it.

    Args:
        compose: function that takes further overrides, and returns the run with them; it may raise ConfigError.
        typed: the overrides of the run.
        config_dir: a directory with the user's own option files; None if there is none.

    Raises:
        ConfigError: if the run is refused as it is.
    """

    compose: Compose
    typed: Sequence[str]
    config_dir: str | None = None

    def __post_init__(self) -> None:
        self.base = self.compose(())
        self._keys = {override_key(text).partition("@")[0] for text in self.typed}
        self._cores = len(usable_core_numbers())
        self.session = prepared(self.base)
        self._on_cpu = self.session.device.type == "cpu"
        model = without_memory(self.base.workload.build_model)
        modules = list(model.modules())
        self._normalizes = any(isinstance(module, _BatchNorm) for module in modules)
        self._convolves = any(isinstance(module, torch.nn.Conv2d) for module in modules)
        self._has_blocks = bool(blocks_of(model))
        self._compiles_blocks = bool(modules_of_blocks(model))

    def judged(self, overrides: Overrides) -> Candidate:
        """Return the candidate with `overrides`; if a check fails, its `refusal` says why.

        Checks that would read the data again are skipped.
        """
        try:
            run = self.compose(overrides)
            context = run.context(first_process(run))
            run.parallel.check(context)
            run.workload.check_plan(context.plan)
            run.precision.check_device(context.device)
            run.parallel.check_workload(replace(context, workload=self.base.workload))  # whose data has been read
        except ConfigError as error:
            return Candidate(overrides, None, refusal=" ".join(str(error).split()))
        return Candidate(overrides, run, self._results(run, context, overrides))

    def _results(self, run: Run, context: Context, overrides: Overrides) -> str:
        """Return the key of `RESULTS` that describes how `overrides` change the results.

        Args:
            run: the run with `overrides`. It is compared with `base`, the run without `overrides`.
            context: the context of `run`.
            overrides: the overrides of a candidate.
        """
        before = self.session.context
        if context.layout.non_equivalence_reason != before.layout.non_equivalence_reason:
            return ASYNCHRONOUS if context.plan.steps_per_round > 1 else OTHER
        acts = "env" in component_fields(type(run.workload))
        if acts and context.plan.num_workers != before.plan.num_workers:
            return OTHER  # each process trains on transitions from its own environments
        if self._normalizes and _normalized_together(run, context) != _normalized_together(self.base, before):
            return STATISTICS
        if type(run.precision) is not type(self.base.precision):
            other = ROUNDING if isinstance(run.precision, TF32) else OTHER
            return SIXTEEN_BITS if isinstance(run.precision, BFloat16) else other
        keys = {text.partition("=")[0] for text in overrides}
        other_threads = "data.workers" in keys and self._on_cpu and run.device.threads is None
        return BITWISE if keys <= set(_BITWISE_KEYS) and not other_threads else LAST_BITS

    # -----------------------------------------------------------------------------------------------------------------

    def layouts(self) -> Iterator[Overrides]:
        """Yield overrides that choose a parallel mode, processes and threads.

        The first item is an empty tuple, which stands for the run as it is.
        """
        found: list[Overrides] = []
        for words in chain([()], self._layouts()):
            if words not in found:
                found.append(words)
                yield words

    def _layouts(self) -> Iterator[Overrides]:
        free = self._is_free("parallel")
        base = self.base.parallel
        single = () if type(base) is Parallel else ("parallel=single",)
        if free and single:
            yield single
        if not isinstance(base, MultiProcess) or free:
            yield from ((*single, *threads) for threads in self._threads())
        if free:
            for mode in self._modes():
                yield from self._processes((f"parallel={mode}",))
        elif isinstance(base, MultiProcess):
            yield from self._processes(())

    def _modes(self) -> Iterator[str]:
        """Yield the names of the parallel modes, also user-defined ones, that may be faster than a single device."""
        more = [] if self.config_dir is None else [Path(self.config_dir).expanduser()]
        for name in option_files(*more)["parallel"]:
            run = _composed(self.compose, (f"parallel={name}",))
            if run is not None and run.parallel.may_be_faster:
                yield name

    def _threads(self) -> Iterator[Overrides]:
        """Yield an override for each number of threads to try; nothing on a GPU, or if the user has typed a number.

        The default number is left out. The numbers are for a single process.
        """
        default = default_threads(self.session.device, self.base.workload.num_data_workers)
        count = self._cores
        while self._on_cpu and self._is_free("device.threads") and count:
            if count != default:
                yield (f"device.threads={count}",)
            count //= 2

    def _processes(self, chosen: Overrides) -> Iterator[Overrides]:
        """Yield variants of `chosen`: one for each number of processes combined with each of the mode's `alternatives`.

        The numbers of processes are powers of two, up to the number of cores or GPUs. If the user has typed the number
        of processes, or if the mode runs in one process with its present options (`in_processes` is false), only the
        `alternatives` vary.

        If the mode is refused or is not a `MultiProcess`, yield only `chosen` itself.

        Args:
            chosen: overrides that choose the mode; empty for the mode of the run as it is.
        """
        run = _composed(self.compose, chosen)
        if run is None or not isinstance(run.parallel, MultiProcess):
            yield chosen
            return
        most = self._cores if self._on_cpu else torch.cuda.device_count()
        counts = [2**power for power in range(1, 9) if 2**power <= most]
        if self._is_free("parallel.processes") and run.parallel.in_processes:
            options = [(*chosen, f"parallel.processes={count}") for count in counts]
        else:
            options = [chosen]
        for words in options:
            yield from self._alternatives(words, is_base=not chosen)

    def _alternatives(self, words: Overrides, is_base: bool) -> Iterator[Overrides]:
        """Yield variants of `words`: one for each set of options that `Parallel.alternatives` yields.

        A set is left out if it has an option that the user has typed, or if the result would be the run as it is. If
        the run is refused with `words`, only `words` is yielded, so that its candidate reports the reason.

        Args:
            words: overrides that choose the mode and its processes.
            is_base: whether `words` keep the parallel mode of the run.
        """
        run = _composed(self.compose, words)
        process = _first_process(run)
        if run is None or process is None:
            yield words  # it is refused, with the reason
            return
        world_size = process.rank_info.world_size
        tuning = Tuning(
            max(world_size, len(process.devices)),
            run.batch_size // run.accumulation.count,
            self._normalizes,
            frozenset(key.partition(".")[2] for key in self._keys if key.startswith("parallel.")),
            partial(trace_blocks, self.session) if self._has_blocks else None,
        )
        for options in run.parallel.alternatives(tuning):
            is_new = bool(options) or not is_base or world_size != self.session.context.world_size
            if is_new and not tuning.typed & options.keys():
                yield (*words, *(f"parallel.{name}={_as_typed(value)}" for name, value in options.items()))

    # -----------------------------------------------------------------------------------------------------------------

    def groups(self) -> list[Callable[[Overrides], Iterator[Candidate]]]:
        """Return functions that each yield one group of candidates; they must be called in order.

        Each function takes the overrides of the fastest candidate so far, and yields variants of this candidate. One
        function varies the parallel mode together with the numbers of processes and threads. Every other function
        varies one option at a time.
        """
        changes = [
            partial(self._changed, "precision", self._precisions()),
            self._laid_out,
            self._retuned,
            partial(self._changed, "channels_last", (True, False) if self._convolves else ()),
            partial(self._changed, "accumulation", (1, 2, 4)),
            partial(self._changed, "data.workers", self._workers()),
            partial(self._changed, "compile", (False, True, *((BLOCKS,) if self._compiles_blocks else ()))),
        ]
        return [each for each in changes if not isinstance(each, partial) or self._is_free(each.args[0])]

    def _laid_out(self, overrides: Overrides) -> Iterator[Candidate]:
        """Yield a candidate for each layout in `layouts` that is not empty: `overrides` combined with this layout."""
        return (self.judged((*layout, *overrides)) for layout in self.layouts() if layout)

    def _retuned(self, overrides: Overrides) -> Iterator[Candidate]:
        """Yield candidates with `overrides` and a different value for one of the parallel mode's `speed_options`."""
        for name, values in self.compose(overrides).parallel.speed_options.items():
            if self._is_free(f"parallel.{name}"):
                yield from self._changed(f"parallel.{name}", values, overrides)

    def _changed(self, key: str, values: Iterable[Any], overrides: Overrides) -> Iterator[Candidate]:
        """Yield one candidate for each of `values`, with `overrides` and the option `key` set to this value.

        The value that the option already has with `overrides` is skipped.
        """
        run = self.compose(overrides)
        kept = tuple(text for text in overrides if text.partition("=")[0] != key)
        for value in values:
            words = (*kept, f"{key}={_as_typed(value)}")
            changed = _composed(self.compose, words)
            if changed is None or changed.config != run.config:
                yield self.judged(words)

    def _precisions(self) -> list[str]:
        return ["bf16"] if self._on_cpu else ["tf32", "bf16", "16"]

    def _workers(self) -> list[int]:
        """Return the numbers of data workers to try; an empty list if the data set is not read by workers."""
        if "workers" not in (option_fields(type(_data(self.base))) if _data(self.base) else ()):
            return []
        return sorted({0, 1, max(1, self._cores // 2), self._cores})

    def _is_free(self, key: str) -> bool:
        """Return whether candidates may set the option `key`.

        Return False if the user has typed `key` itself or, for a group such as `parallel`, any option of the group.
        """
        return not any(typed == key or typed.startswith(f"{key}.") for typed in self._keys)


def _composed(compose: Compose, words: Overrides) -> Run | None:
    try:
        return compose(words)
    except ConfigError:
        return None


def _first_process(run: Run | None) -> Process | None:
    """Return the description of rank 0's process; None if `run` is None, or its processes or devices are refused."""
    try:
        return None if run is None else first_process(run)
    except ConfigError:
        return None


def _as_typed(value: Any) -> str:
    """Return the value of an option as it is typed: `true`, `8`, `1f1b`."""
    return str(value).lower()


def _data(run: Run) -> Any:
    return getattr(run.workload, "data", None)


def _normalized_together(run: Run, context: Context) -> Any:
    """Return which samples batch normalization normalizes together, in a form that can be compared between runs.

    Samples that are normalized together form a group. A group without gaps is a range (start, stop) of positions in the
    stream of samples. A group with gaps is a tuple of ranges.

    Each rank has a list of groups, in the order in which the rank normalizes them. If the ranks do not synchronize
    their statistics, return the lists of all ranks, without duplicates. If the ranks synchronize their statistics,
    return a single list in a list: group i of this list is the union of group i of every rank.
    """
    synchronized = run.parallel.synchronizes_batch_norm
    parts = run.parallel.num_microbatches(context)
    ranks = []
    for rank in range(context.world_size):
        layout = layout_of(run, rank, context.world_size)
        plan = type(context.plan)(run.batch_size, run.accumulation.count, layout.data_shard, layout.step_shard)
        groups = []
        for micro in plan.micro_batches(1 + layout.step_shard[0]):
            size = (micro.stop - micro.start) // parts
            groups += [(micro.start + part * size, micro.start + (part + 1) * size) for part in range(parts)]
        ranks.append(groups)
    if synchronized:
        merged = [sorted(group) for group in zip(*ranks, strict=True)]
        whole = [_joined(group) for group in merged]
        return [whole]
    return [list(group) for group in dict.fromkeys(map(tuple, ranks))]


def _joined(ranges: Sequence[tuple[int, int]]) -> Any:
    """Return the union of sorted ranges: (start, stop) if it has no gaps, otherwise the ranges themselves."""
    gaps = any(one[1] != other[0] for one, other in pairwise(ranges))
    return tuple(ranges) if gaps else (ranges[0][0], ranges[-1][1])
