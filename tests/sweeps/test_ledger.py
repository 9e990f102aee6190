"""Tests of the sweep ledger: only one process at a time writes it, and an unfinished sweep is found and resumed."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from helpers.disk_faults import DiskFault, inject_disk_fault
from helpers.permissions import enforced_permissions

from runner.config.errors import ConfigError
from runner.storage.ledger_file import read_ledger
from runner.sweeps.ledger import Ledger, console_file

OpenLedger = Callable[..., Ledger]


@pytest.fixture
def open_ledger(tmp_path) -> Iterator[OpenLedger]:
    """A function that opens ledgers in `tmp_path`; they are closed at the end of the test."""
    with ExitStack() as stack:
        root = tmp_path / "sweeps" / "a"
        yield lambda typed, resume="auto": stack.enter_context(Ledger(typed, root, resume))


def record_finished_job(ledger: Ledger, number: int, code: int, config_hash: str = "a") -> None:
    """Create the run directory of a job, and record in the ledger that the job ended with the exit code `code`."""
    (ledger.path / f"{number:03d}-seed={number}").mkdir(exist_ok=True)
    ledger.update(number, config_hash=config_hash, code=code)


def test_a_sweep_in_which_no_job_ran_leaves_no_files(open_ledger, tmp_path):
    ledger = open_ledger(["seed=1,2"])
    assert ledger.path.parent == tmp_path / "sweeps" / "a"
    head = {"typed": ["seed=1,2"], "complete": False, "pid": os.getpid()}
    assert read_ledger(ledger.path) == head | {"num_jobs": 0, "jobs": {}}
    console_file(ledger.path, 0).parent.mkdir()
    console_file(ledger.path, 0).write_text("seed: got -1\n")
    (ledger.path / "slurm").mkdir()
    ledger.update(0, config_hash="a", code=2)
    ledger.end(len(ledger.settled_states) == 2)
    ledger.__exit__()
    assert not list(tmp_path.iterdir())


def test_secrets_are_not_in_the_ledger_and_names_need_not_be_utf_8(open_ledger):
    root = os.fsdecode(b"data.root=a\xff")
    ledger = open_ledger(["data.token=s3cret", root, "seed=1,2"])
    overrides, error = ["data.token=s3cret", root], "https://ann:s3cret@host/x cannot be read"
    record_finished_job(ledger, 0, 1)
    ledger.update(0, overrides=overrides, error=error)
    found = read_ledger(ledger.path)
    assert found["typed"] == ["data.root=a\\xff", "data.token=***", "seed=1,2"]
    assert found["jobs"]["0"]["overrides"] == ["data.token=***", "data.root=a\\xff"]
    assert found["jobs"]["0"]["error"] == "https://ann:***@host/x cannot be read"
    assert overrides[0] == "data.token=s3cret"
    ledger.__exit__()
    assert open_ledger(["data.token=s3cret", root, "seed=1,2"]).path == ledger.path, "it is found again with the secret"


def test_sweeps_match_regardless_of_the_order_and_the_spelling_of_overrides(open_ledger, tmp_path):
    jobs = {"0": {"code": 3, "config_hash": "a"}, "1": {"state": "running", "config_hash": "a"}}
    path = write_ledger(tmp_path, {"typed": ["epochs=1", "seed=1,2"], "complete": False, "jobs": jobs})
    of_sweep = ["resume=auto", "output_root=x", "sweep.slots=2", "sweep=local", "++sweep.retries=1", "+output_root=x"]
    typed = ["seed=3", "++seed=1,2", *of_sweep, "++epochs=1"]
    ledger = open_ledger(typed)
    assert (ledger.path, ledger.typed) == (path, ["epochs=1", "seed=1,2"])
    assert ledger.settled_states == {0: ""}, "diverged is a result"
    assert path not in (open_ledger(["epochs=2"]).path, open_ledger(typed, "never").path)


@pytest.mark.parametrize(("codes", "complete"), [([0, 3], True), ([0, 1], False), ([2, 0], False), ([0, 75], False)])
def test_a_sweep_is_complete_when_no_job_has_to_be_repeated(open_ledger, codes, complete):
    ledger = open_ledger(["seed=1,2"])
    for number, code in enumerate(codes):
        record_finished_job(ledger, number, code)
        assert not read_ledger(ledger.path)["complete"]
    ledger.end(len(ledger.settled_states) == 2)
    ledger.__exit__()
    assert read_ledger(ledger.path)["complete"] == complete
    assert (open_ledger(["seed=1,2"]).path == ledger.path) == (not complete)


def test_a_sweep_that_another_process_runs_is_refused_and_not_changed(open_ledger):
    first = open_ledger(["seed=1,2"])
    record_finished_job(first, 0, 0)
    before = (first.path / "sweep.json").read_bytes()
    with pytest.raises(ConfigError) as refusal:
        open_ledger(["seed=1,2"])
    assert (refusal.value.key, refusal.value.got) == ("resume", "auto")
    assert refusal.value.why == f"another process (pid {os.getpid()}) runs this sweep, {first.path}"
    assert (first.path / "sweep.json").read_bytes() == before
    for other in (open_ledger(["seed=1,3"]), open_ledger(["seed=1,2"], "never")):
        assert other.path != first.path, "another sweep is not waited for"
        other.__exit__()
    first.__exit__()
    assert open_ledger(["seed=1,2"]).path == first.path, "it is free again"


VALID: dict[str, Any] = {"typed": ["seed=1,2"], "complete": False, "jobs": {"0": {"code": 0, "config_hash": "a"}}}
UNREADABLE = [json.dumps(VALID).encode()[:30], b"[" * 100_000]
OTHER_TYPES = [
    json.dumps(VALID | {"jobs": jobs}).encode()
    for jobs in ([1], {"0": {"code": 0}}, {"0": {"code": "0", "config_hash": "a"}}, {"1" * 1000: {"config_hash": "a"}})
]


def write_ledger(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "sweeps" / "a" / "before"
    path.mkdir(parents=True)
    (path / "sweep.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


@pytest.mark.parametrize("content", [*UNREADABLE, *OTHER_TYPES], ids=lambda content: content[20:70].decode())
def test_a_damaged_ledger_is_refused_for_its_own_sweep_and_ignored_for_others(content, open_ledger, tmp_path, caplog):
    path = write_ledger(tmp_path, content)
    if content in OTHER_TYPES:
        with pytest.raises(ConfigError) as refusal:
            open_ledger(["seed=1,2"])
        assert (refusal.value.key, refusal.value.got) == ("resume", "auto")
        assert refusal.value.why.startswith(f"{path}/sweep.json is damaged: ")
        assert caplog.messages == []
    assert read_ledger(path) == {}
    assert open_ledger(["seed=5"]).path != path
    assert open_ledger(["seed=1,2"], "never").path != path
    assert {text.partition(": ")[0] for text in caplog.messages} == {f"{path}/sweep.json is ignored"}
    assert (path / "sweep.json").read_bytes() == content


@pytest.mark.parametrize("kind", ["pipe", "link", "directory", "large"])
def test_a_ledger_that_is_not_a_regular_file_or_too_large_is_ignored(kind, tmp_path, caplog):
    ledger = tmp_path / "sweep.json"
    if kind == "large":
        ledger.write_text(json.dumps(VALID) + " " * 24_000_000)
    make = {"pipe": os.mkfifo, "link": lambda path: path.symlink_to("/dev/zero"), "directory": Path.mkdir}
    make.get(kind, Path.touch)(ledger)
    assert read_ledger(tmp_path) == {}
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("kind", "folder"), [("folder", "console"), ("file", "conf"), ("hard link", "console"), ("pipe", "console")]
)
def test_a_sweep_directory_with_links_or_pipes_is_refused(kind, folder, open_ledger, tmp_path):
    """Otherwise, the output of the jobs, or the best trial of a search, could be written outside of the directory."""
    path, elsewhere = write_ledger(tmp_path, VALID), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "000.txt").write_text("mine")
    (path / ".lock").hardlink_to(elsewhere / "000.txt")  # nothing is written to it
    if kind == "folder":
        (path / folder).symlink_to(elsewhere)
    else:
        (path / folder).mkdir()
        make = {"file": Path.symlink_to, "hard link": Path.hardlink_to, "pipe": lambda file, _: os.mkfifo(file)}
        make[kind](path / folder / "000.txt", elsewhere / "000.txt")
    with pytest.raises(ConfigError) as refusal:
        open_ledger(["seed=1,2"])
    assert refusal.value.key == "resume"
    assert str(refusal.value.got).startswith(str(path / folder))
    assert open_ledger(["seed=1,2"], "never").path != path
    shutil.rmtree(path / folder) if kind != "folder" else (path / folder).unlink()
    open_ledger(["seed=1,2"]).__exit__()
    assert (elsewhere / "000.txt").read_text() == "mine"


@pytest.mark.cases(
    DiskFault("open", "/.lock", errno.ENOSPC),
    DiskFault("write", "sweep.json", errno.ENOSPC),
    DiskFault("fsync", "sweep.json", errno.EIO),
    ids=str,
)
def test_a_sweep_that_cannot_start_because_of_a_disk_error_leaves_no_files(fault, open_ledger, tmp_path):
    with inject_disk_fault(fault) as failed, pytest.raises(ConfigError) as refusal:
        open_ledger(["seed=1,2"])
    assert failed()
    assert refusal.value.key == "output_root"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("secret", "resume"), [("", "never"), ("sweeps/a", "auto")])
def test_a_sweep_in_an_unreadable_directory_is_refused(secret, resume, open_ledger, tmp_path):
    (tmp_path / secret).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    with enforced_permissions(tmp_path / secret, 0), pytest.raises(ConfigError) as refusal:
        open_ledger(["seed=1,2"], resume)
    assert (refusal.value.key, refusal.value.got) == ("output_root", str(tmp_path / "sweeps" / "a"))
    assert "Permission denied" in refusal.value.why
    assert sorted(tmp_path.rglob("*")) == before
