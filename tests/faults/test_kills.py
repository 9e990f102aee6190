"""Tests of runs of which all processes, one rank or a data worker is killed, stops or fails, and which are resumed.

`make test` tries each kind of fault, and several kinds of runs; `make faults` kills all processes at each named point
and at random times, and lets each rank die or stop at each point. Signals are also in tests/system/test_signals.py.
"""

import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.command import Command, glob, processes_in, run_command, wait_until
from helpers.fault_checks import (
    ExternalResources,
    assert_newest_checkpoint_valid,
    assert_no_temporary_files,
    assert_one_value_per_step,
    steps_saved,
)
from helpers.fault_points import plant_fault
from helpers.faults import DIGITS, RUN_ALL_FAULTS, RUNS, Fault, FaultTrial, only_in_make_faults, run_all_faults
from helpers.plain_loop import largest_difference
from helpers.runs import free_port, newest_checkpoint
from safetensors.torch import load_file

STOPPED, INTERRUPTED = 75, 130
TIMEOUT = 15
"""`parallel.timeout` in seconds. It also limits the start of a rank, which may be slow on a busy machine."""

SAYS = {
    "kill": r"was killed by SIGKILL \(the kernel does that where memory runs out\)$",
    "raise": r"failed: InjectedError: planted by a test \(.*fault_points\.py:\d+\)$",
    "stop": "did not reach the collective that the others waited in: it is stopped, or hangs "
    rf"\(parallel\.timeout={TIMEOUT}\)$",
}
SAYS["hang"] = SAYS["stop"]


def rank(do: str, number: int, at: str, visit_number: int = 1) -> Fault:
    """A rank that is killed, stops, hangs or fails, which ends the command with exit code 1."""
    pattern = f"^rank {number} {SAYS[do]}"
    return Fault(do, at, visit_number, f"rank {number}", codes=(1,), console_pattern=pattern, traceback=do == "raise")


def assert_named_once(console: str) -> None:
    """Fail unless exactly one line names a rank, and the console says after which step the run crashed."""
    assert len(re.findall(r"^rank \d+ ", console, re.MULTILINE)) == 1, console
    assert re.search(r"^crashed after step \d+/\d+", console, re.MULTILINE), console


SELECTED = {
    "single": [
        Fault(at_point="before rename config.yaml"),
        Fault(at_point="after fsync model.safetensors", visit_number=2),
        Fault(at_point="after rename step_N", visit_number=2),
        Fault(at_point="in evaluation", visit_number=2),
        Fault("SIGUSR2", "before rename step_N", codes=(STOPPED,), console_pattern="^SIGUSR2: finishing the step"),
        Fault(at_point="before rename result.json"),
    ],
    "ddp": [
        rank("kill", 0, "after fsync model.safetensors"),
        Fault(at_point="before rename rank_1.pt", process="rank 1"),
        Fault("SIGTERM SIGINT", "after step", 3, "rank 0", codes=(INTERRUPTED,), console_pattern="^interrupted$"),
    ],
    "pipeline": [rank("kill", 1, "after step", 4)],
    "hogwild": [rank("raise", 1, "after save")],
    "dqn": [Fault(at_point="after step", visit_number=9)],
}


@pytest.mark.parametrize("run", SELECTED)
def test_a_run_with_faults_ends_as_one_without(run, trial):
    faulty = trial(run)
    for fault in SELECTED[run]:
        assert faulty.run_with_fault(fault), f"{fault}: the run was done before"
        if fault.codes == (1,):
            assert_named_once(faulty.console)
    faulty.finish()


NUM_KILLS = dict.fromkeys(RUNS, 15) | {"single": 100, "workers": 20, "dqn": 30, "dqn ddp": 30}
"""How often `make faults` kills each run at a random moment."""


@only_in_make_faults
@pytest.mark.parametrize("run", RUNS)
def test_runs_killed_at_each_point_resume_bitwise(run, reference, trial):
    """The run is killed at each point that a process reaches, at its second visit if there is one."""
    faults, points = [], reference(run).points
    for line in dict.fromkeys(points):
        process, _, point = line.partition(": ")
        faults.append(Fault(at_point=point, process=process, visit_number=min(2, points.count(line))))
    run_all_faults(faults, lambda number: trial(run, number=number))


