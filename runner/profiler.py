"""Where a run's time goes: by section, by Python function, or by kernel on a time line."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from runner.config.errors import check_range
from runner.device import synchronize
from runner.system.section_timer import timer

log = logging.getLogger(__name__)


@dataclass
class Profiler:
    """No profile, and the contract: the loop runs inside `profile`, and calls `after_step` after each step."""

    @contextmanager
    def profile(self, directory: Path, device: torch.device) -> Iterator[None]:
        """Profile what runs inside, and on leaving, however that happens, write `profile/` in the run's `directory`."""
        yield

    def after_step(self, step: int) -> None:
        """One optimizer step is over."""


@dataclass
class Simple(Profiler):
    """The seconds by section of the loop, which add up to the whole: at any moment exactly one section runs.

    On an accelerator each change of section waits for the device, so that its time counts where it was asked for. The
    run is somewhat slower by that.
    """

    def __post_init__(self) -> None:
        self._num_steps = 0

    @contextmanager
    def profile(self, directory: Path, device: torch.device) -> Iterator[None]:
        self._num_steps = 0
        timer.reset(None if device.type == "cpu" else partial(synchronize, device))
        try:
            yield
        finally:
            seconds, calls = timer.seconds(), dict(timer.calls)
            timer.synchronize = None
            table = section_table(seconds, calls, self._num_steps)
            path = _folder(directory) / "simple.txt"
            path.write_text(table, encoding="utf-8")
            log.info("where the time went (%s):\n%s", path, table)

    def after_step(self, step: int) -> None:
        self._num_steps += 1


def section_table(seconds: dict[str, float], calls: dict[str, int], num_steps: int) -> str:
    """A line a section, the longest first, and the total.

    Args:
        seconds: by section; together they are the whole.
        calls: how often each was entered; `other`, what lies between the sections, never is.
    """
    total = sum(seconds.values())
    lines = [f"{'section':<12}{'calls':>9}{'seconds':>12}{'share':>9}{'ms/call':>12}"]
    for name, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        count = calls.get(name, 0)
        each = f"{1000 * spent / count:.3f}" if count else "–"
        lines.append(f"{name:<12}{count or '–':>9}{spent:>12.3f}{spent / total:>9.1%}{each:>12}")
    each = f"{1000 * total / num_steps:.3f}" if num_steps else "–"
    lines.append(f"{'total':<12}{f'{num_steps} steps':>9}{total:>12.3f}{1:>9.1%}{each:>12}")
    return "\n".join(lines) + "\n"


@dataclass
class Advanced(Profiler):
    """Python's own profiler (`cProfile`), by function, in the main thread.

    It slows Python calls down, and native code not at all: so its seconds tell functions apart, not the run's speed.

    Args:
        top: how many functions each of the two tables has: by time in the function and all that it calls, and by time
            in itself alone.
    """

    top: int = 30

    def __post_init__(self) -> None:
        check_range(self, "top", least=1, most=10_000)

    @contextmanager
    def profile(self, directory: Path, device: torch.device) -> Iterator[None]:
        import cProfile  # standard, but of no use to most runs

        profile = cProfile.Profile()
        profile.enable()
        try:
            yield
        finally:
            profile.disable()
            folder = _folder(directory)
            profile.dump_stats(folder / "advanced.prof")
            (folder / "advanced.txt").write_text(function_tables(folder / "advanced.prof", self.top), encoding="utf-8")
            log.info(
                "time by function: %s (and advanced.prof beside it, for a viewer like snakeviz)",
                folder / "advanced.txt",
            )


def function_tables(path: Path, top: int) -> str:
    """The first `top` functions of a `.prof` file by time with callees, then by their own time."""
    import pstats

    text = io.StringIO()
    stats = pstats.Stats(str(path), stream=text)
    for order in ("cumulative", "tottime"):
        stats.sort_stats(order).print_stats(top)
    return text.getvalue()


@dataclass
class Trace(Profiler):
    """A time line of every operation on CPU and CUDA device (`torch.profiler`), to be opened in https://ui.perfetto.dev.

    Out of every `wait` + `warmup` + `active` steps it records the last `active`, and that `repeat` times.

    Args:
        wait: steps to let pass first: the run is at its full speed only after some.
        warmup: steps that are recorded and dropped, as the recorder's own start distorts them.
        active: steps to record; each takes a few megabytes on a large network.
        repeat: how often; of several, each has files of its own.
        record_shapes: tell the shapes of each operation's inputs, and group the table by them.
        profile_memory: tell what each operation allocates and frees.
        with_stack: tell the Python lines that led to each operation; slow.
    """

    wait: int = 5
    warmup: int = 2
    active: int = 3
    repeat: int = 1
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False

    def __post_init__(self) -> None:
        check_range(self, "wait", least=0)
        check_range(self, "warmup", least=0)
        check_range(self, "active", least=1, most=1000)
        check_range(self, "repeat", least=1, most=100)
        self._profile: torch.profiler.profile | None = None
        self._num_written = 0

    @contextmanager
    def profile(self, directory: Path, device: torch.device) -> Iterator[None]:
        if device.type != "cuda":
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the recorder complains that there is no GPU
        kinds = torch.profiler.ProfilerActivity
        self._num_written = 0
        self._profile = torch.profiler.profile(
            activities=[kinds.CPU, kinds.CUDA] if device.type == "cuda" else [kinds.CPU],
            schedule=torch.profiler.schedule(
                wait=self.wait, warmup=self.warmup, active=self.active, repeat=self.repeat
            ),
            on_trace_ready=partial(self._write, _folder(directory), device),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            acc_events=False,  # each recording has files of its own
        )
        try:
            with self._profile:
                yield
        finally:
            self._profile = None
            if not self._num_written:
                log.warning(
                    "no trace: it begins after profiler.wait + profiler.warmup = %d steps", self.wait + self.warmup
                )

    def after_step(self, step: int) -> None:
        assert self._profile is not None, "steps are profiled inside profile()"
        with warnings.catch_warnings():  # that it forgets the recording before: that one has been written
            warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
            self._profile.step()

    def _write(self, folder: Path, device: torch.device, profile: torch.profiler.profile) -> None:
        self._num_written += 1
        name = "trace" if self.repeat == 1 else f"trace_{self._num_written}"
        profile.export_chrome_trace(str(folder / f"{name}.json.gz"))
        averages = profile.key_averages(group_by_input_shape=self.record_shapes)
        kind = "device" if device.type == "cuda" else "cpu"
        table = averages.table(sort_by=f"self_{kind}_time_total", row_limit=100)
        (folder / f"{name}.txt").write_text(table, encoding="utf-8")
        log.info("a trace for https://ui.perfetto.dev: %s", folder / f"{name}.json.gz")


def _folder(directory: Path) -> Path:
    """Where this process writes: ranks share the run's directory, and rank 0's profile is the one looked for."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    folder = directory / "profile" / (f"rank_{rank}" if rank else "")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
