"""Scenarios of faults: a run of some mode, what happens to it and when, and what it must come to all the same.

A scenario is data: the name of a run in `RUNS`, and a sequence of `Fault`s. Each of them strikes one session of the
run, which is then resumed; after the last one it is resumed to its end:

    trial = Trial(tmp_path, "ddp", reference("ddp"), tally, "killed at a named point")
    for fault in [Fault("kill all", at="before fsync manifest.json", process="rank 0", count=2), ...]:
        trial.strike(fault)
    trial.finish()

`strike` and `finish` judge by `oracle`. The fixtures `reference` (the undisturbed run of a name) and `tally` (counts
what was tried, for the table at the end) are those of tests/faults/conftest.py.
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
"""Whether everything is tried, as `make faults` does, or a fixed selection."""

# ---------------------------------------------------------------------------------------------------------------------
# What is disturbed

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
    # Stages of equal measured time are other ones in each session, and sum up the gradient norm in another order.
    "pipeline": (*DIGITS, "parallel=pipeline", "parallel.cuts=[conv2]", "parallel.num_micro_batches=2"),
    "ensemble": (*DIGITS, "parallel=ensemble"),
    "hogwild": (*DIGITS, "parallel=hogwild"),
    "workers": (*TRAINING, *FILES, "model=tiny", "device=cpu", "device.threads=1", "batch_size=8"),
    "dqn": (*SCHEDULE, *AGENT, "workload=dqn", "device=cpu", "device.threads=1"),
    "dqn ddp": (*SCHEDULE, *AGENT, "workload=dqn", "device=cpu", "device.threads=1", "parallel=ddp"),
}
"""The arguments of a command, by the name of what it trains. Each draws all the random numbers that there are."""

SAMPLES = dict.fromkeys(RUNS, 1438) | {"workers": 40, "dqn": 0, "dqn ddp": 0}
"""The training samples of each; none of an agent, which draws from what it has seen."""

ASYNCHRONOUS = ("hogwild",)
"""No two of these runs are the same: what they compute is not compared."""

SEVERAL = ("ddp", "fsdp", "pipeline", "ensemble", "hogwild", "dqn ddp")
"""Those that ranks train; the others are trained by the command itself."""


def trainer(run: str, rank: int = 0) -> str:
    """The process that trains a run, by its name in `Fault.process`."""
    return f"rank {rank}" if run in SEVERAL else "main"


@dataclass(frozen=True)
class Reference:
    """A run that nothing disturbed.

    Args:
        trace: what it computed; see `helpers.oracle.trace`.
        points: all points that it came to, as `process: point`, in their order.
        seconds: how long it took.
    """

    trace: dict[str, Any]
    points: list[str]
    seconds: float


def undisturbed(cwd: Path, run: str) -> Reference:
    """Do the run of a name in `cwd`, from its start to its end."""
    trial = Trial(cwd, run, None)
    (cwd / "trace.txt").touch()
    command = trial.start()  # which waits for the server, when it is the first
    since = time.monotonic()
    trial.watch(command)
    seconds = time.monotonic() - since
    assert_ended(trial.code, trial.console, 0, "^done after step")
    trial.assert_done()
    return Reference(trace(trial.directory), (cwd / "trace.txt").read_text().splitlines(), seconds)


# ---------------------------------------------------------------------------------------------------------------------
# What happens to it

KILLED = (-signal.SIGKILL,)
"""The exit code of a command that was killed, to whoever started it."""


@dataclass(frozen=True)
class Fault:
    """What happens to a session of a run, and when.

    Args:
        do: what happens; see `helpers.fault_points.act`.
        at: the point at which it does; empty: `after` so many seconds, to the command.
        count: the how-many-eth time in the session that the process gets there.
        process: which process gets there.
        codes: the exit codes that the command may have. Without 0 among them, a run that is done was not struck.
        says: a regular expression that its console matches.
        traceback: whether the console may show a traceback.
        arguments: overrides of this session alone.
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
    """One run, from its first session to its end, with a fault in each but the last.

    Args:
        cwd: where its commands are started.
        run: its name in `RUNS`.
        reference: the same run, undisturbed; None: nothing to compare with.
        tally: counts the faults.
        kind: what the faults are called in the table.
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
        self.watched = True  # false once a session was not one of `start`: then its samples are not known

    @property
    def directory(self) -> Path:
        """The run directory."""
        [config] = self.cwd.glob("outputs/*/*/config.yaml")
        return config.parent

    @property
    def done(self) -> bool:
        """Whether the latest session did the last step."""
        return self.code == 0

    def words(self) -> tuple[str, ...]:
        """The arguments of a command that begins the run; or resumes it, once it has a directory."""
        begun = list(self.cwd.glob("outputs/*/*/config.yaml"))
        return (f"resume={self.directory}", *self.extra) if begun else (*RUNS[self.run], *self.extra)

    def start(self, *arguments: str) -> Command:
        """Start a session, in which faults may be planted."""
        return Command(self.cwd, *self.words(), *arguments, kind="faults")

    def watch(self, command: Command) -> None:
        """Wait for the end of a session; meanwhile, look at what it holds and at its newest checkpoint."""
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
        """Do a session in which `fault` happens; returns False if the run was done before.

        Args:
            meanwhile: does what happens, where it is nothing that a fault can say.
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
        """Resume the run to its end, which must be that of a run that nothing disturbed."""
        self.watch(self.start())
        assert_ended(self.code, self.console, 0, "^done after step|nothing is left to do")
        self.assert_done()

    def assert_done(self) -> None:
        """Fail unless the run is done, and is what it would have been undisturbed."""
        run, asynchronous = self.directory, self.run in ASYNCHRONOUS
        assert_whole_checkpoint(run, steps_saved(self.cwd))
        assert_one_value_a_step(run)
        assert_no_scraps(run)
        if SAMPLES[self.run] and self.watched:
            # A checkpoint may be incomplete until the next one is due. One pass of hogwild's loop is two steps.
            assert_each_sample_once(self.cwd, self.run, SAMPLES[self.run], 2 * SAVE_EVERY + asynchronous)
        if self.reference and asynchronous:
            assert trace(run)["result"]["steps"] == self.reference.trace["result"]["steps"]
        elif self.reference:
            assert_same_trace(run, self.reference.trace)


def strike_all(
    faults: list[Fault], begin: Callable[[int], Trial], check: Callable[[str], object] = lambda console: None
) -> None:
    """Let faults happen in one run after another, each run struck by one fault after the other until it is done.

    A run that is nearly done does not come to its second evaluation again, for example: that is left to the next run.

    Args:
        faults: the faults, each of which a new run must come to.
        begin: returns the trial of a new run, by its number from 1.
        check: is called with what each session printed that was struck.
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
