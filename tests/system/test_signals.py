"""Tests of stop signals: the signal handlers in this process, and signals that are sent to real commands."""

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import sys
import termios
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import command as cli
from helpers.compose import TINY_CPU, build_composed_run, train_in
from helpers.runs import assert_bitwise_equal, newest_checkpoint

from runner.storage.checkpoint import Checkpoint, load
from runner.system.lazy_import import import_lazily
from runner.system.signals import STOP_SIGNALS, CommandSignals, StopRequest, before_training

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_received_and_announced_and_ctrl_c_then_interrupts(number, capfd):
    with StopRequest() as stop:
        for other in (number, signal.SIGTERM, signal.SIGUSR1):  # a scheduler may send several
            os.kill(os.getpid(), other)
        assert stop.received == number.name
        assert capfd.readouterr().err.startswith(f"\n{number.name}: ")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("place", ["exec", "destructor"])
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 75)])
def test_a_command_that_is_stopped_inside_exec_or_a_destructor_cleans_up(place, name, code):
    ended = cli.run_program("signal_itself", place, name)
    assert (ended.returncode, ended.stdout) == (code, "cleaned up\n"), ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_ignored_sighup_stays_ignored():
    """`nohup` makes the command ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received == ""
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_forked_child_ignores_stop_signals():
    with StopRequest() as stop:
        if (child := os.fork()) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(bool(stop.received))
        assert os.waitpid(child, 0)[1] == 0


def test_the_third_ctrl_c_exits_without_a_traceback():
    """It arrives while the exception that the second one raised is being handled."""
    if (child := os.fork()) == 0:
        with suppress(KeyboardInterrupt), StopRequest():
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
        with StopRequest() as stop:
            stop._interrupted = True
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_during_a_lazy_import_ends_the_command_after_the_import(number, error, tmp_path, monkeypatch):
    """If a signal raised an exception in Python code that C++ code calls, as torch's does, it would abort the process.

    The contexts are nested, as those of torch are in that of torchvision.
    """
    (tmp_path / "large.py").write_text(
        "import os, signal\nfrom runner.system.signals import signals_postponed\n"
        f"with signals_postponed():\n    os.kill(os.getpid(), {number})\nlast = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    import_lazily("large")
    with CommandSignals() as command, pytest.raises(error):
        _ = sys.modules["large"].last
    assert sys.modules.pop("large").last == 1
    assert command.exit_code == (75 if number == signal.SIGTERM else 130)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_training_ends_the_command(number, capfd):
    interrupts = number == signal.SIGINT
    with CommandSignals() as command, pytest.raises(KeyboardInterrupt if interrupts else SystemExit):
        os.kill(os.getpid(), number)
    assert command.exit_code == (130 if interrupts else 75)
    assert capfd.readouterr().err == ("" if interrupts else f"\n{number.name}: stopped before the first step\n")


def test_a_signal_after_training_ends_a_sweep_before_its_next_job():
    """It does not end the command at once, so that the result is still written."""
    with CommandSignals():
        with StopRequest() as stop:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == ""
        with pytest.raises(SystemExit):
            before_training()
    with CommandSignals():  # and one during the last step stops the next job
        with StopRequest():
            os.kill(os.getpid(), signal.SIGUSR2)
        with StopRequest() as next_job:
            assert next_job.received == "SIGUSR2"


def test_handlers_are_installed_in_the_main_thread_and_restored():
    before, seen = [signal.getsignal(number) for number in SIGNALS], []

    def enter() -> None:
        with StopRequest():
            seen.append([signal.getsignal(number) for number in SIGNALS])

    enter()
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert (seen[0] != before, seen[1] == before) == (True, True)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


STEPS, SAVE_EVERY = 100, 15
TRAINING = (*TINY_CPU, f"steps={STEPS}", f"save_every={SAVE_EVERY}", "log_every=20", "eval_every=50")
TRAINING += ("model.dropout=0.1",)


def gated_command(session: int, cwd: Path, *words: str) -> cli.Command:
    """Start a command that waits for a signal after the n-th checkpoint, so that it cannot finish earlier."""
    command = cli.Command(cwd, *words, STEP_GATE=f"{session * SAVE_EVERY + 3}:never")
    return command.wait_for_checkpoint(session * SAVE_EVERY)


def verified_outcome(run: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """Verify the newest checkpoint of `run`, and return it and the result of the run."""
    loaded = load(newest_checkpoint(run))
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == loaded.step
    return loaded, result


def test_resume_after_a_signal_is_bitwise_exact(tmp_path):
    """Each signal stops one session of the run; tests/faults/test_kills.py resumes after SIGUSR2."""
    whole = train_in(tmp_path / "whole", build_composed_run(*TRAINING))
    words, numbers = [*TRAINING], [number for number in SIGNALS if number != signal.SIGUSR2]
    for session, number in enumerate(numbers, start=1):
        command = gated_command(session, tmp_path, *words)
        command.signal_processes(number)
        code, output = command.wait_for_all_processes()
        assert code == 75, output
        assert "Traceback" not in output
        assert f"\n{number.name}: " in output, "said at once"
        [run] = tmp_path.glob("outputs/*/*")
        _, stopped = verified_outcome(run)
        assert stopped["status"] == "stopped"
        assert session * SAVE_EVERY <= stopped["steps"] < STEPS
        assert f"stopped after step {stopped['steps']}/{STEPS}" in output
        assert number.name in (run / "log.txt").read_text()
        typed = re.search(r"^resume: python -m runner (.*)$", output, re.MULTILINE)
        assert typed, "the command with which to resume"
        words = shlex.split(typed[1])

    code, output = cli.run_command(*words, cwd=tmp_path)
    assert code == 0, output
    [run] = tmp_path.glob("outputs/*/*")
    loaded, finished = verified_outcome(run)
    assert finished["status"] == "done"
    assert (finished["metrics"], finished["best"]) == (whole.result.metrics, whole.result.best)
    assert_bitwise_equal(loaded.tensors, load(newest_checkpoint(whole.directory)).tensors)


def test_the_second_ctrl_c_exits_without_finishing_the_step(tmp_path):
    hangs = tmp_path / "rank_0_hangs"  # before its first checkpoint (see `helpers.step_gate`)
    hangs.touch()
    command = cli.Command(tmp_path, *TRAINING)
    cli.wait_until(lambda: command.command_exit_code is not None or hangs.stat().st_size)
    command.signal_processes(signal.SIGINT)
    cli.wait_until(lambda: "SIGINT: " in command.console)
    assert command.command_exit_code is None, "still in the step"
    command.signal_processes(signal.SIGINT)
    code, output = command.wait_for_all_processes()
    assert (code, output.splitlines()[-1]) == (130, "interrupted")
    assert "Traceback" not in output
    assert not (command.single_run_directory / "result.json").exists()
    assert not list(command.single_run_directory.glob("checkpoints/*")), "neither finished the step nor saved"


def test_a_signal_ends_a_sweep(tmp_path):
    words = [*TRAINING, "-m", "seed=1,2"]
    for session, number in ((1, signal.SIGTERM), (2, signal.SIGINT)):
        command = gated_command(session, tmp_path, *words)
        command.signal_processes(number)
        code, output = command.wait_for_all_processes()
        assert code == 75, output
        # Another job may have been about to begin.
        saved = tmp_path.glob(f"outputs/sweeps/*/*/0*/checkpoints/step_{session * SAVE_EVERY:08d}")
        assert {verified_outcome(path.parents[1])[1]["status"] for path in saved} == {"stopped"}
        assert "type the same command with resume=auto to continue" in output
        words = [*TRAINING, "-m", "seed=1,2", "resume=auto"]

    code, output = cli.run_command(*words, cwd=tmp_path)
    assert code == 0, output
    runs = sorted(tmp_path.glob("outputs/sweeps/*/*/0*"))
    assert [verified_outcome(run)[1]["status"] for run in runs] == ["done"] * 2
    assert [yaml.safe_load((run / "config.yaml").read_text())["seed"] for run in runs] == [1, 2]


def has_stop_handlers(pid: int) -> bool:
    """Whether a process has handlers for all stop signals."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(re.findall(r"SigCgt:\s+(\w+)", status)[0], 16)
    return all(caught >> (number - 1) & 1 for number in STOP_SIGNALS)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_a_signal_during_the_imports_ends_the_command(number, code, tmp_path):
    process = cli.start_in_new_interpreter(*TINY_CPU, cwd=tmp_path)
    cli.wait_until(lambda: has_stop_handlers(process.pid))
    process.send_signal(number)
    out, err = process.communicate()
    assert (process.returncode, out) == (code, "")
    assert "Traceback" not in err
    assert ("interrupted" if code == 130 else f"{number.name}: stopped before the first step") in err
    assert not list(tmp_path.iterdir())


