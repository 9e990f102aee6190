"""Tests with full, broken or read-only disks: a run reports the error, and resumes with the same results.

In most tests, one file operation fails with one error. With `RUNNER_FAULTS=all`, all files and errors are tried.
"""

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.compose import TINY_CPU
from helpers.disk_faults import DiskFault, inject_disk_fault
from helpers.dry_run import disturbed_at, run_in_this_process
from helpers.fault_checks import assert_newest_checkpoint_valid, assert_no_temporary_files, assert_one_value_per_step
from helpers.faults import RUN_ALL_FAULTS as ALL
from helpers.runs import assert_bitwise_equal, run_outcome

from runner.storage.run_directory import read_result

OPTIONS = (*TINY_CPU, "data.crop=2", "model.dropout=0.2", "optimizer=adamw", "steps=8", "save_every=2", "eval_every=5")
OPTIONS += ("log_every=1", "name=a", "resume=auto")

EVENTS = "events.out.tfevents.*"

START = ("overrides.yaml", "/.config.yaml", "environment.json")
"""Files that a run needs to begin. `/.config.yaml` is the temporary file of the config of the run directory."""

SAVED = ("tmp.step_00000004/model.safetensors", "tmp.step_00000004/state.pt", "tmp.step_00000004/rank_0.pt")
SAVED += ("tmp.step_00000004/config.yaml", "tmp.step_00000004/manifest.json")

FULL, LIMITED, BROKEN, READ_ONLY, TOO_MANY = errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE


