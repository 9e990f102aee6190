"""Tests of `helpers.fault_checks`: each check of the fault-injection tests detects the errors that it is meant for."""

import ast
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import fault_checks
from helpers.command import ROOT
from helpers.fault_checks import ExternalResources


def test_leftover_processes_ports_and_temporary_files_are_detected(tmp_path, monkeypatch):
    def now(condition: Callable[[], Any], what: str = "") -> None:
        assert condition(), what

    monkeypatch.setattr(fault_checks, "wait_until", now)
    resources = ExternalResources(tmp_path)
    listen = "import socket; server = socket.create_server(('127.0.0.1', 0)); print(flush=True); input()"
    command = [sys.executable, "-c", listen]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        resources.sample()
        with pytest.raises(AssertionError, match="a process is left behind"):
            resources.assert_released()
        monkeypatch.setattr(fault_checks, "processes_in", lambda cwd: {})
        with pytest.raises(AssertionError, match="a port is left open"):
            resources.assert_released()
        process.kill()
    resources.assert_released()
    resources.temporary = tmp_path
    (tmp_path / "file").touch()
    with pytest.raises(AssertionError, match=r"left .*\['file'\]"):
        resources.assert_released()


def test_every_mutation_can_be_applied():
    """The mutations are run rarely: without this test, an outdated one would be noticed late."""
    mutations = runpy.run_path(str(Path(__file__).with_name("mutations.py")))["read_mutations"]()
    files = [file.read_text() for file in (ROOT / "runner").rglob("*.py")]
    for each in mutations:
        [changed] = [file.replace(each.old, each.new) for file in files for _ in range(file.count(each.old))]
        ast.parse(changed, each.bug)
    tests = {name for each in mutations for name in each.tests}
    assert all(each.tests and each.old != each.new for each in mutations)
    for file, _, function in (name.partition("::") for name in tests):
        assert not function or f"def {function}(" in (ROOT / file).read_text(), file
        assert (ROOT / file).is_file(), file
