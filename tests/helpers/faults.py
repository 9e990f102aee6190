"""Fault scenarios: a run of `RUNS`, the `Fault`s that interrupt its sessions, and the result that it must reach.

    trial = FaultTrial(tmp_path, "ddp", reference("ddp"))
    for fault in [Fault("kill all", at_point="before fsync manifest.json", process="rank 0", visit_number=2), ...]:
        trial.run_with_fault(fault)
    trial.finish()

`run_with_fault` and `finish` check the run with `fault_checks`. `reference` is a fixture of tests/faults.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers import fault_checks
from helpers.command import Command, processes_in
from helpers.compose import TINY_CPU
from helpers.fault_points import plant_fault
from helpers.runs import assert_bitwise_equal, write_images

RUN_ALL_FAULTS = os.environ.get("RUNNER_FAULTS") == "all"
"""Whether all faults are tried, as `make faults` does, or a fixed selection."""

only_in_make_faults = pytest.mark.skipif(not RUN_ALL_FAULTS, reason="part of `make faults`")

STEPS, SAVE_EVERY = (60, 7) if RUN_ALL_FAULTS else (24, 5)
SCHEDULE = (f"steps={STEPS}", f"save_every={SAVE_EVERY}", "log_every=3", "eval_every=8")
TRAINING = (*SCHEDULE, "model.dropout=0.2", "optimizer=adamw", "accumulation=2")
DIGITS = (*TINY_CPU, *TRAINING, "data.crop=2", "batch_size=96")
IMAGE_FOLDER = ("data=imagefolder", "data.root=images", "data.size=8", "data.workers=1", "data.timeout=5")
AGENT = ("workload=dqn", "env.num_envs=4", "workload.warm_up=64", "workload.eval_episodes=2", "workload.n_step=3")
AGENT += ("workload.replay_size=300", "workload.epsilon_repeat=9", "batch_size=16", "model.hidden=[16]")
AGENT += (*SCHEDULE, "device=cpu", "device.threads=1")

RUNS: dict[str, tuple[str, ...]] = {
    "single": DIGITS,
    "dp": (*DIGITS, "parallel=dp"),
    "model": (*DIGITS, "parallel=model"),
    "streams": (*DIGITS, "parallel=pipeline", "parallel.engine=streams"),
    "ddp": (*DIGITS, "parallel=ddp"),
    "fsdp": (*DIGITS, "parallel=fsdp"),
    # Fixed cuts: stages chosen by measured times differ between runs, and sum the gradient norm in another order.
    "pipeline": (*DIGITS, "parallel=pipeline", "parallel.cuts=[conv2]", "parallel.num_micro_batches=2"),
    "ensemble": (*DIGITS, "parallel=ensemble"),
    "hogwild": (*DIGITS, "parallel=hogwild"),
    "workers": (*TRAINING, "steps=60", *IMAGE_FOLDER, "model=tiny", "device=cpu", "device.threads=1", "batch_size=8"),
    "dqn": (*AGENT, "accumulation=2"),
    "dqn ddp": (*AGENT, "env=acrobot", "parallel=ddp"),
}
"""The arguments of the command for each run, by name. They make each run use all of its sources of randomness."""

SAMPLES = dict.fromkeys(RUNS, 1438) | {"workers": 40, "dqn": 0, "dqn ddp": 0}
"""Number of training samples of each run; 0 for an agent, which samples from its replay buffer."""

NONDETERMINISTIC_RUNS = ("hogwild",)
"""Runs whose results are not reproducible, and therefore not compared."""


@dataclass(frozen=True)
class ReferenceRun:
    """A run without faults: what it computed, the points that it reached (as `process: point`), and its duration."""

    results: dict[str, Any]
    config_hash: str
    points: list[str]
    seconds: float


def train_without_faults(cwd: Path, run: str) -> ReferenceRun:
    trial = FaultTrial(cwd, run, None)
    (cwd / "trace.txt").touch()
    command = trial.start()  # the first command also waits for its server to start, which is not timed
    since = time.monotonic()
    trial.wait_and_monitor(command)
    seconds = time.monotonic() - since
    trial.assert_ended((0,), "^done after step")
    trial.assert_done()
    points = (cwd / "trace.txt").read_text().splitlines()
    return ReferenceRun(fault_checks.run_results(trial.directory), trial.config_hash, points, seconds)


@dataclass(frozen=True)
class Fault:
    """What happens in one session of a run (see `trigger_fault`), when a process reaches a point for the n-th time.

    Args:
        after: the time of a fault without `at_point`, in seconds since the start of the command.
        codes: the exit codes that the command may have. If they do not include 0 and the command exits with 0, the run
            finished before the fault happened.
        console_pattern: a regular expression that the console output must match.
        traceback: whether the console output may contain a traceback.
    """

    action: str = "kill all"
    at_point: str = ""
    visit_number: int = 1
    process: str = "main"
    after: float = 0.0
    codes: tuple[int, ...] = (-signal.SIGKILL,)
    console_pattern: str = ""
    traceback: bool = False


class FaultTrial:
    """One run, from its first session to its end, with a fault in each session but the last."""

    def __init__(self, cwd: Path, run: str, reference: ReferenceRun | None, extra: tuple[str, ...] = ()):
        cwd.mkdir(exist_ok=True)
        if run == "workers":
            write_images(cwd / "images")
        self.cwd, self.run, self.reference, self.extra = cwd, run, reference, extra
        self.external_resources = fault_checks.ExternalResources(cwd)
        self.code, self.console = -1, ""
        self.watched = True  # set to False for sessions that are not started by `start`: their samples are unknown

    @property
    def directory(self) -> Path:
        [config] = self.cwd.glob("outputs/*/*/config.yaml")
        return config.parent

    @property
    def config_hash(self) -> str:
        return json.loads((self.directory / "result.json").read_text())["config_hash"]

    @property
    def done(self) -> bool:
        return self.code == 0

    @property
    def begun(self) -> bool:
        return any(self.cwd.glob("outputs/*/*/config.yaml"))

    def words(self) -> tuple[str, ...]:
        """The arguments of a command that starts the run or, once it has a run directory, resumes it."""
        return (*([f"resume={self.directory}"] if self.begun else RUNS[self.run]), *self.extra)

    def start(self) -> Command:
        return Command(self.cwd, *self.words(), kind="faults")

    def wait_and_monitor(self, command: Command) -> None:
        """Wait for the end of a session; meanwhile, record its resources and check its newest checkpoint."""
        look = 0.0
        while command.command_exit_code is None:
            if (now := time.monotonic()) > look:
                look = now + 0.25
                self.external_resources.sample()
                if self.begun:
                    fault_checks.check_newest_while_running(self.directory)
            time.sleep(0.01)
        self.code, self.console = command.wait()
        self.external_resources.assert_released()

    def run_with_fault(self, fault: Fault, cause_fault: Callable[[Command], None] | None = None) -> bool:
        """Run a session with `fault`; return False if the run finished before the fault happened."""
        with plant_fault(self.cwd, fault.at_point, fault.process, fault.visit_number, fault.action):
            command = self.start()
            if cause_fault is not None:
                cause_fault(command)
            elif not fault.at_point:
                time.sleep(fault.after)
                if fault.action == "kill all":
                    command.signal_processes(signal.SIGKILL, command.pid, *processes_in(self.cwd))
                else:
                    command.signal_processes(signal.Signals[fault.action])
            self.wait_and_monitor(command)
        happened = not fault.at_point or (self.cwd / "fired").exists()
        if self.done and not (happened and 0 in fault.codes):
            return False
        assert happened, f"{fault}: not come to\n{self.console}"
        self.assert_ended(fault.codes, fault.console_pattern, fault.traceback)
        if self.begun:
            fault_checks.assert_newest_checkpoint_valid(self.directory, fault_checks.steps_saved(self.cwd))
        return True

    def assert_ended(self, codes: tuple[int, ...], console_pattern: str, traceback: bool = False) -> None:
        assert self.code in codes, f"exit code {self.code} instead of {codes}:\n{self.console}"
        assert re.search(console_pattern, self.console, re.MULTILINE), f"not {console_pattern!r}:\n{self.console}"
        assert traceback or "Traceback" not in self.console, self.console

    def run_with_faults(self, *faults: Fault) -> None:
        """Run a session with each of the faults, all of which must happen, and then finish the run."""
        for fault in faults:
            assert self.run_with_fault(fault), f"{fault}: the run was done before"
        self.finish()

    def finish(self) -> None:
        """Resume the run to its end, unless it is done, and fail unless its result is that of a run without faults."""
        if not self.done:
            self.wait_and_monitor(self.start())
            self.assert_ended((0,), "^done after step|nothing is left to do")
        self.assert_done()

    def assert_done(self) -> None:
        """Fail unless the run is complete, and its result is that of a run without faults."""
        run, asynchronous = self.directory, self.run in NONDETERMINISTIC_RUNS
        fault_checks.assert_newest_checkpoint_valid(run, fault_checks.steps_saved(self.cwd))
        fault_checks.assert_one_value_per_step(run)
        fault_checks.assert_no_temporary_files(run)
        for unbegun in set(self.cwd.glob("outputs/*/*")) - {run}:  # a session killed before it wrote its config
            left = {path.name for path in unbegun.glob("[!.]*")}
            assert left <= {"overrides.yaml", "environment.json", "log.txt"}, left
        if SAMPLES[self.run] and self.watched:
            # A checkpoint may be incomplete until the next one is due. An iteration of hogwild's loop takes two steps.
            fault_checks.assert_each_sample_once(self.cwd, self.run, SAMPLES[self.run], 2 * SAVE_EVERY + asynchronous)
        if asynchronous:
            assert fault_checks.run_results(run)["result"]["steps"] == STEPS
        elif self.reference:
            assert_bitwise_equal(fault_checks.run_results(run), self.reference.results)
        if self.reference and not self.extra:
            assert self.config_hash == self.reference.config_hash


def run_all_faults(
    faults: list[Fault], new_trial: Callable[[int], FaultTrial], check: Callable[[str], object] = lambda console: None
) -> None:
    """Run all faults, one per session, in as many runs as they need."""
    left, number = list(faults), 0
    while left:
        number += 1
        trial, before = new_trial(number), len(left)
        while left and trial.run_with_fault(left[0]):
            check(trial.console)
            left.pop(0)
        assert len(left) < before, f"{left[0]}: never come to"
        trial.finish()