def test_a_closed_terminal_stops_the_run(tmp_path):
    """Once the terminal is closed, every write to it fails."""
    ours, terminal = pty.openpty()
    own = partial(fcntl.ioctl, terminal, termios.TIOCSCTTY, 0)
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    process = cli.start_in_new_interpreter(
        *TRAINING, "steps=1000000", cwd=tmp_path, **streams, start_new_session=True, preexec_fn=own
    )
    os.close(terminal)
    os.set_blocking(ours, False)

    def saved() -> bool:
        with suppress(BlockingIOError):
            os.read(ours, 65536)  # otherwise, its buffer would fill up
        return bool(list(tmp_path.glob("outputs/*/*/checkpoints/step_*"))) or process.poll() is not None

    cli.wait_until(saved)
    os.close(ours)
    assert process.wait(cli.TIMEOUT_SECONDS) == 75
    [run] = tmp_path.glob("outputs/*/*")
    assert verified_outcome(run)[1]["status"] == "stopped"
    assert "SIGHUP" in (run / "log.txt").read_text()


@pytest.mark.parametrize(
    ("words", "number", "expected"),
    [((), signal.SIGTERM, 75), ((), signal.SIGINT, 130), (("-m",), signal.SIGTERM, 75), (("-m",), signal.SIGINT, 75)],
)
def test_a_signal_before_the_first_step_ends_the_command_at_once(words, number, expected, tmp_path):
    """It arrives while the run directory is being created, and the command waits for a fake `git`, which hangs."""
    started, git = tmp_path / "started", tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text(f"#!/bin/sh\ntouch '{started}'\nexec sleep 60\n")
    git.chmod(0o755)
    path = f"{git.parent}:{os.environ['PATH']}"
    command = cli.Command(tmp_path / "run", *TINY_CPU, *words, PATH=path)
    cli.wait_until(lambda: command.command_exit_code is not None or started.exists())
    command.signal_processes(number)
    code, output = command.wait_for_all_processes()
    assert code == expected, output
    said = f"{number.name}: 1 running job saves" if words else "SIGTERM: stopped before the first step"
    assert ("interrupted" if expected == 130 else said) in output
    assert "KeyboardInterrupt" not in output, "a traceback; Python may only warn of the git that it leaves unreaped"
    assert not list(tmp_path.glob("run/outputs/**/result.json"))
