"""Tests of the choice of the best job, and of the sweep summary: its columns and tables in TensorBoard."""

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.compose import compose_config
from helpers.events import hparams_tab, load_events, multiplexer_of
from helpers.handmade_runs import evaluation_entries, save_ledger, write_run_directory

from runner.analysis.comparison import Comparison
from runner.analysis.sweep_summary import find_best, write_summary
from runner.analysis.tables import notes
from runner.tracking.recorder import Recorder
from runner.tracking.tensorboard import TensorBoard

Job = tuple[list[str], float | None]
"""The overrides of a job, and its best accuracy; None if the job crashed."""


def save_sweep(path: Path, *jobs: Job, metric: str = "eval/accuracy") -> Path:
    """Save a complete sweep with these jobs; the last value of `metric` of each job is 0.01 below its best value."""
    entries: list[dict[str, Any]] = []
    for number, (overrides, best) in enumerate(jobs):
        result: dict[str, Any] = {"status": "crashed"}
        if best is not None:
            result = evaluation_entries(best, best - 0.01, metric)
            result["metrics"] |= {"train/loss": 0.5, "eval/loss": 1.0}
        run = write_run_directory(path / f"{number:03d}-job", *overrides, **result)
        with Recorder(TensorBoard(), run, 0) as recorder:
            recorder.hyperparameters(compose_config(*overrides))
            recorder.scalars({metric: (best or 0) - 0.01, "eval/loss": 1.0, "lr": 0.1, "memory/peak": 2.0}, 7)
            if best is not None:
                recorder.finish()
        entries.append({"state": result.get("status", "done"), "overrides": overrides, "directory": run.name})
    return save_ledger(path, *entries, complete=True)


GRID: list[Job] = [
    (["schedule=cosine", "optimizer.lr=0.01", "seed=0", "epochs=3"], 0.80),
    (["schedule=cosine", "optimizer.lr=0.1", "seed=0", "epochs=3"], 0.90),
    (["schedule=onecycle", "optimizer.lr=0.01", "seed=0", "epochs=3"], 0.84),
    (["schedule=onecycle", "optimizer.lr=0.1", "seed=0", "epochs=3"], None),
]


@pytest.fixture
def grid(tmp_path) -> Path:
    return save_sweep(tmp_path / "sweep", *GRID)


def test_the_columns_are_the_swept_keys_and_the_metrics_of_the_workload(grid):
    write_summary(grid)
    tab = hparams_tab(grid)
    assert tab.types == {"optimizer.lr": "DATA_TYPE_FLOAT64", "schedule": "DATA_TYPE_STRING"}
    assert tab.metrics == ["eval/accuracy", "eval/loss", "train/loss", "time/samples_per_second"]
    rows = tab.rows
    assert [row["hparams"]["schedule"] for row in rows] == ["cosine", "cosine", "onecycle", "onecycle"]
    assert [row["metrics"].get("eval/accuracy", (0, 0))[1] for row in rows[:3]] == pytest.approx([0.79, 0.89, 0.83])
    assert [row["status"] for row in rows] == [["STATUS_SUCCESS"]] * 3 + [["STATUS_UNKNOWN"]]


def test_values_have_one_type_and_one_spelling_in_the_rows_and_in_the_column(tmp_path):
    """TensorBoard finds the rows of a value only if it equals the value of the column."""
    values = [("null", "auto", "'16'", "[8]"), ("1.5", "4", "bf16", "[4,4]"), ("2", "4", "bf16", "[4, 4]")]
    jobs: list[Job] = [
        (
            [f"max_grad_norm={a}", "parallel=pipeline", f"parallel.stages={b}", f"precision={c}", f"model.hidden={d}"],
            0.5,
        )
        for a, b, c, d in values
    ]
    write_summary(save_sweep(tmp_path, *jobs))
    tab = hparams_tab(tmp_path)
    assert tab.types == {
        "max_grad_norm": "DATA_TYPE_FLOAT64",
        "model.hidden": "DATA_TYPE_STRING",
        "parallel.stages": "DATA_TYPE_STRING",
        "precision": "DATA_TYPE_STRING",
    }
    keys = ("max_grad_norm", "parallel.stages", "precision", "model.hidden")
    assert [tuple(row["hparams"].get(key) for key in keys) for row in tab.rows] == [
        (None, "auto", "16", "[8]"),
        (1.5, 4.0, "bf16", "[4,4]"),
        (2.0, 4.0, "bf16", "[4,4]"),
    ]
    assert tab.values["model.hidden"] == ["[8]", "[4,4]"]


def told(path: Path) -> str:
    [text] = load_events(path).Tensors("sweep/summary/text_summary")
    return text.tensor_proto.string_val[0].decode()


