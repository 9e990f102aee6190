"""Tests of the Pareto front of several metrics, on runs whose results are written by the tests."""

import csv
import io
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import optuna
import pytest
from helpers.handmade_runs import save_ledger, write_run_directory

from runner.analysis.comparison import Comparison
from runner.analysis.figures import pictures
from runner.analysis.sweep_summary import find_best
from runner.commands import compare, plot

RATE = "time/samples_per_second"


def write(path: Path, lr: float, accuracy: float | None, rate: float, *overrides: str, **metrics: float) -> Path:
    measured = {"eval/accuracy": accuracy, **{f"eval/{name}": value for name, value in metrics.items()}}
    best = {"metric": "eval/accuracy", "value": 0.99, "step": 1}  # in all runs, of an earlier evaluation
    more = {"best": best, "metrics": measured, "samples_per_second": rate}
    return write_run_directory(path, f"optimizer.lr={lr}", *overrides, **more)


def rates(rows: Iterable[Any]) -> list[float]:
    return [row.values["optimizer.lr"] for row in rows]


@pytest.fixture
def sweep(tmp_path) -> Path:
    """A sweep by two metrics in which the learning rates 1, 2 and 3 are on the front."""
    points = {1: (0.9, 100), 2: (0.8, 300), 3: (0.7, 400), 4: (0.8, 200), 5: (0.6, 400), 6: (0.1, 50)}
    for lr, (accuracy, rate) in points.items():
        write(tmp_path / "sweep" / f"00{lr}-job", lr, accuracy, rate)
    return with_metrics(tmp_path / "sweep", {"eval/accuracy": "max", RATE: "max"})


def with_metrics(path: Path, metrics: dict[str, str]) -> Path:
    ledger = json.loads((save_ledger(path) / "sweep.json").read_text()) | {"metrics": metrics}
    (path / "sweep.json").write_text(json.dumps(ledger))
    return path


@pytest.mark.parametrize("goals", [("max", "max", "min"), ("min", "max", "max"), ("min", "min")], ids="-".join)
def test_the_front_is_that_of_optuna_and_of_a_search_by_hand(goals, tmp_path):
    """Values are small whole numbers, so that some are equal in one metric or in all."""
    draw = random.Random(0)
    points: dict[float, list[int]] = {lr: [draw.randint(0, 6) for _ in goals] for lr in range(1, 31)}
    for lr, values in points.items():
        write(tmp_path / f"{lr}", lr, 0.5, 1.0, **{f"m{i}": value for i, value in enumerate(values)})
    tags = [f"eval/m{i}" for i in range(len(goals))]
    found = Comparison([tmp_path], ",".join(tags), goal=",".join(goals))
    signs = [1 if goal == "min" else -1 for goal in goals]
    by_hand = {
        lr
        for lr, each in points.items()
        if not any(
            all(s * a <= s * b for s, a, b in zip(signs, other, each, strict=True)) and other != each
            for other in points.values()
        )
    }
    study = optuna.create_study(directions=["minimize" if goal == "min" else "maximize" for goal in goals])
    study.add_trials([optuna.create_trial(values=values) for values in points.values()])
    assert {1 + trial.number for trial in study.best_trials} == by_hand
    assert {*rates(found.front)} == by_hand
    assert found.rows[: len(found.front)] == found.front
    ends = [signs[0] * points[lr][0] for lr in rates(found.rows)]
    assert ends == sorted(ends[: len(by_hand)]) + sorted(ends[len(by_hand) :]), "both parts by the first metric"


