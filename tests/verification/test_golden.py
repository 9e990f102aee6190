"""Tests of `runner verify RUN`: recorded runs are computed again, and are identical, equal up to rounding or not."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
from helpers import incorrect_modes
from helpers.checkpoint_edits import rewrite_manifest
from helpers.compose import TINY_CPU, build_composed_run, train_in
from helpers.handmade_runs import write_config

from runner.commands import verify
from runner.storage.run_directory import ENVIRONMENT
from runner.storage.saved_run import saved_config
from runner.system.provenance import environment
from runner.verification.golden import MARGIN, MAX_PERTURBATIONS, judge
from runner.verification.verdict import Verdict

STEPS = 12
RECORDED = (*TINY_CPU, f"steps={STEPS}", "log_every=2", "eval_every=4")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "lr=0.1"
    train_in(path, build_composed_run(*RECORDED))
    return with_config(path)


def with_config(path: Path, **changes: Any) -> Path:
    """Write the config of a recorded run, and its environment, as the command does; `changes` are of its optimizer."""
    config = build_composed_run(*RECORDED).config
    write_config(path, config | {"optimizer": config["optimizer"] | changes}, [])
    (path / ENVIRONMENT).write_text(json.dumps(environment()))
    return path


@pytest.fixture
def copied(recorded: Path, tmp_path) -> Path:
    return shutil.copytree(recorded, tmp_path / "copied")


def contents(directory: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.rglob("*") if path.is_file()}


def test_the_same_code_logs_identical_points_and_writes_nothing_to_the_run(recorded, capsys, monkeypatch):
    before = contents(recorded)
    monkeypatch.chdir(recorded.parent)
    assert verify.main([recorded.name]) == verify.SAME  # though it looks like an override
    out = capsys.readouterr().out
    num_points = 3 * STEPS // 2 + 2 * STEPS // 4  # loss, accuracy and gradient norm; loss and accuracy of evaluations
    assert f"training steps 1 to {STEPS} again" in out
    assert f"identical, all {num_points} points" in out
    assert verify.main([str(recorded), "--steps", "5"]) == verify.SAME
    assert "training steps 1 to 4 again (all: --steps 12)" in capsys.readouterr().out
    assert contents(recorded) == before


def test_another_order_of_sums_is_equal_up_to_rounding(recorded, capsys):
    assert verify.main([str(recorded), "accumulation=2", "channels_last=false"]) == verify.SAME
    out = capsys.readouterr().out
    assert "the same: equal up to rounding" in out
    assert "gradient_norm" in out


def test_other_code_and_other_options_are_different_from_the_step_on_at_which_they_act(
    recorded, copied, tmp_path, monkeypatch, capsys
):
    incorrect_modes.declare(tmp_path, monkeypatch)
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "drops.yaml").write_text("_target_: helpers.incorrect_modes.DropsLastMicroBatch\n")
    assert verify.main([str(recorded), "-cd", str(tmp_path), "parallel=drops", "accumulation=2"]) == verify.DIFFERENT
    assert "different: from step 2 on" in capsys.readouterr().out
    lr = saved_config(recorded).values["optimizer"]["lr"]
    for other, code in ((lr * (1 + 1e-9), verify.SAME), (lr * (1 + 1e-3), verify.DIFFERENT)):
        assert verify.main([str(with_config(copied, lr=other))]) == code
    shutil.copy(next(copied.glob("events*")), copied / "events.out.tfevents.9999999999")
    assert verify.main([str(copied)]) == verify.UNJUDGED
    assert "the run was resumed" in capsys.readouterr().out


def test_the_worst_of_several_runs_is_the_exit_code_and_what_has_changed_is_said(recorded, copied, capsys):
    hostile = {"versions": {"torch": "1.0\x1b[2J", "rich": {"_target_": 7}}, "devices": "many", "source": [1]}
    (copied / ENVIRONMENT).write_text(json.dumps(environment() | hostile))
    assert verify.main([str(recorded), str(copied), "--steps", "4"]) == verify.SAME
    first, second = capsys.readouterr().out.split(f"{copied}:")
    assert "no version, commit, device or core has changed" in first
    assert f"versions.torch: 1.0\\x1b[2J then, {environment()['versions']['torch']} now" in second
    shutil.rmtree(copied)
    without_events = shutil.copytree(recorded, copied, ignore=shutil.ignore_patterns("events*"))
    assert verify.main([str(recorded), str(without_events), "--steps", "4"]) == 2
    assert "it has logged nothing" in capsys.readouterr().err


@pytest.mark.cases(
    (["optimizer.lr=3"], "overrides: another run: optimizer.lr"),
    (["log_every=1"], "overrides: another run: log_every"),
    (["seed=3", "precision=64"], "overrides: another run: seed: 0 then, 3 now"),
    (["--steps", "1"], "--steps: got 1: its first log is at step 2\n  --steps 2"),
    (["parallel=hogwild"], "overrides: another run: parallel"),
    (["data.root=other"], "data.root"),
    (["nothing"], "nothing: there is no such key or run"),
    (["nothing/here"], "PATH: got 'nothing/here': there is no such directory"),
)
def test_what_cannot_be_compared_is_refused(words, why, recorded, capsys):
    assert verify.main([str(recorded), *words]) == 2
    assert why in capsys.readouterr().err


def test_other_samples_and_configs_with_references_are_refused(copied, capsys):
    for file in copied.glob("checkpoints/*/model.json"):
        about = json.loads(file.read_text())
        about["data"]["training"] += 1
        file.write_text(json.dumps(about))
        rewrite_manifest(file.parent)
    assert verify.main([str(copied)]) == 2
    assert "samples" in capsys.readouterr().err
    config = saved_config(copied).values
    write_config(copied, config | {"name": "${oc.env:HOME}"}, [])
    assert verify.main([str(copied)]) == 2
    assert "references in a saved config are not resolved" in capsys.readouterr().err


def curve(*losses: float) -> dict[str, dict[int, float]]:
    return {"train/loss": dict(enumerate(losses, start=1))}


THEN = curve(1.0, 0.5, 0.25, 0.125)


@pytest.mark.cases(
    (THEN, [], Verdict.SAME, "all 4 points"),
    (curve(1.0, 0.5, 0.25 + 9e-6, 0.125), [0], Verdict.SAME, "up to rounding"),
    (curve(1.0, 0.5, 0.25 + 2e-5, 0.125), [0, 0, 0], Verdict.DIFFERENT, "from step 3 on"),
    (curve(1.0, 0.5, 0.25 + 2e-3, 0.125), [1e-5, 3e-3 / MARGIN], Verdict.SAME, "up to rounding"),
    (curve(1.0, 0.5, 0.25 + 4e-3, 0.125), [3e-3 / MARGIN] * MAX_PERTURBATIONS, Verdict.DIFFERENT, "from step 3 on"),
    (curve(1.0, 0.5, 0.25, 9.0), [0.06 / MARGIN], Verdict.UNJUDGED, "at 4 of 4 points"),
    (curve(1.0, 0.5, 0.25), [], Verdict.SAME, "1 points are not logged any more"),
    ({"train/other": {1: 1.0}}, [], Verdict.UNJUDGED, "nothing is left"),
    (curve(1.0) | {"diverged": {2: 1.0}}, [], Verdict.DIFFERENT, "diverges at step 2"),
)
def test_ten_times_the_effect_of_the_perturbations_is_rounding(now, effects, verdict, words):
    asked = []

    def perturb(number: int) -> dict[str, dict[int, float]]:
        asked.append(number)
        return curve(*(numpy.array(list(now["train/loss"].values())) + effects[number - 1]))

    outcome = judge(THEN, now, 4, perturb)
    assert outcome.verdict == verdict
    assert words in outcome.reason
    assert len(asked) == len(effects), "no more trainings than needed"