def faults(operation: str, files: str | tuple[str, ...], *numbers: int, first: int = 1) -> list[DiskFault]:
    """Return faults of one kind; without `RUNNER_FAULTS=all`, only one of them."""
    files = (files,) if isinstance(files, str) else files
    every = [DiskFault(operation, file, number, first_failing_call=first) for file in files for number in numbers]
    return every if ALL else every[len(every) // 2 :][:1]


REFUSED = [
    *faults("mkdir", "outputs/a", FULL, READ_ONLY, LIMITED),
    *faults("fsync", "outputs/a", FULL, BROKEN),
    *faults("write", START, FULL, LIMITED, BROKEN),
    *faults("fsync", START, FULL, BROKEN),
    *faults("open", (*START, "/.lock"), FULL, READ_ONLY, TOO_MANY),
    *faults("rename", ("overrides.yaml", "/config.yaml", "environment.json"), FULL, READ_ONLY, BROKEN),
]
CRASHED = [
    *faults("write", SAVED, FULL, LIMITED, BROKEN),
    *faults("fsync", (*SAVED, "tmp.step_00000004"), FULL, LIMITED, BROKEN),
    *faults("open", (*SAVED, EVENTS), READ_ONLY, TOO_MANY),
    *faults("mkdir", "tmp.step_00000004", FULL, READ_ONLY),
    *faults("rename", "/step_00000004", FULL, READ_ONLY, BROKEN),
    *faults("fsync", "/checkpoints", FULL, BROKEN, first=2),
    *faults("write", EVENTS, FULL, BROKEN),
    *faults("write", EVENTS, FULL, BROKEN, first=9),
    *faults("fsync", EVENTS, FULL, BROKEN, first=2),
]
UNTOLD = [
    *faults("write", "result.json", FULL, LIMITED, BROKEN),
    *faults("fsync", "result.json", FULL, BROKEN),
    *faults("rename", "result.json", READ_ONLY, BROKEN),
    *faults("open", "result.json", READ_ONLY, TOO_MANY),
]
DONE = [
    *faults("write", "log.txt", FULL, LIMITED, BROKEN),
    *faults("open", "log.txt", READ_ONLY, TOO_MANY),
    *faults("rename", ".pruned", READ_ONLY, BROKEN),
]
"""Faults by the end of the run: it does not begin; it ends with what it has saved; or it is complete, but either its
result cannot be written, or only a message."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, Any]:
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


@pytest.mark.parametrize("fault", REFUSED, ids=str)
def test_a_run_that_cannot_begin_is_refused_and_leaves_nothing(fault, tmp_path):
    code, console = run(tmp_path, fault)
    assert code == 2, console
    assert console.startswith("output_root: got "), console
    assert os.strerror(fault.errno_code) in " ".join(console.split())
    assert list(tmp_path.iterdir()) == [], "something is left behind"


@pytest.mark.parametrize("fault", CRASHED, ids=str)
def test_a_run_that_cannot_save_ends_with_what_it_has_saved(fault, undisturbed, tmp_path):
    code, console = run(tmp_path, fault)
    assert code == 1, console
    assert os.strerror(fault.errno_code) in " ".join(console.split())
    assert "earlier checkpoints are intact: make room" in console, "what to do is said"
    [path] = tmp_path.glob("outputs/a/*")
    assert_newest_checkpoint_valid(path, 0 if fault.file == EVENTS else 2)
    assert_resumes_to_the_same_end(tmp_path, undisturbed)


@pytest.mark.parametrize("fault", UNTOLD + DONE, ids=str)
def test_disk_errors_outside_of_checkpoints_are_reported_and_lose_no_checkpoint(fault, undisturbed, tmp_path):
    code, console = run(tmp_path, fault)
    assert code == (fault in UNTOLD), console
    assert os.strerror(fault.errno_code) in " ".join(console.split())
    [path] = tmp_path.glob("outputs/a/*")
    assert assert_newest_checkpoint_valid(path, 8) == 8
    code, console = run_in_this_process([*OPTIONS[:-1], f"resume={path}"], tmp_path)
    assert code == 0, console
    assert_bitwise_equal({**run_outcome(path), "curves": undisturbed["curves"]}, undisturbed)


def test_a_run_whose_disk_is_full_crashes_and_resumes_later(undisturbed, tmp_path):
    """A real disk: what the failed checkpoint took is given back, or the result would not fit."""
    disk = tmp_path / "outputs"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk is for root, where the machine lets it")
    try:
        code, console = run_in_this_process([*OPTIONS, "keep=9"], tmp_path)
        assert (code, "Traceback" in console) == (1, False), console
        assert "No space left on device" in " ".join(console.split())
        [path] = disk.glob("a/*")
        assert read_result(path)["status"] == "crashed"
        assert assert_newest_checkpoint_valid(path, 2) < 8
        subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
        assert_resumes_to_the_same_end(tmp_path, undisturbed)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("step", [1, 4, 8] if ALL else [4])
def test_checkpoints_that_are_removed_during_training_are_recreated_or_reported(step, tmp_path):
    def remove(path: Path) -> None:
        while (path / "checkpoints").exists():  # a checkpoint may be written meanwhile
            shutil.rmtree(path / "checkpoints", ignore_errors=True)

    with disturbed_at(step, remove):
        code, console = run_in_this_process(list(OPTIONS), tmp_path)
    assert "Traceback" not in console, console
    if code == 0:
        [path] = tmp_path.glob("outputs/a/*")
        assert assert_newest_checkpoint_valid(path, 8) == 8
    else:
        assert (code, "No such file or directory" in console) == (1, True), console


@pytest.mark.parametrize("what", ["", "checkpoints"])
def test_a_directory_that_becomes_read_only_ends_the_run_with_an_error(what, undisturbed, tmp_path):
    made: list[Path] = []

    def protect(path: Path) -> None:
        made.append(path / what)
        if os.geteuid():
            (path / what).chmod(0o500)
        elif subprocess.run(["chattr", "+i", path / what], capture_output=True, check=False).returncode:
            pytest.skip("this file system has no immutable directories, and root may write to any other")

    try:
        with disturbed_at(4, protect):
            code, console = run_in_this_process(list(OPTIONS), tmp_path)
            assert (code, "Traceback" in console) == (1, False), console
            assert "not permitted" in console or "denied" in console, console
    finally:
        for path in made:
            path.chmod(0o700) if os.geteuid() else subprocess.run(["chattr", "-i", path], check=False)
    assert_resumes_to_the_same_end(tmp_path, undisturbed)
