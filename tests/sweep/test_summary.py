"""Tests of the choice of the best job, and of the sweep summary: its columns, tables and figure in TensorBoard."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from helpers.events import hparams_columns, hparams_table, hparams_values, load_events
from helpers.handmade_runs import save_ledger

from runner.storage.run_directory import write_config
from runner.sweep import summary
from runner.sweep.summary import Best, find_best, write_summary
from runner.tracking.recorder import Recorder
from runner.tracking.tensorboard import TensorBoard

Job = tuple[list[str], float | None]
"""The overrides of a job, and its best accuracy; None if the job crashed."""


def save_sweep(path: Path, *jobs: Job, metric: str = "eval/accuracy") -> Path:
    """Save a complete sweep with these jobs; the last value of `metric` of each job is 0.01 below its best value."""
    entries: list[dict[str, Any]] = []
    for number, (overrides, best) in enumerate(jobs):
        run = path / f"{number:03d}-job"
        run.mkdir(parents=True)
        board = TensorBoard()
        board.open(run, 1)
        typed = {key: summary._value(key, value) for key, _, value in (text.partition("=") for text in overrides)}
        board.hyperparameters({}, {key: value for key, value in typed.items() if value is not None})
        board.scalars({metric: (best or 0) - 0.01, "eval/loss": 1.0, "lr": 0.1, "memory/peak": 2.0}, 7)
        board.close(done=best is not None)
        if best is not None:
            metrics = {"train/loss": 0.5, metric: best - 0.01, "eval/loss": 1.0}
            result = {"status": "done", "steps": 7, "metrics": metrics}
            result["best"] = {"metric": metric, "value": best, "step": 3}
            (run / "result.json").write_text(json.dumps(result))
        state = "done" if best is not None else "crashed"
        entries.append({"state": state, "overrides": overrides, "directory": run.name})
    return save_ledger(path, *entries, complete=True)


GRID: list[Job] = [
    (["schedule=cosine", "optimizer.lr=0.01", "seed=0", "epochs=3"], 0.80),
    (["schedule=cosine", "optimizer.lr=0.1", "seed=0", "epochs=3"], 0.90),
    (["schedule=onecycle", "optimizer.lr=0.01", "seed=0", "epochs=3"], 0.84),
    (["schedule=onecycle", "optimizer.lr=0.1", "seed=0", "epochs=3"], None),
]


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    return save_sweep(tmp_path / "sweep", *GRID)


def test_the_columns_are_the_swept_keys_and_the_metrics_of_the_workload(grid: Path) -> None:
    write_summary(grid)
    types, metrics = hparams_columns(grid)
    assert types == {"optimizer.lr": "DATA_TYPE_FLOAT64", "schedule": "DATA_TYPE_STRING"}
    assert metrics == ["eval/accuracy", "eval/loss", "train/loss", "time/samples_per_second"]
    rows, _ = hparams_table(grid)
    assert [row["hparams"]["schedule"] for row in rows] == ["cosine", "cosine", "onecycle", "onecycle"]
    assert [row["metrics"].get("eval/accuracy", (0, 0))[1] for row in rows[:3]] == pytest.approx([0.79, 0.89, 0.83])
    assert [row["status"] for row in rows] == [["STATUS_SUCCESS"]] * 3 + [["STATUS_UNKNOWN"]]


def test_numbers_stay_numbers_in_a_column_with_null_or_strings(tmp_path: Path) -> None:
    values = [("null", "auto", "'16'", "true"), ("1.5", "4", "bf16", "false")]
    jobs: list[Job] = [
        ([f"max_grad_norm={a}", f"parallel.stages={b}", f"precision={c}", f"compile={d}"], 0.5) for a, b, c, d in values
    ]
    write_summary(save_sweep(tmp_path, *jobs))
    types, _ = hparams_columns(tmp_path)
    assert types == {
        "compile": "DATA_TYPE_BOOL",
        "max_grad_norm": "DATA_TYPE_FLOAT64",
        "parallel.stages": "DATA_TYPE_STRING",
        "precision": "DATA_TYPE_STRING",
    }
    rows, _ = hparams_table(tmp_path)
    assert [row["hparams"] for row in rows] == [
        {"parallel.stages": "auto", "precision": "16", "compile": True},
        {"max_grad_norm": 1.5, "parallel.stages": 4.0, "precision": "bf16", "compile": False},
    ]


def test_a_list_is_spelled_alike_in_the_rows_and_in_the_column(tmp_path: Path) -> None:
    """TensorBoard finds the rows of a value only if it equals the value of the column."""
    values = ["[8]", "[4,4]", "[4, 4]", "['a b',null]", "{a: 1}"]
    path = save_sweep(tmp_path, *(([f"model.hidden={text}"], 0.5) for text in values))
    for number, value in enumerate([[8], [4, 4], [4, 4], ["a b", None], {"a": 1}]):
        [run] = path.glob(f"{number:03d}-*")
        for file in run.glob("events*"):
            file.unlink()
        write_config(run, {}, [f"model.hidden={values[number]}"])
        with Recorder(TensorBoard(), run, 0) as recorder:
            recorder.hyperparameters({"model": {"hidden": value}})
    write_summary(path)
    wanted = ["[8]", "[4,4]", "[4,4]", "[a b,null]", "{a: 1}"]
    assert [row["hparams"]["model.hidden"] for row in hparams_table(path)[0]] == wanted
    assert hparams_values(path)["model.hidden"] == list(dict.fromkeys(wanted))


def told(path: Path) -> str:
    [text] = load_events(path).Tensors("sweep/summary/text_summary")
    return text.tensor_proto.string_val[0].decode()


def test_the_tables_have_the_best_jobs_and_the_mean_over_each_key(grid: Path) -> None:
    write_summary(grid)
    text = told(grid)
    assert text.startswith(
        "4 jobs: 3 done, 1 crashed\n\n| job | best eval/accuracy |\n| --- | --- |\n| 001-job | 0.9 |\n"
    )
    assert "| cosine | 2 | 0.85 ± 0.07071 |\n| onecycle | 1 | 0.84 ± 0 |" in text
    assert "| 0.01 | 2 | 0.82 ± 0.02828 |\n| 0.1 | 1 | 0.9 ± 0 |" in text
    assert "epochs" not in text


def test_the_picture_shows_each_job_over_each_key(grid: Path) -> None:
    figure = summary._figure(summary._Sweep(grid))
    assert figure is not None
    schedule, rate = figure.axes
    assert [axes.get_xlabel() for axes in figure.axes] == ["schedule", "optimizer.lr"]
    drawn: list[Any] = list(rate.lines)
    dots = sorted((x, y) for each in drawn if each.get_linestyle() == "None" for x, y in each.get_xydata())
    assert dots == [(0.01, 0.8), (0.01, 0.84), (0.1, 0.9)]
    [mean] = [each for each in drawn if each.get_linestyle() == "-"]
    assert [tuple(point) for point in mean.get_xydata()] == [(0.01, pytest.approx(0.82)), (0.1, 0.9)]
    assert rate.get_xscale() == "log"
    assert [label.get_text() for label in schedule.get_xticklabels()] == ["cosine", "onecycle"]
    write_summary(grid)
    [picture] = load_events(grid).Images("sweep/accuracy")
    assert (picture.width, picture.height) > (800, 300)


def test_without_matplotlib_there_is_no_picture(grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.sweep.summary.is_installed", lambda name: name != "matplotlib")
    write_summary(grid)
    assert load_events(grid).Tags()["images"] == []
    assert "001-job" in told(grid)


def test_a_second_summary_replaces_the_first(grid: Path) -> None:
    write_summary(grid)
    ledger = json.loads((grid / "sweep.json").read_text())
    for job in ledger["jobs"].values():
        job["overrides"] = [text for text in job["overrides"] if not text.startswith("schedule")]
    (grid / "sweep.json").write_text(json.dumps(ledger))
    write_summary(grid)
    assert list(hparams_columns(grid)[0]) == ["optimizer.lr"]
    assert len(list(grid.glob("events*"))) == 1


@pytest.mark.parametrize("metric", ["eval/accuracy", "eval/loss"])
def test_the_best_job(metric: str, tmp_path: Path) -> None:
    rates = (["optimizer.lr=1"], 0.7), (["optimizer.lr=2"], 0.9), (["optimizer.lr=3"], None), (["optimizer.lr=4"], 0.8)
    path = save_sweep(tmp_path, *rates)
    for run, (best, last) in {"000-job": (0.7, 0.75), "001-job": (0.9, 0.95), "003-job": (0.8, 0.85)}.items():
        if metric == "eval/loss":  # the last one is worse than the best one
            measured = {"metrics": {metric: last}, "best": {"metric": metric, "value": best, "step": 1}}
            (path / run / "result.json").write_text(json.dumps({"status": "done", "steps": 7, **measured}))
    number, value = (1, 0.9) if metric == "eval/accuracy" else (0, 0.7)
    assert find_best(path) == Best(f"{number:03d}-job", metric, (value,))
    assert str(find_best(path)) == f"best {metric} {value:.4f}: {number:03d}-job"


def test_jobs_that_differ_only_in_their_seed_are_compared_by_their_mean(tmp_path: Path) -> None:
    """The highest value is one of the learning rate 2, whose mean is lower; of the rate 3, one seed has crashed."""
    values = {("1", 0): 0.75, ("1", 1): 0.85, ("2", 0): 0.95, ("2", 1): 0.25, ("3", 0): 0.9, ("3", 1): None}
    jobs: list[Job] = [([f"optimizer.lr={rate}", f"seed={seed}"], value) for (rate, seed), value in values.items()]
    found = find_best(save_sweep(tmp_path / "both", *jobs))
    assert str(found) == "best eval/accuracy 0.8000 ± 0.0707, the mean of 2 seeds: optimizer.lr=1"
    write_summary(tmp_path / "both")
    rows = ["job | seeds | best eval/accuracy, mean ± standard deviation", "--- | --- | ---"]
    rows += ["optimizer.lr=1 | 2 | 0.8 ± 0.07071", "optimizer.lr=2 | 2 | 0.6 ± 0.495"]
    assert "".join(f"| {row} |\n" for row in rows) + "\n" in told(tmp_path / "both")
    seeds = save_sweep(tmp_path / "seeds", *((words[1:], value) for words, value in jobs[:2]))
    assert str(find_best(seeds)) == "eval/accuracy 0.8000 ± 0.0707, the mean of 2 seeds"


def test_a_sweep_without_results_has_no_best_job_and_no_summary(tmp_path: Path) -> None:
    path = save_sweep(tmp_path / "sweep", (["seed=0"], None), (["seed=1"], None))
    for each in (path, tmp_path / "absent"):
        write_summary(each)
        assert find_best(each) is None
    assert not list(path.glob("events*"))
    assert not (tmp_path / "absent").exists()


def test_a_summary_that_cannot_be_written_is_a_warning(grid: Path, caplog: pytest.LogCaptureFixture) -> None:
    (grid / "events.out.tfevents.1700000000").mkdir()
    with caplog.at_level(logging.WARNING):
        write_summary(grid)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the summary of the sweep cannot be written" in caplog.text


def test_directories_outside_the_sweep_that_the_ledger_names_are_ignored(grid: Path, tmp_path: Path) -> None:
    ledger = json.loads((grid / "sweep.json").read_text())
    for name in ("../elsewhere", "/etc", "..", ".", "a\0b"):
        ledger["jobs"]["1"]["directory"] = name
        (grid / "sweep.json").write_text(json.dumps(ledger))
        assert find_best(grid) == Best("002-job", "eval/accuracy", (0.84,))
