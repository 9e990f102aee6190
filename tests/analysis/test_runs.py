"""Tests of `runner runs`: the list of runs, and which files are left after runs have been removed."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.handmade_runs import evaluation_entries, save_ledger, set_age_days, write_run_directory
from helpers.nested_directories import nested

from runner.analysis.runs_list import changed, listed_sweeps, size
from runner.commands import runs
from runner.storage.run_directory import lock


class Terminal(io.StringIO):
    """Standard input that is a terminal, with the answers of a user."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with three single runs and a sweep.

    The sweep has three jobs: the first is done, the second has crashed, and the third was refused and has no run. All
    five runs, which include those of the first two jobs, have different ages.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    path = tmp_path / "outputs"
    set_age_days(write_run_directory(path / "classifier" / "old", **evaluation_entries(0.7, 0.7)), days=9)
    set_age_days(write_run_directory(path / "classifier" / "killed"), days=5)
    set_age_days(write_run_directory(path / "other" / "new", **evaluation_entries(0.95, 0.9, steps=12)), days=1)
    sweep = path / "sweeps" / "s" / "2026"
    set_age_days(write_run_directory(sweep / "000-a", **evaluation_entries(0.8, 0.8)), days=3)
    set_age_days(write_run_directory(sweep / "001-b", status="crashed", error="broken"), days=2)
    jobs = [{"directory": "000-a", "state": "done"}, {"directory": "001-b", "state": "crashed"}, {"state": "refused"}]
    save_ledger(sweep, *jobs)
    return path


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert runs.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def names(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    return [Path(entry["directory"]).name for entry in listed(capsys, *arguments)]


def runs_in(path: Path) -> set[str]:
    """The names of the directories below `path` that look like runs."""
    return {file.parent.name for file in path.rglob("config.yaml")}


# ---------------------------------------------------------------------------------------------------------------------
# The list


def test_runs_are_listed_by_date_with_their_numbers(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = listed(capsys)
    assert [(Path(entry["directory"]).name, entry["status"], entry["steps"], entry["best"]) for entry in entries] == [
        ("old", "done", 7, 0.7),
        ("killed", "killed", 7, None),
        ("000-a", "done", 7, 0.8),
        ("001-b", "crashed", 7, None),
        ("new", "done", 12, 0.95),
    ]
    assert [round(entry["age_seconds"] / 86400) for entry in entries] == [9, 5, 3, 2, 1]
    assert entries[0]["directory"] == "outputs/classifier/old"
    blocks = [path.lstat().st_blocks for path in (outputs / "other" / "new", *(outputs / "other" / "new").rglob("*"))]
    assert entries[-1]["size"] == 512 * sum(blocks) >= 10_000
    assert runs.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["status", "age", "size", "steps", "best", "directory"]
    assert lines[-1].split()[:3] == ["done", "1", "d"]
    assert lines[-1].split()[-4:] == ["12", "eval/accuracy", "0.95", "outputs/other/new"]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--status", "crashed,killed"], ["killed", "001-b"]),
        (["--older", "4d"], ["old", "killed"]),
        (["--newer", "60h"], ["001-b", "new"]),
        (["--older", "36h", "--newer", "1w", "--status", "done"], ["000-a"]),
        (["--name", "classifier"], ["old", "killed"]),
        (["--best", ">=0.8"], ["000-a", "new"]),
        (["--best", "< 0.8"], ["old"]),
        (["outputs/sweeps"], ["000-a", "001-b"]),
        (["outputs/other/new"], ["new"]),
    ],
)
def test_filters_select_the_listed_runs(
    arguments: list[str], wanted: list[str], outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names(capsys, *arguments) == wanted


def test_a_run_that_holds_its_lock_is_running(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = lock(outputs / "classifier" / "killed")
    assert held is not None
    assert names(capsys, "--status", "running") == ["killed"]
    held.close()
    assert names(capsys, "--status", "running") == []


def test_sweeps_are_listed_instead_of_runs(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (entry,) = listed(capsys, "--sweeps")
    assert (entry["directory"], entry["status"]) == ("outputs/sweeps/s/2026", "unfinished")
    assert (entry["jobs_done"], entry["jobs"], entry["metric"], entry["best"]) == (1, 3, "eval/accuracy", 0.8)
    assert entry["size"] == size(outputs / "sweeps" / "s" / "2026")
    held = lock(outputs / "sweeps" / "s" / "2026")
    assert held is not None
    assert listed(capsys, "--sweeps", "--status", "running")[0]["directory"] == entry["directory"]
    held.close()


def test_config_directories_and_symbolic_links_are_not_listed_as_runs(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = write_run_directory(outputs.parent / "elsewhere" / "run")
    (outputs / "conf").mkdir()
    (outputs / "conf" / "config.yaml").write_text("a: 1\n")
    hydra = outputs / "2026-11-25" / "12-00-00" / ".hydra"  # where another program of the user writes
    hydra.mkdir(parents=True)
    for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
        (hydra / name).write_text("a: 1\n")
    (outputs / "link").symlink_to(elsewhere)
    (outputs / "links").symlink_to(elsewhere.parent)
    forged = outputs / "forged"
    forged.mkdir()
    for name in ("config.yaml", "overrides.yaml"):
        (forged / name).symlink_to(elsewhere / name)
    assert len(names(capsys)) == 5
    assert runs.main(["--clean", "--yes"]) == 0
    assert (outputs / "conf" / "config.yaml").exists()
    assert {file.name for file in hydra.iterdir()} == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert os.path.lexists(forged / "config.yaml")
    assert runs_in(elsewhere) == {"run"}
    assert (elsewhere / "checkpoints" / "step_00000007" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["absent"], "PATH: got 'absent': there is no such directory\n"),
        (["--status", "done,crahsed"], "--status: got 'crahsed': there is no such status\n  did you mean crashed?"),
        (["--sweeps", "--status", "killed"], "--status: got 'killed': there is no such status\n"),
        (["--older", "soon"], "--older: got 'soon': it is not a duration\n  a number and s, m, h, d or w"),
        (["--newer", "-1d"], "--newer: got '-1d'"),
        (["--best", "0.9"], "--best: got '0.9': it is not a comparison with a number\n"),
        (["--best", "", "--clean", "--yes"], "--best: got '': it is not a comparison with a number\n"),
        (["x" * 300], "PATH: got 'xxx"),
        (["--yes"], "--yes: it answers the question of --clean\n"),
        (["--clear"], "--clear: there is no such flag;"),
        (["--clean"], "--clean: there is no terminal on which to ask"),
    ],
)
def test_invalid_arguments_are_refused_and_nothing_is_removed(
    arguments: list[str], why: str, outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] == "--newer":
        arguments = ["--newer=-1d"]
    assert runs.main(arguments) == 2
    assert capsys.readouterr().err.startswith(why)
    assert len(runs_in(outputs)) == 5


# ---------------------------------------------------------------------------------------------------------------------
# Removing


def test_clean_removes_the_listed_runs_and_directories_that_become_empty(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runs.main(["--clean", "--yes", "--status", "done"]) == 0
    assert "3 runs removed" in capsys.readouterr().err
    assert runs_in(outputs) == {"killed", "001-b"}
    assert sorted(path.name for path in outputs.iterdir()) == ["classifier", "sweeps"]
    assert (outputs / "sweeps" / "s" / "2026" / "sweep.json").exists()


def test_a_closed_output_pipe_is_not_an_error(tmp_path: Path) -> None:
    """A reader such as `head` closes the pipe early. The output is larger than the buffer of the pipe."""
    for number in range(400):
        write_run_directory(tmp_path / ("a" * 200 + str(number)), status="crashed", error="why")
    for tool, flags in (("runs", ["--json"]), ("compare", ["--json"])):
        command = [sys.executable, "-m", "runner", tool, str(tmp_path), *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            assert (process.stderr.read(), process.wait()) == ("", 0)


@pytest.mark.parametrize(("answer", "removed"), [("y\n", True), ("YES\n", True), ("n\n", False), ("", False)])
def test_clean_asks_for_confirmation_on_a_terminal(
    answer: str, removed: bool, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    bytes_on_disk = size(outputs / "classifier" / "old") + size(outputs / "classifier" / "killed")
    assert runs.main(["--clean", "--name", "classifier"]) == 0
    err = capsys.readouterr().err
    assert f"remove 2 runs, {runs.file_size(bytes_on_disk)}? [y/N] " in err
    assert (outputs / "classifier").exists() == (not removed)
    assert ("nothing was removed" in err) == (not removed)
    assert len(runs_in(outputs)) == (3 if removed else 5)


def test_a_run_that_changes_during_the_confirmation_is_kept(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(Terminal):
        def readline(self, *_: Any) -> str:
            (outputs / "classifier" / "killed" / "result.json").write_text('{"status": "done", "steps": 3}')
            return super().readline()

    monkeypatch.setattr("sys.stdin", Slow("y\n"))
    assert runs.main(["--clean", "--name", "classifier"]) == 1
    assert "killed was not removed: it has changed since it was listed" in capsys.readouterr().err
    assert [path.name for path in (outputs / "classifier").iterdir()] == ["killed"]


def test_the_files_of_a_sweep_are_removed_with_its_last_run(outputs: Path) -> None:
    (outputs / "sweeps" / "s" / "2026" / "notes.md").write_text("mine")
    assert runs.main(["outputs/sweeps/s/2026/000-a", "--clean", "--yes"]) == 0
    assert runs.main(["--clean", "--yes"]) == 0
    left = sorted(path.name for path in (outputs / "sweeps" / "s" / "2026").iterdir())
    assert left == [".lock", "console", "notes.md", "sweep.json"], "somebody uses this directory"
    (outputs / "sweeps" / "s" / "2026" / "notes.md").unlink()
    write_run_directory(outputs / "sweeps" / "s" / "2026" / "002-c")
    assert runs.main(["--clean", "--yes"]) == 0
    assert list(outputs.iterdir()) == []


def test_whole_sweeps_are_removed(outputs: Path) -> None:
    assert runs.main(["--sweeps", "--clean", "--yes"]) == 0
    assert not (outputs / "sweeps").exists()
    assert runs_in(outputs) == {"old", "killed", "new"}


@pytest.mark.parametrize("arguments", [[], ["--sweeps"]])
def test_all_files_that_a_sweep_writes_are_removed(arguments: list[str], outputs: Path) -> None:
    sweep = outputs / "sweeps" / "s" / "2026"
    unfinished = (".sweep.json.part", "conf/experiment/.best.yaml.part")  # temporary files of interrupted writes
    for name in ("study.log", "conf/experiment/best.yaml", "events.out.tfevents.1.0", "slurm/ends/ab_0", *unfinished):
        (sweep / name).parent.mkdir(parents=True, exist_ok=True)
        (sweep / name).write_text("")
    assert runs.main([*arguments, "--clean", "--yes"]) == 0
    assert not (outputs / "sweeps").exists()


@pytest.mark.parametrize("name", ["conf/experiment/mine.yaml", "slurm", "console"])
def test_files_of_the_user_in_a_sweep_are_kept(name: str, outputs: Path) -> None:
    sweep, elsewhere = outputs / "sweeps" / "s" / "2026", outputs.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.txt").write_text("mine")
    shutil.rmtree(sweep / "console")
    (sweep / name).parent.mkdir(parents=True, exist_ok=True)
    (sweep / name).symlink_to(elsewhere)
    assert runs.main(["--sweeps", "--clean", "--yes"]) == 0
    assert (sweep / name / "mine.txt").read_text() == "mine"


def test_a_file_that_a_running_run_renames_does_not_hide_the_run(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = outputs / "other" / "new" / "result.json.part"
    part.write_text("")
    scandir = os.scandir

    class Entries:
        """The entries of a directory, one of which is removed before its time is read."""

        def __init__(self, path: Path):
            self._entries = list(scandir(path))
            part.unlink(missing_ok=True)

        def __enter__(self) -> list[os.DirEntry[str]]:
            return self._entries

        def __exit__(self, *_: object) -> None: ...

    before = (outputs / "other" / "new" / "config.yaml").stat().st_mtime
    with monkeypatch.context() as patch:
        patch.setattr("runner.analysis.runs_list.os.scandir", Entries)
        assert changed(outputs / "other" / "new") == before
    assert "new" in names(capsys)


def test_a_sweep_is_listed_from_a_single_read_of_its_ledger(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledgers = iter([{"complete": True, "jobs": {}}])
    monkeypatch.setattr("runner.analysis.runs_list.read_ledger", lambda path: next(ledgers, {}))
    assert len(listed_sweeps(outputs / "sweeps" / "s" / "2026")) == 1


@pytest.mark.parametrize("arguments", [[], ["--sweeps"]])
@pytest.mark.parametrize("locked", [".", "001-b"])
def test_running_runs_and_sweeps_are_not_removed(
    locked: str, arguments: list[str], outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = outputs / "sweeps" / "s" / "2026"
    held = lock(sweep / locked)
    assert held is not None
    (sweep / "001-b" / "result.json").unlink()
    code = runs.main([*arguments, "--clean", "--yes"])
    left, err = runs_in(sweep), capsys.readouterr().err
    held.close()
    assert "running" in err
    wanted = {"001-b"} if (locked, arguments) == ("001-b", []) else {"000-a", "001-b"}
    assert left == wanted
    assert code == (0 if (locked, bool(arguments)) in ((".", True), ("001-b", False)) else 1)
    assert (sweep / "sweep.json").exists()


class SimulatedKill(BaseException):
    """Raised instead of sending a SIGKILL."""


@pytest.mark.parametrize("after", range(6))
def test_a_killed_removal_leaves_no_partial_run_and_can_be_repeated(
    after: int, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = 0

    def dies(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise SimulatedKill
            return function(*arguments, **options)

        return call

    whole = {file.name for file in (outputs / "other" / "new").iterdir()}
    with monkeypatch.context() as patch:
        for where, name in ((os, "rename"), (shutil, "rmtree"), (Path, "unlink"), (Path, "rmdir")):
            patch.setattr(where, name, dies(getattr(where, name)))
        with pytest.raises(SimulatedKill):
            runs.main(["outputs/other", "--clean", "--yes"])
    capsys.readouterr()
    new = outputs / "other" / "new"
    assert not new.exists() or {file.name for file in new.iterdir()} == whole
    assert names(capsys, "outputs/other", "--status", "done") == (["new"] if after == 0 else [])
    assert runs.main(["--clean", "--yes", "--name", "other"]) == 0
    assert not (outputs / "other").exists()


def test_a_run_with_directories_of_any_depth_is_removed(outputs: Path) -> None:
    old = outputs / "classifier" / "old"
    with nested(old, 1500) as deep:
        (deep / "file").write_text("")
        deep.with_name("link").symlink_to(outputs / "other")
        assert runs.main(["--clean", "--yes", "--name", "old"]) == 0
        assert [path.name for path in (outputs / "classifier").iterdir()] == ["killed"]
    assert runs_in(outputs / "other") == {"new"}


def test_a_run_that_cannot_be_removed_is_reported(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fails)
        assert runs.main(["--clean", "--yes", "--name", "old"]) == 1
    assert "outputs/classifier/old was not removed: Permission denied\n0 runs removed, 0 B\n" in capsys.readouterr().err
    assert "old" in runs_in(outputs)
