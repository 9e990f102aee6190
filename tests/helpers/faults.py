"""Scenarios of faults: a run of some mode, what happens to it and when, and what it must come to all the same.

A scenario is data: the name of a run in `RUNS`, and a sequence of `Fault`s. Each of them strikes one session of the
run, which is then resumed; after the last one it is resumed to its end:

    trial = Trial(tmp_path, "ddp", reference("ddp"), tally)
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

from helpers.command import Command
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

ALL = os.environ.get("RUNNER_FAULTS") == "all"
"""Whether everything is tried, as `make faults` does, or a fixed selection."""

SAMPLES, STEPS, SAVE_EVERY = 1438, 60, 7
"""The training samples of the digits; two epochs of them, and a little more; steps between two checkpoints."""

SCHEDULE = (f"steps={STEPS}", f"save_every={SAVE_EVERY}", "log_every=5", "eval_every=20")
HARD = (*FAST, "data.crop=2", "model.dropout=0.2", "optimizer=adamw", "batch_size=48", "accumulation=2", *SCHEDULE)
AGENT = ("env.num_envs=4", "workload.warm_up=64", "workload.eval_episodes=2", "batch_size=16", "model.hidden=[16]")

RUNS: dict[str, tuple[str, ...]] = {
    "single": HARD,
    "dp": (*HARD, "parallel=dp"),
    "model": (*HARD, "parallel=model"),
    "streams": (*HARD, "parallel=pipeline", "parallel.engine=streams"),
    "ddp": (*HARD, "parallel=ddp"),
    "fsdp": (*HARD, "parallel=fsdp"),
    "pipeline": (*HARD, "parallel=pipeline"),
    "ensemble": (*HARD, "parallel=ensemble"),
    "hogwild": (*HARD, "parallel=hogwild"),
    "dqn": ("workload=dqn", "device=cpu", "device.threads=1", *AGENT, *SCHEDULE),
    "dqn ddp": ("workload=dqn", "device=cpu", "device.threads=1", *AGENT, *SCHEDULE, "parallel=ddp"),
}
"""What is disturbed: the arguments of a command by the name of its mode. Each trains with all that is random."""

ASYNCHRONOUS = ("hogwild",)
"""Modes of which no two runs are the same: what they compute is not compared."""

SEVERAL = ("ddp", "fsdp", "pipeline", "ensemble", "hogwild", "dqn ddp")
"""Those whose training is done by ranks; in the others the command does it."""


def trainer(run: str, rank: int = 0) -> str:
    """The process of a run that trains, as `Fault.process` wants it."""
    return f"rank {rank}" if run in SEVERAL else "main"


@dataclass(frozen=True)
class Fault:
    """What happens to a session of a run, and when.

    Args:
        do: what happens; see `helpers.fault_points.act`.
        at: the point at which it does; empty: `after` so many seconds, to the command.
        count: the how-many-eth time in the session that the process gets there.
        process: which process gets there.
        code: the exit code of the command; None: any that a killed or stopped run may have.
        says: a regular expression that its console matches.
        arguments: overrides of this session alone.
    """

    do: str = "kill all"
    at: str = ""
    count: int = 1
    process: str = "main"
    after: float = 0.0
    code: int | None = -signal.SIGKILL
    says: str = ""
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        moment = f"{self.process}, {self.at} ({self.count})" if self.at else f"after {self.after:.2f} s"
        return f"{self.do}: {moment}"


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


Tally = Callable[[str], AbstractContextManager[Callable[[], None]]]


def undisturbed(cwd: Path, run: str) -> Reference:
    """Do the run of a name in `cwd`, from its start to its end."""
    cwd.mkdir(exist_ok=True)
    (cwd / "trace.txt").touch()
    since = time.monotonic()
    trial = Trial(cwd, run, None)
    trial.finish()
    seconds = time.monotonic() - since
    return Reference(trace(trial.directory), (cwd / "trace.txt").read_text().splitlines(), seconds)


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
        self.cwd, self.run, self.reference, self.kind = cwd, run, reference, kind
        self.extra, self.tally = extra, tally
        self.leftovers = Leftovers(cwd)
        self.struck = 0

    @property
    def directory(self) -> Path:
        """The run directory."""
        [config] = self.cwd.glob("outputs/*/*/config.yaml")
        return config.parent

    def start(self, *arguments: str) -> Command:
        """Begin the run; or resume it, once it has a directory."""
        begun = list(self.cwd.glob("outputs/*/*/config.yaml"))
        words = (f"resume={self.directory}",) if begun else RUNS[self.run]
        return Command(self.cwd, *words, *self.extra, *arguments, kind="faults")

    def watch(self, command: Command) -> tuple[int, str]:
        """Wait for the end of a session; meanwhile, look at what it holds and at its newest checkpoint."""
        while command.code is None:
            self.leftovers.sample()
            for config in self.cwd.glob("outputs/*/*/config.yaml"):
                whole_checkpoint_now(config.parent)
            time.sleep(0.1)
        return command.wait()

    def strike(self, fault: Fault) -> bool:
        """Do a session in which `fault` happens; returns False if the run was done before."""
        with ExitStack() as stack:
            not_counted = stack.enter_context(self.tally(self.kind)) if self.tally else lambda: None
            plan = {"at": fault.at, "process": fault.process, "count": fault.count, "do": fault.do}
            with planted(self.cwd, plan):
                command = self.start(*fault.arguments)
                if not fault.at:
                    time.sleep(fault.after)
                    numbers = {"kill all": signal.SIGKILL, "kill": signal.SIGKILL}
                    command.kill(numbers.get(fault.do) or signal.Signals[fault.do])
                code, console = self.watch(command)
            happened = (self.cwd / "fired").exists() or not fault.at
            assert happened or code == 0, f"{fault}: not come to\n{console}"
            self.leftovers.assert_none()
            if code == 0 and fault.code != 0:
                not_counted()
                return False
            self.struck += 1
            assert_ended(code, console, code if fault.code is None else fault.code, fault.says)
            for config in self.cwd.glob("outputs/*/*/config.yaml"):
                assert_whole_checkpoint(config.parent, steps_saved(self.cwd))
        return True

    def finish(self) -> None:
        """Resume the run to its end, which must be that of a run that nothing disturbed."""
        code, console = self.watch(self.start())
        assert_ended(code, console, 0, "^done after step|nothing is left to do")
        self.leftovers.assert_none()
        self.assert_done()

    def assert_done(self) -> None:
        """Fail unless the run is done, and is what it would have been undisturbed."""
        run = self.directory
        assert_whole_checkpoint(run, steps_saved(self.cwd))
        assert_one_value_a_step(run)
        assert_no_scraps(run)
        if self.run not in ("dqn", "dqn ddp"):
            # A pass of the loop of hogwild is a round of two steps.
            limit = SAVE_EVERY + (self.run in ASYNCHRONOUS)
            assert_each_sample_once(self.cwd, self.run, SAMPLES, limit)
        if self.reference and self.run not in ASYNCHRONOUS:
            assert_same_trace(run, self.reference.trace)
        if self.reference and self.run in ASYNCHRONOUS:
            assert trace(run)["result"]["steps"] == self.reference.trace["result"]["steps"]
