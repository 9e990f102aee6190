"""Tests of runs whose parent process is killed, or whose command gets a signal in a terminal."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers import runs
from helpers.command import Command, processes_in, start_in_new_interpreter, wait_until
from helpers.compose import TINY_CPU
from helpers.dry_run import run_in_this_process

from runner.storage.run_directory import read_result
from runner.storage.saved_run import saved_config

LONG = (*runs.TWO_RANK_DDP, "steps=100000", "save_every=10", "log_every=20", "eval_every=60", "model.dropout=0.1")


@pytest.mark.parametrize("moment", ["start", "saving", "a rank is stopped"])
def test_a_killed_parent_leaves_nothing_behind(moment, tmp_path):
    command = Command(tmp_path, *LONG, *(["save_every=1"] if moment == "saving" else []))
    ranks = command.wait_for_rank_pids()
    if moment != "start":
        command.wait_for_checkpoint()
    sockets, _ = runs.held_resources(tmp_path)
    assert sockets, "of the store, and of gloo"
    if moment == "a rank is stopped":
        command.signal_processes(signal.SIGSTOP, ranks[1])
    command.signal_processes(signal.SIGKILL)
    assert command.wait_for_all_processes()[0] == -signal.SIGKILL
    # The kernel closes them at the very end.
    wait_until(lambda: not sockets & runs.listening_inodes(), what="left behind")


def test_a_done_run_that_is_resumed_and_killed_is_no_longer_done(tmp_path):
    assert run_in_this_process([*TINY_CPU, "steps=10", "save_every=10"], tmp_path)[0] == 0
    directory = runs.only_run(tmp_path)
    command = Command(tmp_path, f"resume={directory}", "parallel=ddp", "parallel.processes=2", "steps=100000")
    wait_until(lambda: (directory / "checkpoints/step_00000020").exists())
    command.signal_processes(signal.SIGKILL)
    command.wait_for_all_processes()
    assert read_result(directory) == {}
    assert json.loads((directory / "result.json.superseded").read_text())["steps"] == 10
    assert saved_config(directory).values["steps"] == 100_000


@pytest.fixture
def cold(tmp_path) -> Iterator[Callable[..., Any]]:
    """Return a function that starts a command in a new interpreter, with its own fork server and process group."""
    begun = []

    def start_it(*arguments: str) -> Any:
        with (tmp_path / "console.txt").open("w") as console:
            process = start_in_new_interpreter(
                *arguments, cwd=tmp_path, stdout=console, stderr=console, start_new_session=True
            )
        begun.append(process)
        wait_until(lambda: list(tmp_path.glob("outputs/*/*/checkpoints/step_*")) or process.poll() is not None)
        assert process.poll() is None, (tmp_path / "console.txt").read_text()
        return process

    yield start_it
    for process in begun:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_killed_parent_leaves_no_fork_server(cold, tmp_path):
    process = cold(*LONG)
    begun = processes_in(tmp_path)
    assert len(begun) >= 5, "the parent, the tracker of shared memory, the fork server, two ranks"
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in begun if pid != process.pid}
    for pid in (pid for pid, name in names.items() if not name.startswith("rank ")):
        os.kill(pid, signal.SIGINT)  # Ctrl-C reaches them, too
    newest = runs.newest_checkpoint(runs.only_run(tmp_path))
    wait_until(lambda: runs.newest_checkpoint(runs.only_run(tmp_path)) > newest)
    assert processes_in(tmp_path) == begun
    process.kill()
    assert process.wait() == -signal.SIGKILL
    wait_until(lambda: not processes_in(tmp_path), what="left behind")


@pytest.mark.slow
def test_a_killed_parent_leaves_no_worker_and_no_memory(cold, tmp_path):
    runs.write_images(tmp_path / "images")
    data = ["data=imagefolder", f"data.root={tmp_path}/images", "data.size=8", "data.workers=1", "batch_size=8"]
    few = ["model=tiny", "device=cpu", "device.threads=1", "steps=100000", "save_every=5", "eval_every=0"]
    process = cold("parallel=ddp", *few, *data)
    sockets, names = wait_until(lambda: held if all(held := runs.held_resources(tmp_path)) else None)
    assert len(processes_in(tmp_path)) >= 9, "and each rank's own fork server and worker"
    process.kill()
    assert process.wait() == -signal.SIGKILL
    wait_until(lambda: not processes_in(tmp_path), what="left behind")
    wait_until(lambda: not sockets & runs.listening_inodes(), what="left behind")
    assert not [name for name in names if Path(name).exists()]


@pytest.mark.parametrize("mode", ["hogwild", "ensemble", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_signal_to_one_rank_stops_the_run_in_other_modes(mode, tmp_path):
    command = Command(tmp_path, *LONG, f"parallel={mode}").wait_for_checkpoint()
    command.signal_processes(signal.SIGTERM, command.wait_for_rank_pids()[1])
    code, console = command.wait_for_all_processes()
    assert code == 75, console
    assert f"stopped after step {runs.checkpoint_tensors(command.single_run_directory)['step']}/100000" in console


def test_a_ctrl_c_in_a_terminal_which_reaches_the_command_and_its_ranks_stops_the_run_once(tmp_path):
    command = Command(tmp_path, *LONG).wait_for_checkpoint()
    command.signal_processes(signal.SIGINT, command.pid, *command.wait_for_rank_pids())
    code, console = command.wait_for_all_processes()
    assert code == 75, console
    assert console.count("SIGINT: finishing the step, then saving") == 1
    assert "Traceback" not in console
    run = command.single_run_directory
    assert len(list(runs.newest_checkpoint(run).glob("rank_*.pt"))) == 2
    assert f"stopped after step {runs.checkpoint_tensors(run)['step']}/100000" in console


def test_a_second_ctrl_c_ends_the_run_without_saving(tmp_path):
    command = Command(tmp_path, *LONG).wait_for_checkpoint()
    stopped = command.wait_for_rank_pids()[1]  # so that the ranks cannot finish their step
    command.signal_processes(signal.SIGSTOP, stopped)
    command.signal_processes(signal.SIGINT)
    wait_until(lambda: "SIGINT: finishing the step" in command.console)
    command.signal_processes(signal.SIGINT)
    code, console = command.wait_for_all_processes()
    assert (code, console.splitlines()[-1]) == (130, "interrupted")
    assert "Traceback" not in console
