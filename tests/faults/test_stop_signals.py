"""Tests of stop signals during startup and training, of a closed terminal, and of suspended processes."""

import fcntl
import os
import pty
import re
import signal
import subprocess
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.command import Command, processes_in, start_in_new_interpreter, wait_until
from helpers.faults import Fault, FaultTrial, only_in_make_faults, run_all_faults

from runner.system.signals import run_main

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT")
STOPPED, INTERRUPTED = 75, 130
SAVED = r"^{name}: finishing the step, then saving; press Ctrl-C to stop at once$"


def training_process(run: str) -> str:
    return "rank 0" if run in ("ddp", "fsdp", "pipeline", "ensemble", "hogwild") else "main"


def during_training(name: str, run: str, at: str = "after step", count: int = 3) -> Fault:
    return Fault(name, at, count, training_process(run), codes=(STOPPED,), console_pattern=SAVED.format(name=name))


def twice(names: str, run: str) -> Fault:
    """Two signals, of which the second ends the command at once if it is SIGINT, and otherwise has no effect."""
    first, second = names.split()
    code, says = (INTERRUPTED, "^interrupted$") if second == "SIGINT" else (STOPPED, SAVED.format(name=first))
    return Fault(names, "after step", 3, training_process(run), codes=(code,), console_pattern=says)


POINTS = (("after step", 2), ("before save", 1), ("before rename step_N", 1), ("before log", 1), ("in evaluation", 1))
SIGNALLED = ("single", "ddp", "fsdp", "pipeline", "hogwild", "ensemble", "workers", "dqn")


@only_in_make_faults
@pytest.mark.parametrize("run", SIGNALLED)
def test_a_run_resumes_after_any_signal_at_any_point(run, reference, trial):
    left = [during_training(name, run, *point) for name, point in zip(STOP_SIGNALS, (*POINTS, POINTS[0]), strict=True)]
    left += [twice(names, run) for names in ("SIGINT SIGINT", "SIGTERM SIGINT", "SIGINT SIGTERM", "SIGHUP SIGUSR1")]
    reached = [each for each in left if f"{each.process}: {each.at_point}" in reference(run).points]
    run_all_faults(reached, lambda number: trial(run, number=number))


@only_in_make_faults
@pytest.mark.parametrize("name", STOP_SIGNALS)
def test_a_run_resumes_after_signals_before_training(name, trial):
    code, says = (INTERRUPTED, "interrupted") if name == "SIGINT" else (STOPPED, f"{name}: stopped before the first")
    points = ("before rename overrides.yaml", "after rename config.yaml", "after rename environment.json")
    faults = [Fault(name, at, codes=(code,), console_pattern=f"^{says}") for at in points]
    trial("single").run_with_faults(*faults)


@only_in_make_faults
@pytest.mark.parametrize("run", ["single", "ddp", "hogwild", "dqn"])
def test_a_run_resumes_after_signals_at_random_moments(run, reference, trial, rng):
    """A signal may also come after the last step, where it has no effect."""
    signals, number = 15, 0
    while signals > 0:
        number += 1
        stopped = trial(run, number=number)
        while signals > 0 and not stopped.done:
            name, after = rng.choice(STOP_SIGNALS), rng.uniform(0.05, reference(run).seconds)
            stopped.run_with_fault(Fault(name, after=after, codes=(0, STOPPED, INTERRUPTED)))
            assert stopped.code != INTERRUPTED or name == "SIGINT", stopped.console
            if stopped.code == STOPPED:
                said = "finishing the step, then saving|stopped before the first step"
                assert re.search(f"^{name}: ({said})", stopped.console, re.MULTILINE), stopped.console
            signals -= 1
        stopped.finish()


TIMEOUT = 8


@only_in_make_faults
@pytest.mark.parametrize("at", ["after step", "before fsync model.safetensors"])
@pytest.mark.parametrize("run", ["ddp", "fsdp", "pipeline", "hogwild", "ensemble", "workers"])
def test_a_run_goes_on_after_a_pause_longer_than_the_timeout(run, at, trial):
    def go_on(command: Command) -> None:
        wait_until(lambda: (paused.cwd / "fired").exists() or command.command_exit_code is not None)
        time.sleep(TIMEOUT + 4)
        for pid in processes_in(paused.cwd):
            os.kill(pid, signal.SIGCONT)

    paused = trial(run, *(() if run == "workers" else (f"parallel.timeout={TIMEOUT}",)))
    pause = Fault("stop all", at, 3, training_process(run), codes=(0,), console_pattern="^done after step")
    assert paused.run_with_fault(pause, go_on)
    paused.assert_done()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, STOPPED), (signal.SIGINT, INTERRUPTED)])