@only_in_make_faults
@pytest.mark.parametrize("run", RUNS)
def test_runs_killed_at_random_moments_resume_bitwise(run, reference, trial, rng):
    """The time of a kill is drawn between the start of a command and the duration of an undisturbed run."""
    kills, number = NUM_KILLS[run], 0
    while kills > 0:
        number += 1
        killed = trial(run, number=number)
        while kills > 0 and killed.run_with_fault(Fault(after=rng.uniform(0, reference(run).seconds))):
            kills -= 1
        killed.finish()


@only_in_make_faults
def test_stacks_killed_at_random_moments_end_as_unbroken_ones(tmp_path, rng):
    """Two stacks of two runs, which are killed and resumed twelve times."""
    words = ("-m", *DIGITS, "model.dropout=0", "precision=64", "seed=0,1", "optimizer.lr=0.01,0.02", "sweep.stack=2")
    since = time.monotonic()
    code, console = run_command(*words, cwd=tmp_path / "unbroken")
    assert code == 0, console
    assert console.count("2 together") == 4
    duration, broken = time.monotonic() - since, tmp_path / "broken"
    for _ in range(12):
        command = Command(broken, *words, "resume=auto")
        time.sleep(rng.uniform(0.1, 0.7) * duration)
        command.signal_processes(signal.SIGKILL, command.pid, *processes_in(broken))
        code, console = command.wait_for_all_processes()
        assert code in (0, -signal.SIGKILL), console
    code, console = run_command(*words, "resume=auto", cwd=broken)
    assert code == 0, console
    wanted = {each.name: each for each in glob(tmp_path / "unbroken", "outputs/sweeps/*/*/0*")}
    found = glob(broken, "outputs/sweeps/*/*/0*")  # of several sweeps: the next begins when one is done
    assert len(wanted) == 4
    assert {each.name for each in found} == {*wanted}
    for run in found:
        weights = [load_file(newest_checkpoint(each) / "model.safetensors") for each in (run, wanted[run.name])]
        assert largest_difference(*weights) < 1e-12
        assert_one_value_per_step(run)
        assert_no_temporary_files(run)


MODES = ("ddp", "fsdp", "pipeline", "hogwild", "ensemble")
MOMENTS = {
    "starting": ("before preparation", 1),
    "training": ("after step", 4),
    "logging": ("before log", 1),
    "evaluating": ("in evaluation", 1),
    "about to save": ("before save", 1),
    "saving its state": ("before fsync rank_{rank}.pt.part", 1),
    "saving the weights": ("after fsync model.safetensors", 1),
    "committing": ("before rename step_N", 1),
    "having saved": ("after save", 1),
}
"""Points at which a fault happens, and at which visit in the session (1 is the first). Some only rank 0 reaches."""


def fault(do: str, number: int, moment: str) -> Fault:
    at, count = MOMENTS[moment]
    return rank(do, number, at.format(rank=number), count)


