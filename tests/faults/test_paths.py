"""Tests with unusual names of directories and files: a run trains and resumes by its printed command, or is refused."""

import contextlib
import io
import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.compose import TINY_CPU
from helpers.dry_run import disturbed_at, run_in_this_process
from helpers.faults import RUN_ALL_FAULTS as ALL
from helpers.runs import assert_bitwise_equal, only_run, run_outcome

from runner.analysis.comparison import Comparison
from runner.analysis.tables import as_csv, terminal
from runner.commands import plot

OPTIONS = (*TINY_CPU, "steps=4", "save_every=1", "eval_every=0", "log_every=1")

NAMES: dict[str, str] = {
    "space": "my runs",
    "spaces around": " a ",
    "equals sign": "lr=0.1",
    "percent": "100%s%d%%",
    "both quotes": "a'\"",
    "a quote first": "'a",
    "dollar": "$HOME",
    "reference": "${seed}",
    "backslash": "a\\b",
    "comma and brackets": "a,b[1]{c}(d)",
    "star and question mark": "*?",
    "colon": "a:b",
    "tilde": "~x",
    "leading dash": "-rf",
    "long": "x" * 200,
    "umlaut": "Übung",
    "emoji": "🚀",
    "truth": "true",
    "nothing": "null",
    "dots": "...",
    "newline": "a\nb",
    "not UTF-8": os.fsdecode(b"caf\xe9"),
}
INTERPRETED = ("a quote first", "reference", "backslash", "nothing", "tilde")
"""Names that mean something else on a command line, or cannot be parsed because they begin like a quoted string."""
REFUSED = ("newline", "not UTF-8")
"""Names that a command line or a saved config cannot contain; they are refused as `output_root`."""
FEW = [kind for kind in NAMES if ALL or kind in ("both quotes", "newline", "not UTF-8")]
ODD = [kind for kind in (NAMES if ALL else ("space", "both quotes", "leading dash", "newline")) if kind != "not UTF-8"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, Any]:
    cwd = tmp_path_factory.mktemp("undisturbed")
    code, console = run_in_this_process(list(OPTIONS), cwd)
    assert code == 0, console
    return run_outcome(only_run(cwd))


def crashed(cwd: Path, *arguments: str) -> str:
    """Run the command so that it crashes in its third step, and return the console output."""

    with disturbed_at(3, mock.Mock(side_effect=RuntimeError("the power of the device is gone"))):
        code, console = run_in_this_process([*OPTIONS, *arguments], cwd)
    assert code == 1, console
    return console


def said(console: str, what: str) -> list[str]:
    """Return the shell words after `what: ` in the only line of the console output that begins with it."""
    [line] = [line for line in console.splitlines() if line.startswith(f"{what}: ")]
    return shlex.split(line.partition(": ")[2])


def assert_refused(code: int, console: str, key: str, then: str = ": got ") -> None:
    assert code == 2, console
    assert console.startswith(f"{key}{then}"), console
    assert "Traceback" not in console
    assert all(line.isprintable() for line in console.splitlines()), console


@pytest.mark.parametrize("kind", ODD)
def test_a_run_with_an_unusual_directory_output_root_and_name_resumes_and_is_plotted(kind, undisturbed, tmp_path):
    cwd, name = tmp_path / NAMES[kind], NAMES[kind]
    cwd.mkdir()
    named = kind not in (*REFUSED, *INTERPRETED)
    words = (f"output_root=./{name}/runs", f"name={name}") if named else ()
    console = crashed(cwd, *words)
    assert not named or (cwd / name / "runs" / name).is_dir(), list(cwd.iterdir())
    python, flag, module, *arguments = said(console, "resume")
    assert (python, flag, module) == ("python", "-m", "runner")
    code, console = run_in_this_process(arguments, cwd)
    assert code == 0, console
    assert "Traceback" not in console
    [found] = said(console, "run")
    run = cwd / found
    assert_bitwise_equal(run_outcome(run), undisturbed)
    assert json.loads((run / "result.json").read_text())["status"] == "done"
    if ALL:
        with contextlib.redirect_stdout(io.StringIO()):
            assert plot.main([str(run.parent.absolute())]) == 0
    compared = Comparison([run.parent])
    assert len(compared.rows) == 1
    assert terminal(compared, 160)
    assert as_csv(compared).encode()


@pytest.mark.parametrize("kind", [*REFUSED, *INTERPRETED])
def test_an_output_root_or_a_name_that_cannot_be_used_is_refused(kind, tmp_path):
    for key in ("output_root", "name"):
        code, console = run_in_this_process([*OPTIONS, f"{key}={NAMES[kind]}"], tmp_path)
        if kind in (*REFUSED, "a quote first") or (kind, key) in (("backslash", "name"), ("tilde", "output_root")):
            assert_refused(code, console, key, "=" if kind == "a quote first" else ": got ")
            assert not list(tmp_path.glob("outputs/*/*"))
        else:  # an interpolation, null, or a home directory
            assert code in (0, 2), console
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


def test_a_run_is_refused_below_a_directory_whose_name_is_not_utf_8(tmp_path):
    cwd = tmp_path / NAMES["not UTF-8"]
    cwd.mkdir()
    assert_refused(*run_in_this_process(list(OPTIONS), cwd), "output_root")
    assert not list(cwd.iterdir())


@pytest.mark.parametrize("kind", FEW)
def test_a_run_moved_to_an_unusual_path_is_resumed_or_refused(kind, undisturbed, tmp_path):
    crashed(tmp_path)
    moved = tmp_path / NAMES[kind]
    shutil.move(only_run(tmp_path), moved)
    code, console = run_in_this_process([f"resume={moved}"], tmp_path)
    if kind in REFUSED and code == 2:
        assert_refused(code, console, "resume")
    elif kind != "reference":  # an interpolation, of a root key
        assert code == 0, console
        assert_bitwise_equal(run_outcome(moved), undisturbed)
        code, console = run_in_this_process([f"resume={moved}/checkpoints/step_00000003"], tmp_path)
        assert code == 0, console
        assert_bitwise_equal(run_outcome(moved), undisturbed)
