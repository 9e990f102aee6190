"""Tests of runs that are killed, or whose ranks or data workers are: resumed, they have the same results.

`make test` tries each kind of fault once per kind of run; `make faults` kills all processes at each named point and at
random times.
"""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.command import Command, processes_in, wait_until
from helpers.fault_checks import (
    ExternalResources,
    assert_each_sample_once,
    assert_newest_checkpoint_valid,
    assert_no_temporary_files,
    assert_one_value_per_step,
    run_results,
    steps_saved,
)
from helpers.fault_points import plant_fault
from helpers.faults import (
    RUN_ALL_FAULTS,
    RUNS,
    SAMPLES,
    SAVE_EVERY,
    Fault,
    FaultCounter,
    FaultTrial,
    ReferenceRun,
    only_in_make_faults,
    run_all_faults,
)
from helpers.runs import assert_bitwise_equal, free_port

STOPPED, INTERRUPTED = 75, 130


def rank(action: str, number: int, at: str, visit_number: int = 1) -> Fault:
    """A rank that is killed or fails, which ends the command with exit code 1."""
    says = r"was killed by SIGKILL \(" if action == "kill" else "failed: InjectedError: planted by a test$"
    role, pattern = f"rank {number}", rf"^rank {number} {says}"
    return Fault(action, at, visit_number, role, codes=(1,), console_pattern=pattern, traceback=action == "raise")


SELECTED = {
    "single": [
        Fault(at_point="before rename config.yaml"),
        Fault(
            "SIGTERM", "before rename config.yaml", codes=(STOPPED,), console_pattern="^SIGTERM: stopped before the fi"
        ),
        Fault(at_point="after fsync model.safetensors", visit_number=2),
        Fault(at_point="after rename step_N", visit_number=2),
        Fault(at_point="in evaluation", visit_number=2),
        Fault("SIGUSR2", "before rename step_N", codes=(STOPPED,), console_pattern="^SIGUSR2: finishing the step"),
        Fault("SIGINT SIGINT", "after step", 3, codes=(INTERRUPTED,), console_pattern="^interrupted$"),
        Fault(at_point="before rename result.json"),
    ],
    "ddp": [
        rank("raise", 1, "before preparation"),
        rank("kill", 0, "after fsync model.safetensors"),
        Fault(at_point="before rename rank_1.pt", process="rank 1"),
        Fault("SIGTERM SIGINT", "after step", 3, "rank 0", codes=(INTERRUPTED,), console_pattern="^interrupted$"),
    ],
    "pipeline": [rank("kill", 1, "after step", 4)],
    "hogwild": [rank("kill", 1, "after save")],
    "dqn": [Fault(at_point="after step", visit_number=9)],
}


@pytest.mark.parametrize("run", SELECTED)
def test_a_run_with_faults_ends_as_one_without(run: str, trial: Callable[..., FaultTrial]) -> None:
    faulty = trial(run, f"a selected fault of {run}")
    for fault in SELECTED[run]:
        assert faulty.run_with_fault(fault), f"{fault}: the run was done before"
        if fault.codes == (1,):
            assert len(re.findall(r"^rank \d+ ", faulty.console, re.MULTILINE)) == 1, faulty.console
            assert re.search(r"^crashed after step \d+/\d+", faulty.console, re.MULTILINE), faulty.console
    faulty.finish()


# ---------------------------------------------------------------------------------------------------------------------
# All processes

NUM_KILLS = dict.fromkeys(RUNS, 15) | {"single": 100, "workers": 20, "dqn": 30, "dqn ddp": 30}
"""How often `make faults` kills each run at a random moment."""


@only_in_make_faults
@pytest.mark.parametrize("run", RUNS)
def test_runs_killed_at_each_point_resume_bitwise(
    run: str, reference: Callable[[str], ReferenceRun], trial: Callable[..., FaultTrial]
) -> None:
    """The run is killed at each point that a process reaches, at its second visit if there is one."""
    faults, points = [], reference(run).points
    for line in dict.fromkeys(points):
        process, _, point = line.partition(": ")
        faults.append(Fault(at_point=point, process=process, visit_number=min(2, points.count(line))))
    run_all_faults(faults, lambda number: trial(run, "killed at a named point", number=number))


@only_in_make_faults
@pytest.mark.parametrize("run", RUNS)
def test_runs_killed_at_random_moments_resume_bitwise(
    run: str, reference: Callable[[str], ReferenceRun], trial: Callable[..., FaultTrial], rng: random.Random
) -> None:
    """The time of a kill is drawn between the start of a command and the duration of an undisturbed run."""
    kills, number = NUM_KILLS[run], 0
    while kills > 0:
        number += 1
        killed = trial(run, "killed at a random moment", number=number)
        while kills > 0 and killed.run_with_fault(Fault(after=rng.uniform(0, reference(run).seconds))):
            kills -= 1
        killed.finish()


# ---------------------------------------------------------------------------------------------------------------------
# Data workers