@only_in_make_faults
@pytest.mark.parametrize("do", ["kill", "raise"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_after_ranks_that_died_at_any_point(do, mode, reference, trial):
    faults = [fault(do, number, moment) for moment in MOMENTS for number in (0, 1)]
    reached = [each for each in faults if f"{each.process}: {each.at_point}" in reference(mode).points]
    run_all_faults(reached, lambda number: trial(mode, number=number), assert_named_once)


@only_in_make_faults
@pytest.mark.parametrize("do", ["stop", "hang"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_after_ranks_that_stopped(do, mode, trial):
    run = trial(mode, f"parallel.timeout={TIMEOUT}")
    for number, moment in ((1, "training"), (0, "training"), (1, "about to save"), (0, "committing")):
        assert run.run_with_fault(fault(do, number, moment)), "the run was done before"
        assert_named_once(run.console)
    run.finish()


RESTARTED = [("kill", 1, "training"), ("raise", 0, "evaluating"), ("kill", 0, "committing"), ("raise", 1, "starting")]


@only_in_make_faults
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("do", "number", "moment"), RESTARTED)
def test_all_ranks_restart_from_the_last_checkpoint(do, number, moment, mode, trial):
    """The ranks restart within the same command, which has the same results as an undisturbed run."""
    run, one = trial(mode, "parallel.max_restarts=1"), fault(do, number, moment)
    says = rf"{one.console_pattern[:-1]}\n(?:.*\n)*all ranks restart from the last checkpoint \(restart 1 of 1\)"
    assert run.run_with_fault(replace(one, codes=(0,), console_pattern=says))
    run.assert_done()


def strike_a_worker(cwd: Path, number: signal.Signals, steps: int) -> Callable[[Command], None]:
    """Return a function that sends a signal to the data worker of a run after `steps` more training steps."""

    def read() -> int:
        path = cwd / "seen.txt"
        return path.read_text().count("\n") if path.exists() else 0

    before = read()

    def strike(command: Command) -> None:
        wait_until(lambda: command.command_exit_code is not None or read() >= before + steps)
        others = [pid for pid in processes_in(cwd) if pid != command.pid]
        command.signal_processes(number, *others)

    return strike


WORKER = {
    signal.SIGKILL: r"data worker \d+: it was killed by SIGKILL$",
    signal.SIGBUS: r"data worker \d+: it was killed by SIGBUS$",
    signal.SIGSTOP: r"data workers \d+: no batch arrived within 5 s: a worker is stopped",
}


@pytest.mark.parametrize("number", [*WORKER] if RUN_ALL_FAULTS else [signal.SIGKILL])
def test_a_run_resumes_after_its_data_worker_died(number, trial):
    run = trial("workers")
    for steps in (3, 12, 9) if RUN_ALL_FAULTS else (3,):
        fault = Fault(number.name, codes=(1,), console_pattern=WORKER[number], traceback=True)
        assert run.run_with_fault(fault, strike_a_worker(run.cwd, number, steps)), "the run was done before"
    run.run_with_faults(*([Fault("kill all", "after step", 9)] if RUN_ALL_FAULTS else []))


def torchrun(trial: FaultTrial) -> list[tuple[int, str]]:
    """Start or resume a run as two commands in `host_0` and `host_1`; return the exit code and console of each."""
    port = str(free_port())
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = trial.words() if trial.begun else (*trial.words(), f"output_root={trial.cwd}/outputs")
    commands = [
        Command(trial.cwd / f"host_{each}", *words, kind="faults", RANK=each, LOCAL_RANK=each, **variables)
        for each in ("0", "1")
    ]
    resources = [ExternalResources(command.cwd) for command in commands]
    ended = [command.wait_for_all_processes() for command in commands]
    for each in resources:
        each.assert_released()
    return ended


FAULTS = [
    ("raise", 0, "before log", 1),
    ("kill", 1, "after step", 12),
    ("kill", 0, "after fsync model.safetensors", 1),
    ("raise", 1, "before fsync rank_1.pt.part", 1),
    ("kill", 1, "in evaluation", 1),
    ("kill", 0, "before preparation", 1),
]


def test_a_torchrun_run_resumes_after_its_ranks_died(trial):
    """If one of the two ranks is killed or fails, the other rank waits for it in vain, and ends with exit code 1."""
    launched = trial("ddp")
    hosts = [launched.cwd / f"host_{number}" for number in (0, 1)]
    for do, number, at, count in FAULTS if RUN_ALL_FAULTS else FAULTS[:1]:
        hosts[number].mkdir(exist_ok=True)
        with plant_fault(hosts[number], at, f"rank {number}", count, do):
            ended = torchrun(launched)
        assert (hosts[number] / "fired").exists(), ended
        if launched.begun:
            assert_newest_checkpoint_valid(launched.directory, steps_saved(hosts[0]))
        assert ended[number][0] == (-signal.SIGKILL if do == "kill" else 1), ended
        assert ended[1 - number][0] == 1, ended
        if do == "raise" and number == 0:
            assert re.search(r"^InjectedError: planted by a test", ended[0][1], re.MULTILINE), ended
    ended = torchrun(launched)
    assert [code for code, _ in ended] == [0, 0], ended
    for name in ("seen.txt", "saved.txt"):
        written = [(host / name).read_text() for host in hosts if (host / name).exists()]
        (launched.cwd / name).write_text("".join(written))
    launched.assert_done()