def test_the_tables_have_the_best_jobs_and_the_failures(grid):
    write_summary(grid)
    lines = told(grid).splitlines()
    assert lines[0] == "4 jobs: 3 done, 1 crashed"
    assert lines[2].startswith("| optimizer.lr | schedule | runs | best eval/accuracy |")
    assert lines[4].startswith("| 0.1 | cosine | 1 | 0.9 |")
    assert "| 003-job | crashed | 7 |  |" in lines
    assert not any("epochs" in line for line in lines)
    for name in ("002-job", "003-job"):
        shutil.rmtree(grid / name)
    write_summary(grid)
    assert list(hparams_tab(grid).types) == ["optimizer.lr"]
    assert len([path for path in grid.glob("events*") if path.stat().st_size]) == 1, (
        "a second summary replaces the first"
    )
    write_summary(grid)
    assert len(list(grid.glob("events*"))) == 2, "empty files are removed"


def test_a_tensorboard_that_is_running_shows_a_second_summary(grid):
    write_summary(grid)
    first, reader = told(grid), multiplexer_of(grid).Reload()
    shutil.rmtree(grid / "003-job")
    write_summary(grid)
    [text] = reader.Reload().Tensors(".", "sweep/summary/text_summary")
    assert text.tensor_proto.string_val[0].decode() == told(grid) != first


@pytest.mark.parametrize("metric", ["eval/accuracy", "eval/loss"])
def test_the_best_job(metric, tmp_path):
    path = save_sweep(tmp_path, *(([f"optimizer.lr={lr}"], None) for lr in range(1, 5)))
    for run, (best, last) in {"000-job": (0.7, 0.75), "001-job": (0.9, 0.95), "003-job": (0.8, 0.85)}.items():
        flip = -1 if metric == "eval/accuracy" else 1  # the last value is worse than the best one
        entries = evaluation_entries(best, best + flip * (last - best), metric)
        (path / run / "result.json").write_text(json.dumps({"status": "done", "steps": 7, **entries}))
    number, value = (1, 0.9) if metric == "eval/accuracy" else (0, 0.7)
    assert find_best(path) == f"best {metric} {value}: {number:03d}-job"


def test_jobs_that_differ_only_in_their_seed_are_compared_by_their_mean(tmp_path):
    """The highest value is one of the learning rate 2, whose mean is lower; of the rates 3 and 4, one seed has none."""
    values = {("1", 0): 0.75, ("1", 1): 0.85, ("2", 0): 0.95, ("2", 1): 0.25, ("3", 0): 0.9, ("3", 1): None}
    values |= {("4", 0): 0.99, ("4", 1): math.nan}
    jobs: list[Job] = [([f"optimizer.lr={rate}", f"seed={seed}"], value) for (rate, seed), value in values.items()]
    found = find_best(save_sweep(tmp_path / "both", *jobs))
    assert found == "best eval/accuracy 0.800 ± 0.071, the mean of 2 seeds: optimizer.lr=1"
    assert any("mean of it: 1 of the runs" in note for note in notes(Comparison([tmp_path / "both"])))
    write_summary(tmp_path / "both")
    assert "| 1 | 2 | 0.800 ± 0.071 |" in told(tmp_path / "both")
    assert "| 2 | 2 | 0.60 ± 0.49 |" in told(tmp_path / "both")
    seeds = save_sweep(tmp_path / "seeds", *((words[1:], value) for words, value in jobs[:2]))
    assert find_best(seeds) == "eval/accuracy 0.800 ± 0.071, the mean of 2 seeds"


def test_repeats_of_a_seed_are_runs_and_no_other_seeds(tmp_path):
    rates: list[Job] = [([f"optimizer.lr={rate}"], value) for rate, value in (("1", 0.7), ("1", 0.7), ("2", 0.8))]
    assert find_best(save_sweep(tmp_path / "rates", *rates)) == "best eval/accuracy 0.8: 002-job"
    repeats: list[Job] = [([f"repeat={repeat}"], 0.7) for repeat in range(3)]
    assert (
        find_best(save_sweep(tmp_path / "a", *repeats))
        == "eval/accuracy 0.70000 ± 0.00000, the mean of 3 runs (1 seed)"
    )


def test_a_sweep_without_results_has_no_best_job_and_no_summary(tmp_path):
    path = save_sweep(tmp_path / "sweep", (["seed=0"], None), (["seed=1"], None))
    for each in (path, tmp_path / "absent"):
        write_summary(each)
        assert find_best(each) is None
    assert not list(path.glob("events*"))
    assert not (tmp_path / "absent").exists()


def test_a_summary_that_cannot_be_written_is_a_warning(grid, caplog):
    (grid / "events.out.tfevents.1700000000").mkdir()
    with caplog.at_level(logging.WARNING):
        write_summary(grid)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the summary of the sweep cannot be written" in caplog.text


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "..", ".", "a\0b"])
def test_directories_outside_the_sweep_that_the_ledger_names_are_not_read(name, grid):
    write_run_directory(grid.parent / "elsewhere", **evaluation_entries(1.0, 1.0))
    ledger = json.loads((grid / "sweep.json").read_text())
    ledger["jobs"]["1"]["directory"] = name
    (grid / "sweep.json").write_text(json.dumps(ledger))
    assert find_best(grid) == "best eval/accuracy 0.9: 001-job"
