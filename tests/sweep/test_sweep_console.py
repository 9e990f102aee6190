"""Tests of `runner.sweep.console`, which reads the console file to which a job prints."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.sweep.console import is_open_in, is_running, message


def test_a_job_runs_while_a_process_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "console"
    assert not is_running(path)
    with path.open("w") as file:
        assert not is_running(path)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_running(path)
    assert not is_running(path)


def test_is_open_in_tells_whether_a_process_has_opened_a_file(tmp_path: Path) -> None:
    path, words = tmp_path / "console", [sys.executable, "-c", "input()"]
    with path.open("w") as file:
        own = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=file)
        other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        assert is_open_in(own.pid, path)
        assert not is_open_in(other.pid, path)
        other_name = tmp_path / "linked"
        other_name.hardlink_to(path)
        assert not is_open_in(own.pid, other_name), "somebody else may have linked it"
    finally:
        for process in (own, other):
            process.communicate(b"\n")
    assert not is_open_in(own.pid, path)


def test_a_file_that_the_process_closes_meanwhile_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "other").open("w"), (tmp_path / "console").open("w"):

        def closed(path: Path) -> str:
            target = readlink(path)
            if target.endswith("other"):
                raise FileNotFoundError
            return target

        readlink = os.readlink
        monkeypatch.setattr(os, "readlink", closed)
        assert is_open_in(os.getpid(), tmp_path / "console")
        assert not is_open_in(os.getpid(), tmp_path / "other")


def test_a_console_file_in_a_symlinked_directory_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "007.txt").write_text("secret\n")
    (tmp_path / "console").symlink_to("elsewhere")
    assert message(tmp_path / "elsewhere" / "007.txt") == "secret"
    assert message(tmp_path / "console" / "007.txt") == ""


def test_message_returns_the_last_ten_lines_of_a_file(tmp_path: Path) -> None:
    assert message(tmp_path / "missing") == ""
    path = tmp_path / "console"
    path.write_bytes(b"x" * 50_000 + b"\n\n" + b"".join(b"line %d \xff\n" % number for number in range(20)))
    assert message(path).splitlines() == [f"line {number} \ufffd" for number in range(10, 20)]