def strike_a_worker(cwd: Path, number: signal.Signals, steps: int) -> Callable[[Command], None]:
    """Return a function that sends a signal to the data worker of a run after `steps` more training steps."""

    def read() -> int:
        path = cwd / "seen.txt"
        return len(path.read_text().splitlines()) if path.exists() else 0

    before = read()

    def strike(command: Command) -> None:
        wait_until(lambda: command.command_exit_code is not None or read() >= before + steps)
        others = [pid for pid in processes_in(cwd) if pid != command.pid]
        command.signal_processes(number, *others)

    return strike


WORKER = {
    signal.SIGKILL: r"data worker \d+: it was killed by SIGKILL, perhaps because memory ran out",
    signal.SIGBUS: r"data worker \d+: it was killed by SIGBUS, most likely because shared memory ran out",
    signal.SIGSTOP: r"data workers \d+: no batch arrived within 5 s: a worker is stopped",
}


@pytest.mark.parametrize("number", [*WORKER] if RUN_ALL_FAULTS else [signal.SIGKILL])
def test_a_run_resumes_after_its_data_worker_died(number: signal.Signals, trial: Callable[..., FaultTrial]) -> None:
    run = trial("workers", "a data worker killed or stopped")
    for steps in (3, 12, 9) if RUN_ALL_FAULTS else (3,):
        fault = Fault(number.name, codes=(1,), console_pattern=WORKER[number], traceback=True)
        assert run.run_with_fault(fault, strike_a_worker(run.cwd, number, steps)), "the run was done before"
    run.run_with_faults(Fault("kill all", "after step", 9))


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that an external launcher started


class Launched:
    """Two ranks of one run, each of which is a separate command, as `torchrun` starts them."""

    def __init__(self, cwd: Path, count_fault: FaultCounter):
        cwd.mkdir(exist_ok=True)
        self.cwd, self.count_fault = cwd, count_fault
        self.hosts = [cwd / f"host_{rank}" for rank in (0, 1)]
        for host in self.hosts:
            host.mkdir()
        self.external_resources = [ExternalResources(host) for host in self.hosts]

    @property
    def directory(self) -> Path:
        [config] = self.cwd.glob("outputs/*/*/config.yaml")
        return config.parent

    def session(self, *arguments: str) -> list[tuple[int, str]]:
        """Start or resume the run, and return the exit code and console output of each rank."""
        begun = list(self.cwd.glob("outputs/*/*/config.yaml"))
        words = (f"resume={self.directory}",) if begun else (*RUNS["ddp"], f"output_root={self.cwd}/outputs")
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        common["MASTER_PORT"] = str(free_port())
        own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
        commands = [
            Command(host, *words, *arguments, kind="faults", **common, **variables)
            for host, variables in zip(self.hosts, own, strict=True)
        ]
        ended = [command.wait_for_all_processes() for command in commands]
        for each in self.external_resources:
            each.assert_released()
        return ended

    def strike(self, do: str, rank: int, at: str, count: int) -> list[tuple[int, str]]:
        with self.count_fault("a rank of torchrun killed or failing"):
            with plant_fault(self.hosts[rank], at, f"rank {rank}", count, do):
                ended = self.session()
            assert (self.hosts[rank] / "fired").exists(), ended
            for config in self.cwd.glob("outputs/*/*/config.yaml"):
                assert_newest_checkpoint_valid(config.parent, steps_saved(self.hosts[0]))
        return ended


FAULTS = [
    ("raise", 0, "before log", 1),
    ("kill", 1, "after step", 12),
    ("kill", 0, "after fsync model.safetensors", 1),
    ("raise", 1, "before fsync rank_1.pt.part", 1),
    ("kill", 1, "in evaluation", 1),
    ("kill", 0, "before preparation", 1),
]


def test_a_torchrun_run_resumes_after_its_ranks_died(
    tmp_path: Path, reference: Callable[[str], ReferenceRun], count_fault: FaultCounter
) -> None:
    """If one of the two ranks is killed or fails, the other rank waits for it in vain, and ends with exit code 1."""
    launched = Launched(tmp_path, count_fault)
    for do, rank, at, count in FAULTS if RUN_ALL_FAULTS else FAULTS[:1]:
        ended = launched.strike(do, rank, at, count)
        assert ended[rank][0] == (-signal.SIGKILL if do == "kill" else 1), ended
        assert ended[1 - rank][0] == 1, ended
        if do == "raise" and rank == 0:
            assert re.search(r"^InjectedError: planted by a test", ended[0][1], re.MULTILINE), ended
    ended = launched.session()
    assert [code for code, _ in ended] == [0, 0], ended
    run = launched.directory
    assert_newest_checkpoint_valid(run, steps_saved(launched.hosts[0]))
    assert_one_value_per_step(run)
    assert_no_temporary_files(run)
    (tmp_path / "seen.txt").write_text("".join((host / "seen.txt").read_text() for host in launched.hosts))
    assert_each_sample_once(tmp_path, "ddp", SAMPLES["ddp"], 2 * SAVE_EVERY)
    assert_bitwise_equal(run_results(run), reference("ddp").results)
