"""Tests of `helpers.fault_checks`: each check of the fault-injection tests detects the errors that it is meant for."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import fault_checks
from helpers.command import ROOT
from helpers.fault_checks import (
    ExternalResources,
    assert_each_sample_once,
    assert_newest_checkpoint_valid,
    run_results,
)
from helpers.handmade_runs import save_and_wait
from helpers.runs import assert_bitwise_equal

from runner.storage.checkpoint import Checkpoint
from runner.storage.checkpoint_writing import Checkpoints
from runner.storage.manifest import DamagedError

STEPS = [["rank 0", 7, 1, 1, "ab"], ["rank 1", 8, 1, 1, "cd"], ["rank 0", 7, 2, 2, "dc"], ["rank 1", 8, 2, 2, "ba"]]
"""Two epochs of four samples, two per rank, as lines of `seen.txt`."""

WRONG: dict[str, dict[int, list[Any]]] = {
    "a sample twice": {3: ["rank 1", 8, 2, 2, "bd"]},
    "a step left out": {0: [], 1: []},
    "a rank that did less": {3: []},
    "a redone step with other samples": {4: ["rank 0", 9, 2, 2, "cd"]},
    "more redone than a save interval": {4: ["rank 0", 9, 1, 1, "ab"]},
}


def write_steps(cwd: Path, change: dict[int, list[Any]]) -> None:
    lines = dict(enumerate(STEPS)) | change
    (cwd / "seen.txt").write_text("".join(f"{json.dumps(line)}\n" for line in lines.values() if line))


def test_samples_that_are_read_twice_or_not_at_all_are_detected(tmp_path: Path) -> None:
    write_steps(tmp_path, {4: ["rank 0", 9, 2, 2, "dc"], 5: ["rank 1", 10, 2, 2, "ba"]})  # redone with the same samples
    assert_each_sample_once(tmp_path, "ddp", num_samples=4, limit=1)
    for change in WRONG.values():
        write_steps(tmp_path, change)
        with pytest.raises(AssertionError):
            assert_each_sample_once(tmp_path, "ddp", num_samples=4, limit=1)


def test_a_damaged_old_or_missing_checkpoint_is_detected(tmp_path: Path) -> None:
    assert assert_newest_checkpoint_valid(tmp_path) == 0
    with pytest.raises(ValueError):  # there is none
        assert_newest_checkpoint_valid(tmp_path, saved=3)
    path = save_and_wait(Checkpoints(tmp_path, keep=2), Checkpoint(3, {"a": torch.zeros(2)}, {}, {}))
    assert assert_newest_checkpoint_valid(tmp_path, saved=3) == 3
    with pytest.raises(AssertionError):  # it is older
        assert_newest_checkpoint_valid(tmp_path, saved=4)
    os.truncate(path / "model.safetensors", 10)
    with pytest.raises(DamagedError):
        assert_newest_checkpoint_valid(tmp_path, saved=3)


def test_a_weight_that_differs_in_one_bit_is_detected(trained: Callable[..., Any]) -> None:
    run = trained("steps=2", "batch_size=8").directory
    (run / "result.json").write_text('{"status": "done", "steps": 2, "metrics": {}, "best": {}}')
    reference = run_results(run)
    assert_bitwise_equal(run_results(run), reference)
    weights = reference["weights"]
    name = next(iter(weights))
    weights[name].view(torch.int32).flatten()[0] ^= 1
    with pytest.raises(AssertionError, match=f"/weights/{name}"):
        assert_bitwise_equal(run_results(run), reference)


def test_leftover_processes_ports_and_temporary_files_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_every_mutation_can_be_applied() -> None:
    """The mutations are run rarely: without this test, an outdated one would be noticed late."""
    mutations = runpy.run_path(str(Path(__file__).with_name("mutations.py")))["read_mutations"]()
    package = "\f".join(file.read_text() for file in (ROOT / "runner").rglob("*.py"))
    assert {each.bug: package.count(each.old) for each in mutations} == {each.bug: 1 for each in mutations}
    tests = {name for each in mutations for name in each.tests}
    assert len(mutations) >= 40
    assert all(each.tests and each.old != each.new for each in mutations)
    for file, _, function in (name.partition("::") for name in tests):
        assert not function or f"def {function}(" in (ROOT / file).read_text(), file
        assert (ROOT / file).is_file(), file
