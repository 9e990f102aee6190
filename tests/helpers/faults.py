"""Fault scenarios: a run of some mode, the faults that interrupt it, and the result that it must reach nevertheless.

A scenario is data: the name of a run in `RUNS`, and a sequence of `Fault`s. Each fault interrupts one session of the
run, which is then resumed; after the last fault, it is resumed to its end:

    trial = Trial(tmp_path, "ddp", reference("ddp"), tally, "killed at a named point")
    for fault in [Fault("kill all", at="before fsync manifest.json", process="rank 0", count=2), ...]:
        trial.strike(fault)
    trial.finish()

`strike` and `finish` check the run with the functions of `oracle`. The fixtures `reference` (the run of that name
without faults) and `tally` (counts faults for the summary table) are defined in tests/faults/conftest.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.command import Command, processes_in
from helpers.compose import FAST
from helpers.fault_points import planted
from helpers.oracle import (
    Leftovers,
    assert_each_sample_once,
    assert_ended,
    assert_no_scraps,
    assert_one_value_a_step,
    assert_same_trace,
    assert_whole_checkpoint,
    steps_saved,
    trace,
    whole_checkpoint_now,
)
from helpers.runs import write_images

ALL = os.environ.get("RUNNER_FAULTS") == "all"
"""Whether all faults are tried, as `make faults` does, or a fixed selection."""

# ---------------------------------------------------------------------------------------------------------------------
# Runs

STEPS, SAVE_EVERY = 60, 7
SCHEDULE = (f"steps={STEPS}", f"save_every={SAVE_EVERY}", "log_every=5", "eval_every=20")
TRAINING = (*SCHEDULE, "model.dropout=0.2", "optimizer=adamw", "accumulation=2")
DIGITS = (*FAST, *TRAINING, "data.crop=2", "batch_size=48")
FILES = ("data=imagefolder", "data.root=images", "data.size=8", "data.workers=1", "data.timeout=5")
AGENT = ("env.num_envs=4", "workload.warm_up=64", "workload.eval_episodes=2", "batch_size=16", "model.hidden=[16]")

RUNS: dict[str, tuple[str, ...]] = {
    "single": DIGITS,
    "dp": (*DIGITS, "parallel=dp"),
    "model": (*DIGITS, "parallel=model"),
    "streams": (*DIGITS, "parallel=pipeline", "parallel.engine=streams"),
    "ddp": (*DIGITS, "parallel=ddp"),
    "fsdp": (*DIGITS, "parallel=fsdp"),
    # Fixed cuts: stages chosen by measured times differ between sessions, and sum the gradient norm in another order.
    "pipeline": (*DIGITS, "parallel=pipeline", "parallel.cuts=[conv2]", "parallel.num_micro_batches=2"),
    "ensemble": (*DIGITS, "parallel=ensemble"),
    "hogwild": (*DIGITS, "parallel=hogwild"),
    "workers": (*TRAINING, *FILES, "model=tiny", "device=cpu", "device.threads=1", "batch_size=8"),
    "dqn": (*SCHEDULE, *AGENT, "workload=dqn", "device=cpu", "device.threads=1"),
    "dqn ddp": (*SCHEDULE, *AGENT, "workload=dqn", "device=cpu", "device.threads=1", "parallel=ddp"),
}
"""The arguments of the command for each run, by name. They make each run use all of its sources of randomness."""

SAMPLES = dict.fromkeys(RUNS, 1438) | {"workers": 40, "dqn": 0, "dqn ddp": 0}
"""Number of training samples of each run; 0 for an agent, which samples from its replay buffer."""

ASYNCHRONOUS = ("hogwild",)
"""Runs whose results are not reproducible, and therefore not compared."""

SEVERAL = ("ddp", "fsdp", "pipeline", "ensemble", "hogwild", "dqn ddp")
"""Runs that are trained by ranks; the others are trained by the process of the command."""


def trainer(run: str, rank: int = 0) -> str:
    """The process that trains a run, as named in `Fault.process`."""
    return f"rank {rank}" if run in SEVERAL else "main"


@dataclass(frozen=True)
class Reference:
    """A run without faults.

    Args:
        trace: what it computed; see `helpers.oracle.trace`.
        points: all points that it reached, as `process: point`, in order.
        seconds: its duration.
    """

    trace: dict[str, Any]
    points: list[str]
    seconds: float


def undisturbed(cwd: Path, run: str) -> Reference:
    """Train the run `RUNS[run]` in `cwd` from start to end, without faults."""
    trial = Trial(cwd, run, None)
    (cwd / "trace.txt").touch()
    command = trial.start()  # the first command also waits for its server to start, which is not timed
    since = time.monotonic()
    trial.watch(command)
    seconds = time.monotonic() - since
    assert_ended(trial.code, trial.console, 0, "^done after step")
    trial.assert_done()
    return Reference(trace(trial.directory), (cwd / "trace.txt").read_text().splitlines(), seconds)


# ---------------------------------------------------------------------------------------------------------------------
# Faults

KILLED = (-signal.SIGKILL,)
"""The expected exit codes of a command that is killed by SIGKILL."""


@dataclass(frozen=True)
class Fault:
    """A fault in one session of a run.

    Args:
        do: what happens; see `helpers.fault_points.act`.
        at: the point at which it happens; if empty, it happens to the command `after` seconds from its start.
        count: at which visit of the point in the session it happens, from 1.
        process: the process that reaches the point.
        codes: the exit codes that the command may have. If they do not include 0, a command that ends with 0 finished
            the run before the fault happened.
        says: a regular expression that the console output must match.
        traceback: whether the console output may contain a traceback.
        arguments: overrides of this session only.
    """

    do: str = "kill all"
    at: str = ""
    count: int = 1
    process: str = "main"
    after: float = 0.0
    codes: tuple[int, ...] = KILLED
    says: str = ""
    traceback: bool = False
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.do}: " + (f"{self.process} {self.at} ({self.count})" if self.at else f"{self.after:.2f} s")


Tally = Callable[[str], AbstractContextManager[Callable[[], None]]]


class Trial:
    """One run, from its first session to its end, with a fault in each session but the last.

    Args:
        cwd: working directory of its commands.
        run: its name in `RUNS`.
        reference: the same run without faults; None if the results are not compared.
        tally: counts the faults.
        kind: name of the faults in the summary table.
        extra: overrides of all sessions.
    """

    def __init__(
        self,
        cwd: Path,
        run: str,
        reference: Reference | None,
        tally: Tally | None = None,
        kind: str = "",
        extra: tuple[str, ...] = (),
    ):
        cwd.mkdir(exist_ok=True)
        if run == "workers":
            write_images(cwd / "images")
        self.cwd, self.run, self.reference = cwd, run, reference
        self.tally, self.kind, self.extra = tally, kind, extra
        self.leftovers = Leftovers(cwd)
        self.code, self.console = -1, ""
        self.watched = True  # set to False for sessions that are not started by `start`: their samples are unknown

    @property
    def directory(self) -> Path:
        """The run directory."""
        [config] = self.cwd.glob("outputs/*/*/config.yaml")
        return config.parent

    @property
    def done(self) -> bool:
        """Whether the latest session finished the run."""
        return self.code == 0

    def words(self) -> tuple[str, ...]:
        """The arguments of a command that starts the run or, once it has a run directory, resumes it."""
        begun = list(self.cwd.glob("outputs/*/*/config.yaml"))
        return (f"resume={self.directory}", *self.extra) if begun else (*RUNS[self.run], *self.extra)

    def start(self, *arguments: str) -> Command:
        """Start a session, in which faults may be planted."""
        return Command(self.cwd, *self.words(), *arguments, kind="faults")

    def watch(self, command: Command) -> None:
        """Wait for the end of a session; meanwhile, record its resources and check its newest checkpoint."""
        look = 0.0
        while command.code is None:
            if (now := time.monotonic()) > look:
                look = now + 0.25
                self.leftovers.sample()
                for config in self.cwd.glob("outputs/*/*/config.yaml"):
                    whole_checkpoint_now(config.parent)
            time.sleep(0.01)
        self.code, self.console = command.wait()
        self.leftovers.assert_none()

    def strike(self, fault: Fault, meanwhile: Callable[[Command], None] | None = None) -> bool:
        """Run a session with `fault`; return False if the run finished before the fault happened.

        Args:
            meanwhile: causes the fault while the command runs, if it is one that a `Fault` cannot describe.
        """
        with ExitStack() as stack:
            not_counted = stack.enter_context(self.tally(self.kind)) if self.tally else lambda: None
            plan = {"at": fault.at, "process": fault.process, "count": fault.count, "do": fault.do}
            with planted(self.cwd, plan):
                command = self.start(*fault.arguments)
                if meanwhile is not None:
                    meanwhile(command)
                elif not fault.at:
                    time.sleep(fault.after)
                    if fault.do == "kill all":
                        command.kill(signal.SIGKILL, command.pid, *processes_in(self.cwd))
                    else:
                        command.kill(signal.Signals[fault.do])
                self.watch(command)
            happened = not fault.at or (self.cwd / "fired").exists()
            if self.done and not (happened and 0 in fault.codes):
                not_counted()
                return False
            assert happened, f"{fault}: not come to\n{self.console}"
            assert self.code in fault.codes, f"{fault}: exit code {self.code}\n{self.console}"
            assert_ended(self.code, self.console, self.code, fault.says, fault.traceback)
            for config in self.cwd.glob("outputs/*/*/config.yaml"):
                assert_whole_checkpoint(config.parent, steps_saved(self.cwd))
        return True

    def finish(self) -> None:
        """Resume the run to its end, and fail unless its result is that of a run without faults."""
        self.watch(self.start())
        assert_ended(self.code, self.console, 0, "^done after step|nothing is left to do")
        self.assert_done()

    def assert_done(self) -> None:
        """Fail unless the run is complete, and its result is that of a run without faults."""
        run, asynchronous = self.directory, self.run in ASYNCHRONOUS
        assert_whole_checkpoint(run, steps_saved(self.cwd))
        assert_one_value_a_step(run)
        assert_no_scraps(run)
        if SAMPLES[self.run] and self.watched:
            # A checkpoint may be incomplete until the next one is due. An iteration of hogwild's loop takes two steps.
            assert_each_sample_once(self.cwd, self.run, SAMPLES[self.run], 2 * SAVE_EVERY + asynchronous)
        if self.reference and asynchronous:
            assert trace(run)["result"]["steps"] == self.reference.trace["result"]["steps"]
        elif self.reference:
            assert_same_trace(run, self.reference.trace)


def strike_all(
    faults: list[Fault], begin: Callable[[int], Trial], check: Callable[[str], object] = lambda console: None
) -> None:
    """Run all faults, one per session, in as many runs as they need.

    A run that is nearly finished may not reach the point of the next fault, such as a second evaluation. That fault is
    then left to the next run.

    Args:
        faults: the faults; a new run must be able to reach each of them.
        begin: returns the trial of a new run, given its number from 1.
        check: called with the console output of each session in which a fault happened.
    """
    left, number = list(faults), 0
    while left:
        number += 1
        trial, before = begin(number), len(left)
        while left and trial.strike(left[0]):
            check(trial.console)
            left.pop(0)
        assert len(left) < before, f"{left[0]}: never come to"
        trial.assert_done() if trial.done else trial.finish()
