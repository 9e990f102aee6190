"""`runner evaluate`: what it prints, and what it refuses."""

import csv
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import sklearn.metrics
import torch
from helpers.compose import TINY_CPU, build_composed_run
from helpers.runs import write_images

import runner
from runner.commands import evaluate


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> runner.Result:
    words = ["steps=4", "save_every=2", "eval_every=2", "keep=2", "optimizer.lr=0.2"]
    return runner.train([*TINY_CPU, *words, f"output_root={tmp_path_factory.mktemp('evaluate')}"])


def test_the_metrics_are_those_of_the_run(result, capsys):
    capsys.readouterr()
    assert evaluate.main([str(result.directory), "--checkpoint", "last", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["metrics"] == result.evaluation
    assert (report["step"], Path(report["checkpoint"]).name) == (4, "step_00000004")

    assert evaluate.main([str(result.directory), "--checkpoint=4"]) == 0
    data, checkpoint, *others = capsys.readouterr().out.splitlines()
    assert data.split(maxsplit=1) == ["data", "Digits, 359 samples (--split val) of 1×8×8, 10 classes"]
    assert checkpoint.endswith("/checkpoints/step_00000004")
    wanted = [[tag, f"{value:.6g}"] for tag, value in result.evaluation.items()]
    assert [line.split() for line in others[: len(wanted)]] == wanted


def test_numbers_of_each_class_and_the_confusion_matrix_are_those_of_scikit_learn(result, capsys):
    run = runner.load(result.directory)
    workload = build_composed_run(*TINY_CPU).workload
    workload.prepare()
    [(inputs, targets)] = workload.held_out.in_order(1000, (0, 1), torch.device("cpu"))
    with torch.inference_mode():
        predicted = run.model("last")(inputs).argmax(1)
    ratios = sklearn.metrics.precision_recall_fscore_support(targets, predicted, zero_division=np.nan)[:3]
    confusion = sklearn.metrics.confusion_matrix(targets, predicted)
    never = sorted({*range(10)} - {*predicted.tolist()})
    assert never, "a class that is never predicted has no precision"
    for words in ((), ("parallel=pipeline", "parallel.processes=2")):
        capsys.readouterr()
        assert evaluate.main([str(run.directory), "--checkpoint", "last", "--json", *words]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["confusion"] == confusion.tolist()
        for key, wanted in zip(("precision", "recall", "f1"), ratios, strict=True):
            found = [math.nan if row[key] is None else row[key] for row in report["classes"]]
            assert found == pytest.approx(wanted, nan_ok=True), key
    assert [row["samples"] for row in report["classes"]] == confusion.sum(1).tolist()

    assert evaluate.main([str(run.directory), "--checkpoint", "last", "--csv"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [[int(row[f"predicted {i}"]) for i in range(10)] for row in table] == confusion.tolist()
    assert [row["precision"] for row in table if row["class"] in map(str, never)] == [""] * len(never)
    assert evaluate.main([str(run.directory), "--checkpoint", "last"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    most, i, j = max((count, -i, -j) for (i, j), count in np.ndenumerate(confusion) if i != j)
    assert [str(-i), str(-j), str(most)] in lines
    assert [*(str(never[0]), str(confusion[never[0]].sum())), "–"] in [line[:3] for line in lines]


def test_the_csv_of_a_regression_has_its_metrics(tmp_path, capsys):
    result = runner.train(["workload=regression", "device=cpu", "steps=2", f"output_root={tmp_path}"])
    capsys.readouterr()
    assert evaluate.main([str(result.directory), "--csv"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["metric"]: float(row["value"]) for row in table} == result.evaluation


def test_the_best_checkpoint_is_the_default_and_overrides_are_applied(result, capsys):
    assert evaluate.main([str(result.directory), "data.holdout=0.5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["step"] == result.best["step"]
    assert report["metrics"].keys() == result.evaluation.keys()
    assert report["metrics"] != result.evaluation


def test_what_is_left_out_of_the_data_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "photos")
    Path("photos/val/cat/notes.txt").touch()
    options = ("data=imagefolder", "data.root=photos", "data.workers=0", "batch_size=8", "steps=1")
    result = runner.train([*TINY_CPU, *options])
    said = "val/: ignored 1 "
    assert (capsys.readouterr().err.count(said), (result.directory / "log.txt").read_text().count(said)) == (1, 1)
    assert evaluate.main([str(result.directory)]) == 0
    assert capsys.readouterr().err.count(said) == 1
    Path("photos/val/cat/broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert evaluate.main([str(result.directory), "data.root=photos"]) == 1
    assert "broken.png: it cannot be read" in (error := capsys.readouterr().err)
    assert "Traceback" not in error
    assert evaluate.main([str(result.directory), "data.on_error=skip", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["description"]["skipped"].startswith("1 of these samples")
