"""Tests of `runner runs`: the list of runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.handmade_runs import evaluation_entries, save_ledger, set_age_days, write_run_directory

from runner.commands import runs
from runner.storage.run_directory import lock


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with three single runs and a sweep.

    The sweep has three jobs: the first is done, the second has crashed, and the third was refused and has no run. All
    five runs, which include those of the first two jobs, have different ages.
    """
    monkeypatch.chdir(tmp_path)
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
    assert runs.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["status", "age", "steps", "best", "directory"]
    assert lines[-1].split()[:3] == ["done", "1", "d"]
    assert lines[-1].split()[-4:] == ["12", "eval/accuracy", "0.95", "outputs/other/new"]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--status", "crashed,killed"], ["killed", "001-b"]),
        (["--older", "4d"], ["old", "killed"]),
        (["--older", "60h", "--status", "done"], ["old", "000-a"]),
        (["outputs/sweeps"], ["000-a", "001-b"]),
        (["outputs/other/new"], ["new"]),
    ],
)
def test_filters_select_the_listed_runs(
    arguments: list[str], wanted: list[str], outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names(capsys, *arguments) == wanted


def test_paths_are_printed_for_other_commands(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.main(["--status", "crashed,killed", "--paths"]) == 0
    assert capsys.readouterr().out == "outputs/classifier/killed\noutputs/sweeps/s/2026/001-b\n"


def test_a_run_that_holds_its_lock_is_running(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = lock(outputs / "classifier" / "killed")
    assert held is not None
    assert names(capsys, "--status", "running") == ["killed"]
    held.close()
    assert names(capsys, "--status", "running") == []


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


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["absent"], "PATH: got 'absent': there is no such directory\n"),
        (["--status", "done,crahsed"], "--status: got 'crahsed': there is no such status\n  did you mean crashed?"),
        (["--older", "soon"], "--older: got 'soon': it is not a duration\n  a number and s, m, h, d or w"),
        (["--older=-1d"], "--older: got '-1d'"),
        (["x" * 300], "PATH: got 'xxx"),
        (["--clean"], "--clean: there is no such flag;"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: list[str], why: str, outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runs.main(arguments) == 2
    assert capsys.readouterr().err.startswith(why)


def test_a_closed_output_pipe_is_not_an_error(tmp_path: Path) -> None:
    """A reader such as `head` closes the pipe early. The output is larger than the buffer of the pipe."""
    folder = tmp_path.joinpath(*["a" * 200] * 10)
    for number in range(60):
        write_run_directory(folder / str(number), status="crashed", error="why")
    command = [sys.executable, "-m", "runner", "runs", str(tmp_path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 0)
