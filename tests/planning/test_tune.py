"""Tests of `runner tune`: its flags, its tables, its files, and a complete search with two candidates."""

import errno
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import runner
from runner.commands import tune
from runner.planning import tune as planning
from runner.planning.candidates import Candidate
from runner.planning.trial import TrialError
from runner.planning.tune import plain, render, verdict, write_report
from runner.system.console import CRASHED, DONE, REFUSED

SMALL = ("model=tiny", "data.size=8", "device=cpu", "device.threads=1", "parallel=single")


def row(*overrides: str, **values: Any) -> dict[str, Any]:
    candidate = Candidate(overrides, results="last bits", status="measured", memory_bytes=5e8, startup_seconds=1.5)
    candidate.seconds, candidate.ratios = [0.01], [1.0]
    return plain(candidate, candidate, samples=10) | values


def report(**values: Any) -> dict[str, Any]:
    fast = row("parallel=ddp", "parallel.processes=2", samples_per_second=1500.0, speedup=1.5)
    skipped = row("precision=bf16", status="not tried", reason="16-bit arithmetic", samples_per_second=None)
    return {
        "typed": ["model=tiny", "epochs=2"],
        "config_dir": None,
        "budget": 60.0,
        "allowed": [],
        "chosen": ["parallel=ddp", "parallel.processes=2"],
        "speedup": 1.5,
        "rows": [fast, row(), skipped],
        "seconds": 12.3,
        "directory": "outputs/tuned/x",
    } | values


def test_the_table_shows_what_was_measured_and_the_verdict_what_to_run():
    Console(width=140, file=(shown := io.StringIO())).print(render(report()))
    lines = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    assert "→ parallel=ddp parallel.processes=2 last bits 1,500 1.50 × 500 MB 1.5 s" in lines
    assert "the baseline last bits 1,000 1.00 × 500 MB 1.5 s" in lines
    assert "not tried 16-bit arithmetic precision=bf16" in lines
    assert verdict(report())[1] == "run:    python -m runner model=tiny epochs=2 parallel=ddp parallel.processes=2"
    assert "nothing is clearly faster" in verdict(report(chosen=[]))[0]
    slow_start = row("compile=step", startup_seconds=9.0, speedup=2.0, pays_after_steps=1500)
    assert any(
        "after 1,500 optimizer steps" in line
        for line in verdict(report(rows=[row(), slow_start], chosen=["compile=step"]))
    )


def test_a_later_start_pays_when_faster_steps_have_made_up_for_it():
    base = Candidate((), results="bitwise", status="measured", startup_seconds=1.0, seconds=[0.01, 0.01])
    fast = Candidate(("compile=step",), startup_seconds=9.0, seconds=[0.006, 0.006], ratios=[0.6, 0.6])
    assert plain(fast, base, samples=10)["pays_after_steps"] == 2000  # 8 s, at 0.004 s a step
    assert plain(base, base, samples=10)["pays_after_steps"] is None


def test_both_commands_that_are_printed_compose_the_same_config(tmp_path):
    own = tmp_path / "it's a=b, mine" / "model" / "own.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("defaults: [tiny, _self_]\nhidden: 7\n")
    found = report(typed=["model=own", "~optimizer.momentum"], config_dir=str(own.parent.parent))
    found["directory"] = str(write_report(found, str(tmp_path / "a, b=c")))
    assert json.loads(Path(found["directory"], "tune.json").read_text())["chosen"] == found["chosen"]
    configs = []
    for line in verdict(found)[1:3]:
        python, directory, *overrides = shlex.split(line.removeprefix("run:").strip().replace(" -m runner", ""))
        assert python == "python"
        configs.append(runner.compose(overrides, config_dir=directory.removeprefix("--config-dir=")))
    assert dict(configs[0]) == dict(configs[1])
    assert configs[0]["model"]["hidden"] == 7
    assert configs[0]["parallel"]["processes"] == 2
    assert "momentum" not in configs[0]["optimizer"], "an option file cannot delete a key"


def test_a_config_is_tuned(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planning, "MAX_ROUNDS", 2)  # to save time
    typed = [*SMALL, f"output_root={tmp_path}", "accumulation=1", "compile=false"]
    assert tune.main([*typed, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    rows = {" ".join(each["overrides"]): each for each in found["rows"]}
    assert {name: each["status"] for name, each in rows.items()} == {
        "": "measured",
        "precision=bf16": "not tried",
        "channels_last=false": "measured",
    }
    assert rows[""]["samples_per_second"] > 0
    # The first round is of the baseline alone. On a busy machine, the other may be dropped after its first round.
    assert rows[""]["rounds"] == rows["channels_last=false"]["rounds"] + 1 >= 2
    assert Path(found["directory"], "experiment", "tuned.yaml").is_file()
    assert found["chosen"] in ([], ["channels_last=false"])
    assert not list(tmp_path.glob("tiny/*"))  # a trial leaves no run directory


@pytest.mark.cases(
    ("--budget 0", "--budget"),
    ("--budget nan", "--budget"),
    ("--allow everything", "--allow"),
    ("resume=outputs/x", "resume"),
    ("parallel=ddp batch_size=63", "batch_size"),
    ("env=acrobot", "env"),
)
def test_mistakes_are_refused(line, key, capsys):
    assert tune.main(line.split()) == REFUSED
    assert key in capsys.readouterr().err


@pytest.mark.cases(
    (TrialError("no step within 600 s", "dropped"), CRASHED, "no step within 600 s"),
    (TrialError("MemoryError: no memory"), CRASHED, "no memory"),
)
def test_a_baseline_that_does_not_train_is_reported(error, code, word, monkeypatch, capsys, tmp_path):
    def fail(candidate: object, seconds: float) -> None:
        raise error

    monkeypatch.setattr(planning, "start", fail)
    monkeypatch.chdir(tmp_path)
    assert tune.main([*SMALL]) == code
    assert word in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_was_measured_is_printed_if_it_cannot_be_saved(monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    found = {key: value for key, value in report().items() if key not in ("typed", "config_dir", "budget", "allowed")}
    monkeypatch.setattr(planning, "tune", lambda *_: found)
    monkeypatch.setattr(planning, "write_report", full)
    assert tune.main([*SMALL]) == CRASHED
    shown = capsys.readouterr()
    assert "cannot be saved: [Errno 28] No space left on device" in shown.err
    assert "parallel=ddp parallel.processes=2" in shown.out
    assert "--config-dir" not in shown.out
