"""`runner evaluate`: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest
from helpers.compose import TINY_CPU
from helpers.runs import write_images

import runner
from runner.commands import evaluate


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> runner.Result:
    words = ["steps=4", "save_every=2", "eval_every=2", "keep=2", "optimizer.lr=0.2"]
    return runner.train([*TINY_CPU, *words, f"output_root={tmp_path_factory.mktemp('evaluate')}"])


def test_the_metrics_are_those_of_the_run(result: runner.Result, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert evaluate.main([str(result.directory), "--checkpoint", "last", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["metrics"] == result.evaluation
    assert (report["step"], Path(report["checkpoint"]).name) == (4, "step_00000004")

    assert evaluate.main([str(result.directory), "--checkpoint=4"]) == 0
    data, checkpoint, *others = capsys.readouterr().out.splitlines()
    assert data.split(maxsplit=1) == ["data", "Digits, 359 samples (--split val) of 1×8×8, 10 classes"]
    assert checkpoint.endswith("/checkpoints/step_00000004")
    assert [line.split() for line in others] == [[tag, f"{value:.6g}"] for tag, value in result.evaluation.items()]


def test_the_best_checkpoint_is_the_default_and_overrides_are_applied(
    result: runner.Result, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main([str(result.directory), "data.holdout=0.5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["step"] == result.best["step"]
    assert report["metrics"].keys() == result.evaluation.keys()
    assert report["metrics"] != result.evaluation


def test_what_is_left_out_of_the_data_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "photos")
    Path("photos/val/cat/notes.txt").touch()
    options = ("data=imagefolder", "data.root=photos", "data.workers=0", "batch_size=8", "steps=1")
    result = runner.train([*TINY_CPU, *options])
    said = "val/: ignored 1 "
    assert result.directory is not None
    assert (capsys.readouterr().err.count(said), (result.directory / "log.txt").read_text().count(said)) == (1, 1)
    assert evaluate.main([str(result.directory)]) == 0
    assert capsys.readouterr().err.count(said) == 1
    Path("photos/val/cat/broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert evaluate.main([str(result.directory), "data.root=photos"]) == 1
    assert "broken.png: it cannot be read" in (error := capsys.readouterr().err)
    assert "Traceback" not in error
    assert evaluate.main([str(result.directory), "data.on_error=skip", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["description"]["skipped"].startswith("1 of these samples")
