"""Tests of output that cannot be written: a run and a sweep go on, and the exit code says what became of the work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command import TIMEOUT_SECONDS, child_environment, names_left_in
from helpers.compose import TINY_CPU
from helpers.handmade_runs import write_run_directory

from runner.storage import run_directory

FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")


def run_in_shell(command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m runnerCOMMAND` with the redirections of `command` in a shell, to its end."""
    words = f"set -o pipefail; {sys.executable} -m runner{command}"
    options = {"capture_output": True, "text": True, "timeout": TIMEOUT_SECONDS}
    return subprocess.run(["bash", "-c", words], cwd=cwd, env=child_environment(**variables), **options)  # type: ignore


def assert_done(directory: Path, num_steps: int, metric: str) -> None:
    assert run_directory.read_result(directory)["status"] == "done"
    logged = (directory / "log.txt").read_text()
    assert f"done after step {num_steps}/{num_steps}" in logged
    assert f"step {num_steps}: eval/{metric}" in logged
    assert "ERROR" not in logged


def test_a_run_is_trained_without_any_standard_stream(tmp_path):
    ended = run_in_shell(f" {' '.join(TINY_CPU)} steps=1 <&- >&- 2>&-", tmp_path)
    assert ended.returncode == 0, ended.stderr
    [path] = tmp_path.glob("outputs/classifier/*")
    assert_done(path, 1, "loss")


@FULL
def test_all_jobs_of_a_sweep_run_whatever_its_console_is_and_it_fails_if_one_does(tmp_path):
    words = "steps=1 optimizer.lr=0.1,-1,0.2 sweep.slots=1"
    ended = run_in_shell(f" -m {' '.join(TINY_CPU)} {words} 2>/dev/full | true", tmp_path)
    assert ended.returncode == 2, ended.stderr
    [ledger] = tmp_path.glob("outputs/sweeps/classifier/*/sweep.json")
    states = [job["state"] for job in json.loads(ledger.read_text())["jobs"].values()]
    assert states == ["done", "refused", "done"]


@FULL
@pytest.mark.parametrize("command", [" --help", " runs ."])
def test_a_command_that_only_prints_fails_if_it_cannot_but_not_if_its_reader_leaves(command, tmp_path):
    folder = tmp_path.joinpath(*["a" * 200] * 10)
    for number in range(40):  # the output of `runs` is larger than the buffer of a pipe
        write_run_directory(folder / str(number), status="crashed", error="why")
    full = run_in_shell(f"{command} >/dev/full", tmp_path)
    assert full.returncode == 1
    assert full.stderr == "standard output: it cannot be written (No space left on device)\n"
    closed = run_in_shell(f"{command} >&-", tmp_path)
    assert (closed.returncode, closed.stderr) == (1, "standard output: it cannot be written (Bad file descriptor)\n")
    left = run_in_shell(f"{command} | true", tmp_path)
    assert (left.returncode, left.stderr) == (0, "")


@pytest.mark.cases(
    (" --help", {"PYTHONIOENCODING": "", "LC_ALL": "C"}),
    (" --cfg job name=ü", {"PYTHONIOENCODING": "ascii"}),
    (" compare --help", {"PYTHONIOENCODING": "ascii"}),
)
def test_characters_that_a_console_lacks_are_escaped(command, variables, tmp_path):
    ended = run_in_shell(command, tmp_path, PYTHONUTF8="0", **variables)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.isascii()
    assert ("name: \\xfc\n" in ended.stdout) == ("name" in command)
    assert names_left_in(tmp_path) == set()


@FULL
def test_ranks_train_although_what_their_environments_print_can_be_neither_encoded_nor_written(tmp_path):
    agent = "workload=dqn env.id=helpers.talking_env:Talking-v0 env.num_envs=2 device=cpu parallel=ddp"
    words = f" {agent} steps=2 workload.warm_up=100 workload.eval_episodes=2 >/dev/full"
    ended = run_in_shell(words, tmp_path, PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert ended.returncode == 0, ended.stderr
    assert "2 \\xd7 helpers.talking_env:Talking-v0" in ended.stderr
    assert ended.stderr.isascii()
    assert "standard output: it cannot be written (No space left on device)\n" in ended.stderr
    [path] = tmp_path.glob("outputs/dqn/*")
    assert_done(path, 2, "return")
