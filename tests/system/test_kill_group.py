"""Tests of `kill_group`: it kills all processes of a group, and deletes incomplete output of its compilers."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import runner.system.kill_group
from runner.system.kill_group import kill_group

COMPILER = "import sys, time; open(sys.argv[2], 'w').close(); print(flush=True); time.sleep(600)"
"""A program that creates the file after `-o`, and then sleeps, like a compiler that has not finished yet."""


def compiler(output: str, directory: Path, group: int | None = None, name: str = "g++") -> subprocess.Popen[bytes]:
    """Start `COMPILER` as program `name` in the process group `group` or a new one; wait until its output exists."""
    program = directory.parent / name
    if not program.exists():
        program.symlink_to(sys.executable)
    command = [program, "-c", COMPILER, "-o", output]
    started = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, process_group=group or 0)
    assert started.stdout is not None
    with started.stdout as output_pipe:
        output_pipe.readline()
    return started


def test_all_processes_are_killed_and_incomplete_compiler_output_is_deleted(tmp_path: Path) -> None:
    tmp_path = tmp_path / "cache"
    tmp_path.mkdir()
    (tmp_path / "finished.so").touch()
    first = compiler("relative.so", tmp_path)
    second = compiler(str(tmp_path / "absolute.so"), tmp_path, first.pid, "x86_64-linux-gnu-g++-12")
    sorter = compiler("sorted.txt", tmp_path, first.pid, "sort")
    other = compiler(str(tmp_path / "other.so"), tmp_path)
    try:
        kill_group(first.pid)
        assert [first.wait(60), second.wait(60), sorter.wait(60)] == [-signal.SIGKILL] * 3
        assert sorted(path.name for path in tmp_path.iterdir()) == ["finished.so", "other.so", "sorted.txt"]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_group_is_killed_even_if_its_processes_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(group: int) -> list[Path]:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner.system.kill_group, "_compiler_outputs", interrupted)
    (tmp_path / "cache").mkdir()
    started = compiler("a.so", tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        kill_group(started.pid)
    assert started.wait(60) == -signal.SIGKILL


def test_killing_a_group_that_has_ended_is_an_error() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""], process_group=0)
    ended.wait()
    with pytest.raises(ProcessLookupError):
        kill_group(ended.pid)
