"""Profilers, which measure the time of sections of the training loop, of Python functions, or of operations."""

from __future__ import annotations

import cProfile
import io
import logging
import os
import pstats
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch

from runner.config.limits import NonNegativeInt, Range
from runner.device import synchronize
from runner.system.section_timer import timer

log = logging.getLogger(__name__)


@dataclass
class Profiler:
    """The base class of profilers, which profiles nothing. The options are documented in conf/profiler/."""

    @contextmanager
    def profile(self, directory: Path, *devices: torch.device) -> Iterator[None]:
        """Profile the code inside the context, and write the results to `profile/` in `directory`, even after an error.

        Args:
            directory: the run directory.
            devices: the devices on which this process computes the steps.
        """
        yield

    def after_step(self, step: int) -> None:
        """Tell the profiler that optimizer step `step` has ended; called by the training loop inside `profile`."""


@dataclass
class Simple(Profiler):
    """A profiler that measures the time in each section of the training loop; one section is active at any time.

    On an accelerator, the host waits for the device at every switch to another section, so that the device's time is
    attributed to the section that queued the work. This makes the run slower.
    """

    @contextmanager
    def profile(self, directory: Path, *devices: torch.device) -> Iterator[None]:
        self._num_steps = 0
        timer.reset(None if devices[0].type == "cpu" else partial(synchronize, *devices))
        try:
            yield
        finally:
            table = _table(timer.seconds(), timer.calls, self._num_steps)
            timer.synchronize = None
            with _failures_logged():
                path = _folder(directory) / "simple.txt"
                path.write_text(table, encoding="utf-8")
                log.info("time by section (%s):\n%s", path, table)

    def after_step(self, step: int) -> None:
        self._num_steps += 1


def _table(seconds: dict[str, float], calls: dict[str, int], num_steps: int) -> str:
    """Return a line for each section, in decreasing order of time, and one for the total; `other` is outside of all."""
    total = sum(seconds.values())
    lines = [f"{'section':<12}{'calls':>9}{'seconds':>12}{'share':>9}{'ms/call':>12}"]
    rows = [(name, spent, calls.get(name, 0)) for name, spent in sorted(seconds.items(), key=lambda item: -item[1])]
    for name, spent, count in [*rows, ("total", total, num_steps)]:
        label = f"{count} steps" if name == "total" else count or "–"
        per_call = f"{1000 * spent / count:.3f}" if count else "–"
        lines.append(f"{name:<12}{label:>9}{spent:>12.3f}{spent / total:>9.1%}{per_call:>12}")
    return "\n".join(lines) + "\n"


@dataclass
class Advanced(Profiler):
    """Python's profiler (`cProfile`): time by function, in the main thread; the first 30 by each of two orders.

    The profiler slows down Python code, but not native code: the times show which functions are slow, but not how long
    they take without the profiler.
    """

    @contextmanager
    def profile(self, directory: Path, *devices: torch.device) -> Iterator[None]:
        profile = cProfile.Profile()
        profile.enable()
        try:
            yield
        finally:
            profile.disable()
            with _failures_logged():
                folder = _folder(directory)
                profile.dump_stats(folder / "advanced.prof")
                text = io.StringIO()
                stats = pstats.Stats(str(folder / "advanced.prof"), stream=text)
                for order in ("cumulative", "tottime"):
                    stats.sort_stats(order).print_stats(30)
                (folder / "advanced.txt").write_text(text.getvalue(), encoding="utf-8")
                log.info("time by function: %s (advanced.prof is for viewers like snakeviz)", folder / "advanced.txt")


@dataclass
class Trace(Profiler):
    """A profiler that writes a trace of all operations on the CPU and the CUDA device, for https://ui.perfetto.dev.

    Of the first `wait` + `warmup` + `active` steps of a session, the last `active` ones are recorded. A table of the
    100 operations that take the most time is written beside the trace.
    """

    wait: NonNegativeInt = 5
    warmup: NonNegativeInt = 2
    active: Annotated[int, Range(least=1, most=1000)] = 3
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False

    @contextmanager
    def profile(self, directory: Path, *devices: torch.device) -> Iterator[None]:
        on_cpu = devices[0].type == "cpu"
        if on_cpu:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # suppresses a warning that there is no GPU
        self._is_written = False
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU] if on_cpu else torch.profiler.supported_activities(),
            schedule=torch.profiler.schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=partial(self._write, _folder(directory), devices[0]),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
        )
        with self._profile:
            yield
        if not self._is_written:
            first = self.wait + self.warmup
            log.warning("no trace: it begins after profiler.wait + profiler.warmup = %d steps", first)

    def after_step(self, step: int) -> None:
        self._profile.step()

    def _write(self, folder: Path, device: torch.device, profile: torch.profiler.profile) -> None:
        self._is_written = True
        averages = profile.key_averages(group_by_input_shape=self.record_shapes)
        kind = "cpu" if device.type == "cpu" else "device"
        table = averages.table(sort_by=f"self_{kind}_time_total", row_limit=100)
        with _failures_logged():
            profile.export_chrome_trace(str(folder / "trace.json.gz"))
            (folder / "trace.txt").write_text(table, encoding="utf-8")
            log.info("trace for https://ui.perfetto.dev: %s", folder / "trace.json.gz")


@contextmanager
def _failures_logged() -> Iterator[None]:
    """Log an `OSError` inside the context, such as that of a full disk: the run goes on, or keeps its first error."""
    try:
        yield
    except OSError as error:
        log.error("the profile cannot be written: %s", error)


def _folder(directory: Path) -> Path:
    """Create and return this process's directory for profiles: `profile/` on rank 0, `profile/rank_N/` on rank N."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    folder = directory / "profile" / (f"rank_{rank}" if rank else "")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
