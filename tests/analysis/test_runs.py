"""Tests of `runner runs`: the list of runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.handmade_runs import evaluation_entries, save_ledger, set_age_days, write_run_directory

from runner.commands import runs
from runner.storage.manifest import manifest_of
from runner.storage.run_directory import lock


@pytest.fixture
def outputs(tmp_path, monkeypatch) -> Path:
    """Return a directory with three runs, one killed, and a sweep, whose jobs are done, crashed, and refused."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "outputs"
    set_age_days(write_run_directory(path / "classifier" / "old", **evaluation_entries(0.7, 0.7)), days=9)
    killed = write_run_directory(path / "classifier" / "killed")
    checkpoint, best = killed / "checkpoints" / "step_00000007", evaluation_entries(0.6, 0.6)["best"]
    (checkpoint / "manifest.json").write_text(manifest_of(checkpoint, {}, step=7, world_size=1, best=best))
    set_age_days(killed, days=5)
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


def test_runs_are_listed_by_date_with_their_numbers(outputs, capsys):
    entries = listed(capsys)
    assert [(Path(entry["directory"]).name, entry["status"], entry["steps"], entry["best"]) for entry in entries] == [
        ("old", "done", 7, 0.7),
        ("killed", "killed", 7, 0.6),
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


@pytest.mark.cases(
    (["--status", "crashed,killed"], ["killed", "001-b"]),
    (["--older", "4d"], ["old", "killed"]),
    (["--older", "60h", "--status", "done"], ["old", "000-a"]),
    (["outputs/sweeps"], ["000-a", "001-b"]),
    (["outputs/other/new"], ["new"]),
)
def test_filters_select_the_listed_runs(arguments, wanted, outputs, capsys):
    assert names(capsys, *arguments) == wanted


def test_paths_are_printed_for_other_commands(outputs, capsys):
    words = ["--status", "crashed,killed", "--paths"]
    assert runs.main(words) == 0
    assert capsys.readouterr().out == "outputs/classifier/killed\noutputs/sweeps/s/2026/001-b\n"
    held = lock(outputs / "classifier" / "killed")
    assert held is not None
    assert runs.main(words) == 0
    held.close()
    assert capsys.readouterr().out == "outputs/sweeps/s/2026/001-b\n", "a run that holds its lock is running"


def test_config_directories_and_symbolic_links_are_not_listed_as_runs(outputs, capsys):
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


@pytest.mark.cases(
    (["--status", "done,crahsed"], "--status: got 'crahsed': there is no such status\n  did you mean crashed?"),
    (["--older", "soon"], "--older: got 'soon': it is not a duration\n  a number and s, m, h, d or w"),
    (["--older=-1d"], "--older: got '-1d'"),
    (["x" * 300], "PATH: got 'xxx"),
    (["--clean"], "--clean: there is no such flag;"),
)
def test_invalid_arguments_are_refused(arguments, why, outputs, capsys):
    assert runs.main(arguments) == 2
    assert capsys.readouterr().err.startswith(why)