def test_the_metrics_of_a_sweep_are_compared_by_their_last_values(sweep, capsys):
    assert rates(Comparison([sweep]).rows) == [1, 2, 3, 4, 5, 6]
    assert compare.main([str(sweep), "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["metrics"] == {"eval/accuracy": "max", RATE: "max"}
    assert [row["front"] for row in table["rows"]] == [True] * 3 + [False] * 3
    assert table["rows"][1]["eval/accuracy"] == {"mean": 0.8, "std": None}
    assert table["rows"][1][RATE]["mean"] == 300
    assert compare.main([str(sweep), "--csv"]) == 0
    rows = [*csv.DictReader(io.StringIO(capsys.readouterr().out))]
    assert [(row["eval/accuracy"], row[RATE], row["front"]) for row in rows[2:4]] == [
        ("0.7", "400.0", "yes"),
        ("0.8", "200.0", "no"),
    ]
    assert compare.main([str(sweep), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"| optimizer.lr | runs | last eval/accuracy | {RATE} | steps | front |"
    assert [line.split(" | ")[-1] for line in lines[2:8]] == ["yes |"] * 3 + [" |"] * 3
    assert any(f"in each of eval/accuracy (max), {RATE} (max), and better in one" in line for line in lines)
    assert find_best(sweep) == "\n".join(
        f"front eval/accuracy {x}, {RATE} {y}: 00{lr}-job" for lr, x, y in ((1, 0.9, 100), (2, 0.8, 300), (3, 0.7, 400))
    )


def test_one_metric_of_a_sweep_ranks_its_last_values(tmp_path):
    for lr, accuracy in ((1, 0.6), (2, 0.8)):
        write(tmp_path / f"{lr}", lr, accuracy, 10.0 * lr)
    assert rates(Comparison([with_metrics(tmp_path, {"eval/accuracy": "min"})]).rows) == [1, 2]
    assert rates(Comparison([with_metrics(tmp_path, {RATE: "max"})]).rows) == [2, 1]
    assert rates(Comparison([tmp_path], RATE, goal="min").rows) == [1, 2]
    lacking = Comparison([with_metrics(tmp_path, {"eval/f1": "max"})])
    assert (lacking.metric, "compared by eval/f1, of which no run" in lacking.meant) == ("eval/accuracy", True)


def test_sweeps_that_name_different_metrics_are_compared_by_the_metric_of_the_workload(sweep):
    other = sweep.parent / "other"
    write(other / "000-job", 7, 0.4, 900)
    with_metrics(other, {"eval/accuracy": "max"})
    assert [*Comparison([sweep.parent]).metrics] == ["eval/accuracy"]
    with_metrics(other, {"eval/accuracy": "max", RATE: "max"})
    assert rates(Comparison([sweep.parent]).front) == [1, 2, 3, 7]


def test_a_row_that_lacks_a_metric_or_a_seed_is_not_on_the_front(sweep):
    write(sweep / "007-job", 7, None, 900)
    found = Comparison([sweep])
    assert (rates(found.front), len(found.rows)) == ([1, 2, 3], 7)
    for lr, accuracy, rate in ((1, 0.7, 300), (2, 0.8, 310)):
        write(sweep / f"10{lr}-job", lr, accuracy, rate, "seed=1")
    found = Comparison([sweep])
    assert rates(found.front) == [2, 1][:1], "of two seeds: (0.8, 200) and (0.8, 305)"
    lines = find_best(sweep)
    assert lines is not None
    assert lines.startswith("front eval/accuracy 0.80000 ± 0.00000, time/samples_per_second 305.0 ± 7.1, the mean of 2")


def test_a_sweep_in_which_no_job_has_all_metrics_has_an_empty_front(tmp_path, capsys):
    write(tmp_path / "000-job", 1, None, 900)
    write(tmp_path / "001-job", 2, 0.5, 0)
    with_metrics(tmp_path, {"eval/accuracy": "max", RATE: "max"})
    assert find_best(tmp_path) == f"no job has a value of each of eval/accuracy, {RATE}"
    assert compare.main([str(tmp_path), "--markdown"]) == 0
    assert "lacks a metric, are not on it: 2." in capsys.readouterr().out
    assert "front" not in pictures(Comparison([tmp_path]))


@pytest.mark.cases(
    (["--metric", f"accuracy,{RATE}", "--against", "optimizer.lr=1"], "--against: got 'optimizer.lr=1': rows"),
    (["--metric", f"{RATE},samples_per_second"], f"--metric: got '{RATE},samples_per_second': a metric is in it twice"),
    (["--metric", "accuracy,f1"], "--metric: got 'f1': no run that is done has a finite value of it;"),
    (["--goal", "min"], f"--goal: got 'min': it must be min or max for each of eval/accuracy, {RATE}\n"),
    (["--metric", "accuracy", "--goal", "best"], "--goal: got 'best': it must be min or max for each of eval/accuracy"),
)
def test_invalid_metrics_and_goals_are_refused(arguments, why, sweep, capsys):
    assert compare.main([str(sweep), *arguments]) == 2
    assert capsys.readouterr().err.startswith(why)


def test_the_front_is_drawn_over_each_pair_of_metrics(sweep, capsys):
    [axes] = pictures(Comparison([sweep]))["front"].axes
    drawn = [[*map(tuple, each.lines[0].get_xydata().tolist())] for each in axes.containers]  # pyright: ignore
    assert drawn == [[(0.9, 100)], [(0.8, 300)], [(0.7, 400)], [(0.8, 200), (0.6, 400), (0.1, 50)]]
    bound = axes.lines[-1]
    assert bound.get_xydata().tolist() == [[0.7, 400], [0.8, 300], [0.9, 100]]  # pyright: ignore
    assert bound.get_drawstyle() == "steps-pre", "with more than 0.7, the best throughput is 300"
    labels = axes.get_xlabel(), axes.get_ylabel()
    assert labels == ("last eval/accuracy (larger is better)", f"{RATE} (larger is better)")
    for directory in sweep.glob("00*"):
        result = json.loads((directory / "result.json").read_text())
        result["metrics"]["eval/loss"] = 1.0
        (directory / "result.json").write_text(json.dumps(result))
    panels = pictures(Comparison([sweep], f"{RATE},accuracy,eval/loss"))["front"].axes
    assert [(each.get_xlabel(), each.get_ylabel()) for each in panels] == [
        (labels[1], labels[0]),
        (labels[1], "last eval/loss (smaller is better)"),
        (labels[0], "last eval/loss (smaller is better)"),
    ]
    assert plot.main([str(sweep)]) == 0
    assert str(sweep / "plots" / "front.png") in capsys.readouterr().out