def test_an_exception_that_replaces_a_stop_does_not_change_the_exit_code(number, code):
    """A stop signal raises an exception. A `finally` clause of a library may replace it with another exception."""

    def main() -> int:
        try:
            try:
                signal.raise_signal(number)
            finally:
                raise ValueError("half read")
        except ValueError:
            return 2

    if (pid := os.fork()) == 0:
        os._exit(run_main(main))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code


class Typed:
    """A run whose commands are started in new interpreters; they may leave no process, port, memory or file behind."""

    def __init__(self, faulty: FaultTrial, temporary: Path):
        self.faulty, faulty.watched = faulty, False
        faulty.external_resources.temporary = temporary

    def start(self, ignored: str = "", **options: Any) -> subprocess.Popen[str]:
        """Start a command, and wait until it handles all signals that are not `ignored`, or has ended."""
        with (self.faulty.cwd / "console.txt").open("w") as console:
            streams = dict.fromkeys(("stdout", "stderr"), console)
            process = start_in_new_interpreter(*self.faulty.words(), cwd=self.faulty.cwd, **(streams | options))

        def is_ready() -> bool:
            status = Path(f"/proc/{process.pid}/status").read_text()
            caught = int(re.findall(r"SigCgt:\s+(\w+)", status)[0], 16)
            return all(caught >> (signal.Signals[name] - 1) & 1 for name in STOP_SIGNALS if name != ignored)

        wait_until(lambda: process.poll() is not None or is_ready())
        return process

    def end(self, process: subprocess.Popen[str], *codes: int) -> None:
        while process.poll() is None:
            self.faulty.external_resources.sample()
            time.sleep(0.2)
        self.faulty.external_resources.assert_released()
        console = (self.faulty.cwd / "console.txt").read_text()
        assert process.returncode in codes, console
        assert "Traceback" not in console


@pytest.fixture
def typed(tmp_path, trial: Callable[..., FaultTrial], monkeypatch) -> Callable[[str], Typed]:
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    return lambda run: Typed(trial(run), tmp_path / "t")


@only_in_make_faults
@pytest.mark.parametrize("run", ["single", "ddp"])
@pytest.mark.parametrize("name", STOP_SIGNALS)
def test_a_command_can_be_stopped_from_its_first_moment(name, run, rng, typed):
    command = typed(run)
    for _ in range(2):
        process = command.start()
        time.sleep(rng.uniform(0, 4))
        process.send_signal(signal.Signals[name])
        command.end(process, 0, STOPPED, *([INTERRUPTED] if name == "SIGINT" else []))
    command.faulty.finish()


@only_in_make_faults
@pytest.mark.parametrize("run", ["single", "ddp", "hogwild"])
def test_a_run_resumes_after_its_terminal_was_closed(run, rng, typed):
    command = typed(run)
    for _ in range(3):
        ours, terminal = pty.openpty()
        take_terminal = partial(fcntl.ioctl, terminal, termios.TIOCSCTTY, 0)
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        process = command.start(**streams, start_new_session=True, preexec_fn=take_terminal)
        os.close(terminal)
        os.set_blocking(ours, False)
        end = time.monotonic() + rng.uniform(0, 5)
        while time.monotonic() < end and process.poll() is None:
            with suppress(OSError):
                os.read(ours, 65536)  # or the buffer of the terminal would fill up
            time.sleep(0.01)
        os.close(ours)
        command.end(process, 0, STOPPED)
    command.faulty.finish()


@only_in_make_faults
@pytest.mark.parametrize("run", ["single", "ddp"])
def test_nohup_ignores_a_closed_terminal_and_nothing_else(run, rng, typed):
    command = typed(run)
    for name, codes in (("SIGTERM", (0, STOPPED)), ("SIGHUP", (0,))):
        process = command.start("SIGHUP", preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_IGN))
        time.sleep(rng.uniform(0, 4))
        process.send_signal(signal.Signals[name])
        command.end(process, *codes)
    command.faulty.finish()
