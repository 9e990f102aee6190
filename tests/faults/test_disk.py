"""Tests with full, broken or read-only disks: a run reports the error, and resumes with the same results.

In most tests, one kind of file operation fails with one error. If the environment contains `RUNNER_FAULTS=all`, all
cases are tested; otherwise, only some of them.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.compose import TINY_CPU
from helpers.disk_faults import DiskFault, inject_disk_fault
from helpers.dry_run import run_in_this_process
from helpers.fault_checks import assert_newest_checkpoint_valid, assert_no_temporary_files, assert_one_value_per_step
from helpers.faults import RUN_ALL_FAULTS as ALL
from helpers.faults import FaultCounter
from helpers.runs import assert_bitwise_equal, run_outcome

import runner.training

OPTIONS = (*TINY_CPU, "data.crop=2", "model.dropout=0.2", "optimizer=adamw", "steps=8", "save_every=2", "eval_every=3")
OPTIONS += ("log_every=1", "name=a", "resume=auto")

FULL, LIMITED, BROKEN, READ_ONLY, TOO_MANY = errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE

EVENTS = "events.out.tfevents.*"

START = ("overrides.yaml", "/.config.yaml", "environment.json")
"""Files that a run needs to begin. `/.config.yaml` is the temporary file of the config of the run directory."""

SAVED = ("tmp.step_00000004/model.safetensors", "tmp.step_00000004/state.pt", "tmp.step_00000004/rank_0.pt")
SAVED += ("tmp.step_00000004/config.yaml", "tmp.step_00000004/manifest.json")

REFUSED = [
    *(DiskFault("write", file, number) for file in START for number in (FULL, LIMITED, BROKEN)),
    *(DiskFault("fsync", file, number) for file in START for number in (FULL, LIMITED, BROKEN)),
    *(DiskFault("open", file, number) for file in START for number in (FULL, READ_ONLY, TOO_MANY)),
    *(DiskFault("rename", file.replace("/.", "/"), number) for file in START for number in (FULL, READ_ONLY, BROKEN)),
    *(DiskFault("open", "/.lock", number) for number in (FULL, READ_ONLY, TOO_MANY)),
    *(DiskFault("mkdir", "outputs/a", number) for number in (FULL, READ_ONLY, LIMITED)),
    *(DiskFault("fsync", "outputs/a", number) for number in (FULL, BROKEN)),
]

CRASHED = [
    *(DiskFault("write", file, number) for file in SAVED for number in (FULL, LIMITED, BROKEN)),
    *(DiskFault("fsync", file, number) for file in SAVED for number in (FULL, LIMITED, BROKEN)),
    *(DiskFault("open", file, number) for file in SAVED for number in (READ_ONLY, TOO_MANY)),
    *(DiskFault("mkdir", "tmp.step_00000004", number) for number in (FULL, READ_ONLY)),
    *(DiskFault("rename", "/step_00000004", number) for number in (FULL, READ_ONLY, BROKEN)),
    *(DiskFault("fsync", "tmp.step_00000004", number) for number in (FULL, BROKEN)),
    *(DiskFault("fsync", "/checkpoints", number, first_failing_call=2) for number in (FULL, BROKEN)),
    *(DiskFault("write", EVENTS, number, first_failing_call=count) for number in (FULL, BROKEN) for count in (1, 9)),
    *(DiskFault("fsync", EVENTS, number, first_failing_call=2) for number in (FULL, BROKEN)),
    *(DiskFault("open", EVENTS, number) for number in (READ_ONLY, TOO_MANY)),
]

UNTOLD = [
    *(DiskFault("write", "result.json", number) for number in (FULL, LIMITED, BROKEN)),
    *(DiskFault("fsync", "result.json", number) for number in (FULL, BROKEN)),
    *(DiskFault("rename", "result.json", number) for number in (READ_ONLY, BROKEN)),
    *(DiskFault("open", "result.json", number) for number in (READ_ONLY, TOO_MANY)),
]

DONE = [
    *(DiskFault("write", "log.txt", number) for number in (FULL, LIMITED, BROKEN)),
    *(DiskFault("open", "log.txt", number) for number in (READ_ONLY, TOO_MANY)),
    *(DiskFault("rename", ".pruned", number) for number in (READ_ONLY, BROKEN)),
]


def some(faults: list[DiskFault]) -> list[DiskFault]:
    return faults if ALL else faults[::6]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cwd = tmp_path_factory.mktemp("undisturbed")
    code, console = run_in_this_process(list(OPTIONS), cwd)
    assert code == 0, console
    [path] = cwd.glob("outputs/a/*")
    return run_outcome(path)


def run(cwd: Path, fault: DiskFault, *arguments: str) -> tuple[int, str]:
    """Run the command while the calls of `fault` fail; return its exit code and console output."""
    with inject_disk_fault(fault) as failed:
        code, console = run_in_this_process([*OPTIONS, *arguments], cwd)
        assert failed(), "it was not come to"
    assert "Traceback" not in console, console
    return code, console


def assert_resumes_to_the_same_end(cwd: Path, undisturbed: dict[str, Any]) -> None:
    code, console = run_in_this_process(list(OPTIONS), cwd)
    assert code == 0, console
    paths = list(cwd.glob("outputs/a/*"))
    assert len(paths) == 1, "it begins anew"
    assert_bitwise_equal(run_outcome(paths[0]), undisturbed)
    assert_no_temporary_files(paths[0])
    assert_one_value_per_step(paths[0])


@pytest.mark.parametrize("fault", some(REFUSED), ids=str)
def test_a_run_that_cannot_begin_is_refused_and_leaves_nothing(
    fault: DiskFault, undisturbed: dict[str, Any], tmp_path: Path, count_fault: FaultCounter
) -> None:
    with count_fault("disk: a run does not begin"):
        code, console = run(tmp_path, fault)
        assert code == 2, console
        assert console.startswith("output_root: got "), console
        assert os.strerror(fault.errno_code) in " ".join(console.split())
        assert list(tmp_path.iterdir()) == [], "something is left behind"
        assert_resumes_to_the_same_end(tmp_path, undisturbed)


@pytest.mark.parametrize("fault", some(CRASHED), ids=str)
def test_a_run_that_cannot_save_ends_with_what_it_has_saved(
    fault: DiskFault, undisturbed: dict[str, Any], tmp_path: Path, count_fault: FaultCounter
) -> None:
    with count_fault("disk: a run cannot save"):
        code, console = run(tmp_path, fault)
        assert code == 1, console
        assert os.strerror(fault.errno_code) in " ".join(console.split())
        assert "earlier checkpoints are intact: make room" in console, "what to do is said"
        [path] = tmp_path.glob("outputs/a/*")
        assert_newest_checkpoint_valid(path, 0 if fault.file == EVENTS else 3)
        assert_resumes_to_the_same_end(tmp_path, undisturbed)


@pytest.mark.parametrize("fault", some(UNTOLD + DONE), ids=str)
def test_disk_errors_outside_of_checkpoints_are_reported_and_lose_no_checkpoint(
    fault: DiskFault, undisturbed: dict[str, Any], tmp_path: Path, count_fault: FaultCounter
) -> None:
    with count_fault("disk: a run goes on"):
        code, console = run(tmp_path, fault)
        assert code == (fault in UNTOLD), console
        assert os.strerror(fault.errno_code) in " ".join(console.split())
        [path] = tmp_path.glob("outputs/a/*")
        assert assert_newest_checkpoint_valid(path, 8) == 8
        code, console = run_in_this_process([*OPTIONS[:-1], f"resume={path}"], tmp_path)
        assert code == 0, console
        assert_bitwise_equal({**run_outcome(path), "curves": undisturbed["curves"]}, undisturbed)


def disturbed_at(step: int, act: Callable[[Path], None]) -> Any:
    """Patch `train_step` so that it calls `act` with the run directory before step `step`."""
    original = runner.training.train_step

    def train_step(state: Any, batches: Any, number: Any, log_due: bool) -> Any:
        if number.number == step:
            act(state.directory)
        return original(state, batches, number, log_due)

    return mock.patch("runner.training.train_step", train_step)


@pytest.mark.parametrize("what", ["", "checkpoints"])
@pytest.mark.parametrize("step", [1, 4, 8] if ALL else [4])
def test_a_directory_removed_during_training_is_recreated_or_reported(
    what: str, step: int, tmp_path: Path, count_fault: FaultCounter
) -> None:
    def remove(path: Path) -> None:
        shutil.rmtree(path / what, ignore_errors=True)

    with count_fault("disk: a directory is removed"), disturbed_at(step, remove):
        code, console = run_in_this_process(list(OPTIONS), tmp_path)
        assert "Traceback" not in console, console
        if what == "":
            assert (code, "has been removed or renamed" in console) == (1, True), console
            assert not list(tmp_path.glob("outputs/a/*"))
        elif code == 0:
            [path] = tmp_path.glob("outputs/a/*")
            assert assert_newest_checkpoint_valid(path, 8) == 8
        else:
            assert (code, "No such file or directory" in console) == (1, True), console


@pytest.mark.parametrize("what", ["", "checkpoints"])
def test_a_directory_that_becomes_read_only_ends_the_run_with_an_error(
    what: str, undisturbed: dict[str, Any], tmp_path: Path, count_fault: FaultCounter
) -> None:
    made: list[Path] = []

    def protect(path: Path) -> None:
        made.append(path / what)
        if os.geteuid():
            (path / what).chmod(0o500)
        elif subprocess.run(["chattr", "+i", path / what], capture_output=True, check=False).returncode:
            pytest.skip("this file system has no immutable directories, and root may write to any other")

    try:
        with count_fault("disk: a directory becomes read-only"), disturbed_at(4, protect):
            code, console = run_in_this_process(list(OPTIONS), tmp_path)
            assert (code, "Traceback" in console) == (1, False), console
            assert "not permitted" in console or "denied" in console, console
    finally:
        for path in made:
            path.chmod(0o700) if os.geteuid() else subprocess.run(["chattr", "-i", path], check=False)
    assert_resumes_to_the_same_end(tmp_path, undisturbed)


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a disk is for root, where the machine lets it")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_read_only_disk_is_refused(read_only_disk: Path, tmp_path: Path) -> None:
    code, console = run_in_this_process([*OPTIONS, f"output_root={read_only_disk}/outputs"], tmp_path)
    assert code == 2, console
    assert console.startswith("output_root: got ")
    assert "Read-only file system" in console
