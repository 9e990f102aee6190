"""Asked to stop: by a request that the loop sees, and by real signals to a real process."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from helpers.command import Command, run_command, until
from helpers.compose import FAST

from runner.storage.checkpoint import load
from runner.system.signals import StopRequest

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


# ---------------------------------------------------------------------------------------------------------------------
# The request


def test_nothing_is_received_when_nothing_is_sent() -> None:
    with StopRequest() as stop:
        assert stop.received == ""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_received_and_announced_at_once(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), number)
        assert stop.received == number.name
        assert capfd.readouterr().err.startswith(f"\n{number.name}: ")


@pytest.mark.parametrize("first", SIGNALS)
def test_a_ctrl_c_after_any_signal_leaves_at_once(first: signal.Signals) -> None:
    with StopRequest():
        os.kill(os.getpid(), first)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_signals_of_a_scheduler_may_be_sent_twice() -> None:
    with StopRequest() as stop:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.received == "SIGTERM"


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_thread_installs_no_handlers() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def enter() -> None:
        with StopRequest() as stop:
            seen.append((stop.received, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [("", before)]


def test_a_closed_terminal_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> int:
        raise BrokenPipeError

    with StopRequest() as stop:
        monkeypatch.setattr(os, "write", gone)
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.undo()
        assert stop.received == "SIGTERM"


# ---------------------------------------------------------------------------------------------------------------------
# A process, in the middle of a run

STEPS = 300
LONG = (*FAST, f"steps={STEPS}", "save_every=20", "log_every=20", "eval_every=100", "model.dropout=0.1")


def whole(run: Path) -> dict[str, Any]:
    """What the newest checkpoint of `run` holds, every byte of it verified, and the result beside it."""
    newest = max((run / "checkpoints").glob("step_*"))
    loaded = load(newest)
    assert loaded.step == int(newest.name.removeprefix("step_"))
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == loaded.step
    return {"tensors": safetensors.torch.load_file(newest / "model.safetensors"), "result": result}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cwd = tmp_path_factory.mktemp("uninterrupted")
    code, told = run_command(*LONG, cwd=cwd)
    assert code == 0, told
    return whole(next(cwd.glob("outputs/*/*")))


@pytest.mark.parametrize("number", SIGNALS)
def test_resume_after_a_signal_is_bitwise_exact(
    number: signal.Signals, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    command = Command(tmp_path, *LONG, kind="torch").saved()
    command.kill(number)
    code, told = command.ended()
    assert code == 75, told
    assert "Traceback" not in told
    assert f"\n{number.name}: " in told, "said at once"
    [run] = tmp_path.glob("outputs/*/*")
    stopped = whole(run)["result"]
    assert stopped["status"] == "stopped"
    assert 0 < stopped["steps"] < STEPS
    assert f"stopped after step {stopped['steps']}/{STEPS}" in told
    assert number.name in (run / "log.txt").read_text()

    # As it says itself.
    typed = re.search(r"^resume: python -m runner (.*)$", told, re.MULTILINE)
    assert typed
    code, told = run_command(*shlex.split(typed[1]), cwd=tmp_path)
    assert code == 0, told
    finished = whole(run)
    assert finished["result"]["status"] == "done"
    assert finished["result"]["metrics"] == uninterrupted["result"]["metrics"]
    assert finished["result"]["best"] == uninterrupted["result"]["best"]
    for name, tensor in uninterrupted["tensors"].items():
        assert torch.equal(finished["tensors"][name], tensor), name
    assert list(tmp_path.glob("outputs/*/*")) == [run], "in its own directory"


SLOW = ("model=resnet18", "device=cpu", "device.threads=1", "batch_size=1024", "accumulation.steps=512", "steps=3")
"""A step of many seconds: 512 times two images."""


def test_the_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    command = Command(tmp_path, *SLOW, kind="torch")
    until(lambda: command.code is not None or "directory " in command.log)  # the first lines: it handles signals now
    command.kill(signal.SIGINT)
    until(lambda: "SIGINT: " in command.console)
    assert command.code is None, "still in the step"
    command.kill(signal.SIGINT)
    code, told = command.ended()
    assert (code, told.splitlines()[-1]) == (130, "interrupted")
    assert "Traceback" not in told
    assert not (command.directory / "result.json").exists()
    assert not list(command.directory.glob("checkpoints/*")), "neither finished the step nor saved"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_sweep(number: signal.Signals, tmp_path: Path) -> None:
    command = Command(tmp_path, *LONG, "-m", "seed=1,2,3", kind="torch").saved()
    command.kill(number)
    code, told = command.ended()
    assert code == 75, told
    [run] = tmp_path.glob("outputs/sweeps/*/*/0*")
    assert run.name.startswith("000-")
    assert whole(run)["result"]["status"] == "stopped"

    # The job goes on by itself, as it says; the other jobs are the user's to start again.
    typed = re.search(r"^resume: python -m runner (.*)$", told, re.MULTILINE)
    assert typed
    code, told = run_command(*shlex.split(typed[1]), cwd=tmp_path)
    assert code == 0, told
    assert whole(run)["result"]["status"] == "done"
    assert yaml.safe_load((run / "config.yaml").read_text())["seed"] == 1


def test_a_ctrl_c_before_the_first_step_leaves_at_once(tmp_path: Path) -> None:
    """While the run directory is written, held there by a git that does not answer."""
    started, git = tmp_path / "started", tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text(f"#!/bin/sh\ntouch '{started}'\nexec sleep 60\n")
    git.chmod(0o755)
    path = f"{git.parent}:{os.environ['PATH']}"
    command = Command(tmp_path / "run", *FAST, "-m", kind="torch", PATH=path)
    until(lambda: command.code is not None or started.exists())
    command.kill(signal.SIGINT)
    code, told = command.ended()
    assert (code, "interrupted" in told.splitlines()) == (130, True), told
    assert "job 0" in told
    assert "KeyboardInterrupt" not in told, "a traceback; Python may only warn of the git that it leaves unreaped"
    assert not list(tmp_path.glob("run/outputs/**/result.json"))
