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

import psutil
import pytest
import safetensors.torch
import torch
import yaml
from helpers import command as cli
from helpers.compose import TINY_CPU

from runner.storage.checkpoint import load
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


STEPS = 100
TRAINING = (*TINY_CPU, f"steps={STEPS}", "save_every=20", "log_every=20", "eval_every=50", "model.dropout=0.1")
WAIT_FOR_SIGNAL = {"STEP_GATE": f"{STEPS - 10}:never"}
"""Variables with which a run waits for a signal before one of its last steps, so that it cannot finish earlier."""


def verified_outcome(run: Path) -> dict[str, Any]:
    """Verify the newest checkpoint of `run`, and return its weights and the result of the run."""
    newest = max((run / "checkpoints").glob("step_*"))
    loaded = load(newest)
    assert loaded.step == int(newest.name.removeprefix("step_"))
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == loaded.step
    return {"tensors": safetensors.torch.load_file(newest / "model.safetensors"), "result": result}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, Any]:
    cwd = tmp_path_factory.mktemp("uninterrupted")
    code, output = cli.run_command(*TRAINING, cwd=cwd)
    assert code == 0, output
    return verified_outcome(next(cwd.glob("outputs/*/*")))


# tests/faults/test_kills.py resumes after SIGUSR2.
@pytest.mark.parametrize("number", [number for number in SIGNALS if number != signal.SIGUSR2])
def test_resume_after_a_signal_is_bitwise_exact(number, uninterrupted, tmp_path):
    command = cli.Command(tmp_path, *TRAINING, **WAIT_FOR_SIGNAL).wait_for_checkpoint()
    command.signal_processes(number)
    code, output = command.wait_for_all_processes()
    assert code == 75, output
    assert "Traceback" not in output
    assert f"\n{number.name}: " in output, "said at once"
    [run] = tmp_path.glob("outputs/*/*")
    stopped = verified_outcome(run)["result"]
    assert stopped["status"] == "stopped"
    assert 0 < stopped["steps"] < STEPS
    assert f"stopped after step {stopped['steps']}/{STEPS}" in output
    assert number.name in (run / "log.txt").read_text()

    # Resume with the command that the run itself has printed.
    typed = re.search(r"^resume: python -m runner (.*)$", output, re.MULTILINE)
    assert typed
    code, output = cli.run_command(*shlex.split(typed[1]), cwd=tmp_path)
    assert code == 0, output
    finished = verified_outcome(run)
    assert finished["result"]["status"] == "done"
    assert finished["result"]["metrics"] == uninterrupted["result"]["metrics"]
    assert finished["result"]["best"] == uninterrupted["result"]["best"]
    for name, tensor in uninterrupted["tensors"].items():
        assert torch.equal(finished["tensors"][name], tensor), name
    assert list(tmp_path.glob("outputs/*/*")) == [run], "in its own directory"


SLOW_STEP = ("model=resnet18", "device=cpu", "device.threads=1", "batch_size=1024", "accumulation.steps=512", "steps=3")
"""Overrides with which a step takes many seconds: it has 512 microbatches of two images."""


def test_the_second_ctrl_c_exits_without_finishing_the_step(tmp_path):
    command = cli.Command(tmp_path, *SLOW_STEP)
    cli.wait_until(
        lambda: command.command_exit_code is not None or "directory " in command.log
    )  # it handles signals by now
    used = psutil.Process(command.pid).cpu_times().user
    cli.wait_until(
        lambda: command.command_exit_code is not None or psutil.Process(command.pid).cpu_times().user > used + 1
    )  # in the step
    command.signal_processes(signal.SIGINT)
    cli.wait_until(lambda: "SIGINT: " in command.console)
    assert command.command_exit_code is None, "still in the step"
    command.signal_processes(signal.SIGINT)
    code, output = command.wait_for_all_processes()
    assert (code, output.splitlines()[-1]) == (130, "interrupted")
    assert "Traceback" not in output
    assert not (command.single_run_directory / "result.json").exists()
    assert not list(command.single_run_directory.glob("checkpoints/*")), "neither finished the step nor saved"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_sweep(number, tmp_path):
    command = cli.Command(tmp_path, *TRAINING, "-m", "seed=1,2", **WAIT_FOR_SIGNAL).wait_for_checkpoint()
    command.signal_processes(number)
    code, output = command.wait_for_all_processes()
    assert code == 75, output
    begun = sorted(tmp_path.glob("outputs/sweeps/*/*/0*/checkpoints"))  # another job may have been about to begin
    assert begun
    assert {verified_outcome(path.parent)["result"]["status"] for path in begun} == {"stopped"}
    assert "type the same command with resume=auto to continue" in output

    code, output = cli.run_command(*TRAINING, "-m", "seed=1,2", "resume=auto", cwd=tmp_path, kind="ranks")
    assert code == 0, output
    runs = sorted(tmp_path.glob("outputs/sweeps/*/*/0*"))
    assert [verified_outcome(run)["result"]["status"] for run in runs] == ["done"] * 2
    assert [yaml.safe_load((run / "config.yaml").read_text())["seed"] for run in runs] == [1, 2]


def has_stop_handlers(pid: int) -> bool:
    """Whether a process has handlers for all stop signals."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(re.findall(r"SigCgt:\s+(\w+)", status)[0], 16)
    return all(caught >> (number - 1) & 1 for number in STOP_SIGNALS)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_a_signal_during_the_imports_ends_the_command(number, code, tmp_path):
    warn = cli.child_environment(PYTHONWARNINGS="default")  # a file that is being read may remain unclosed
    process = cli.start_in_new_interpreter(*TINY_CPU, cwd=tmp_path, env=warn)
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
    assert verified_outcome(run)["result"]["status"] == "stopped"
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
