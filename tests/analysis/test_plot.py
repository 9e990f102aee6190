"""Tests of `runner plot`, on sweeps whose results are written by the tests, so that every number is known."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
import math
import os
import re
import runpy
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from helpers.command import child_environment, run_command
from helpers.compose import TINY_CPU, compose_config
from helpers.events import load_events
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from omegaconf import OmegaConf
from PIL import Image
from rich.console import Console

from runner.analysis import plot_pictures
from runner.analysis.output import one_line
from runner.analysis.plot_pictures import pictures
from runner.analysis.plot_runs import Study
from runner.analysis.plot_split import best_pipelines, split_curves
from runner.analysis.plot_tables import plus_minus, render, write_points, write_runs
from runner.analysis.saved_runs import find_runs, labels_of
from runner.commands import plot
from runner.storage.saved_config import config_text
from runner.sweep.ledger_reader import LEDGER
from runner.tracking import charts
from runner.tracking.event_file import EventFile, points
from runner.tracking.mean_std import Spread

BATCH = 120
PIPELINE = {"_target_": "runner.parallel.pipeline.Pipeline", "split_size": 12, "num_micro_batches": None, "stages": 2}
MODEL = {"_target_": "runner.parallel.model.ModelParallel", "cuts": "auto"}
MACHINE = {
    "cpu": {"model": "EPYC", "allowed_cores": 2},
    "devices": [],
    "versions": {"torch": "2.14.1+cu130"},
}


@functools.cache
def as_yaml(config: str) -> str:
    """Return the config of a run as its file has it."""
    return config_text(json.loads(config))


class Sweep:
    """A sweep directory whose runs are written without training."""

    def __init__(self, path: Path):
        self.path, self.count = path, 0
        self.base = compose_config("workload=resnet50")

    def add(self, seconds: float | None, *, status: str = "done", machine: Any = MACHINE, **changes: Any) -> Path:
        """Write a run with the step time `seconds` (None: without a result); `__` in a key of `changes` means a dot."""
        config = json.loads(json.dumps(self.base))
        for key, value in changes.items():
            group, _, name = key.partition("__")
            (config[group] if name else config)[name or group] = value
        directory = self.path / f"{self.count:03d}-job"
        directory.mkdir(parents=True)
        (directory / "config.yaml").write_text(as_yaml(json.dumps(config)))
        (directory / "environment.json").write_text(json.dumps(machine))
        if seconds is not None:
            (directory / "result.json").write_text(json.dumps(self._result(seconds, status)))
        self.count += 1
        return directory

    def _result(self, seconds: float, status: str) -> dict[str, Any]:
        done = {
            "best": {"metric": "eval/accuracy", "value": 1.0, "step": 1},
            "metrics": {"eval/accuracy": seconds / 10},
        }
        times = {"step_seconds": {"median": seconds, "p90": 2 * seconds}}
        failed = {"metrics": {}, "best": {}, "step_seconds": {}, "error": "OutOfMemoryError: 4 GiB\nand more"}
        return {"status": status, "steps": 1, **(done | times if status == "done" else failed), "world_size": 2}

    @property
    def study(self) -> Study:
        return Study(list(find_runs([self.path])))


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path / "sweep")


@pytest.fixture(scope="module")
def drawn_figures() -> set[str]:
    """The contents (see `shown`) of the figures that this module's tests have drawn."""
    return set()


@pytest.fixture
def drawing_once(drawn_figures: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip figures that an earlier test has drawn: drawing takes longer than reading the runs and building figures."""

    def new_pictures(study: Study) -> dict[str, Figure]:
        found = {(name, shown(figure)): figure for name, figure in pictures(study).items()}
        new = {name: figure for (name, content), figure in found.items() if content not in drawn_figures}
        drawn_figures.update(content for _, content in found)
        return new

    monkeypatch.setattr(plot_pictures, "pictures", new_pictures)


def shown(figure: Figure) -> str:
    """The texts and the data of a figure."""
    texts = [artist.get_text() for artist in figure.findobj(Text)]  # pyright: ignore[reportAttributeAccessIssue]
    lines = [artist.get_xydata().tolist() for artist in figure.findobj(Line2D)]  # pyright: ignore
    bars = [artist.get_bbox().bounds for artist in figure.findobj(Rectangle)]  # pyright: ignore
    return repr((texts, lines, bars))


def modes(sweep: Sweep) -> Sweep:
    """For each of three seeds, add one run of `single`, one of `model`, and three of `pipeline`, by split size."""
    for seed in range(3):
        sweep.add(6.0 + 0.1 * seed, seed=seed)
        sweep.add(6.6 + 0.1 * seed, seed=seed, parallel=MODEL)
        for split_size, seconds in ((3, 5.0), (12, 4.0), (60, 4.8)):
            sweep.add(seconds + 0.3 * seed, seed=seed, parallel=PIPELINE | {"split_size": split_size})
    return sweep


def rendered_table(study: Study) -> str:
    console = Console(file=io.StringIO(), width=200, legacy_windows=False)
    console.print(render(study))
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------------------------------------------------------
# Grouping runs into points


def test_runs_that_differ_only_in_seed_are_one_point(sweep: Sweep) -> None:
    study = modes(sweep).study
    assert study.keys == ["parallel", "parallel.split_size"]
    found = [(point.mode, point.values.get("parallel.split_size"), len(point.runs)) for point in study.points]
    assert found == [
        ("single", None, 3),
        ("model", None, 3),
        ("pipeline", 3, 3),
        ("pipeline", 12, 3),
        ("pipeline", 60, 3),
    ]
    pipeline = study.points[3]
    assert pipeline.seconds == (pytest.approx(4.3), pytest.approx(statistics.stdev([4.0, 4.3, 4.6])))
    rates = [BATCH / seconds for seconds in (4.0, 4.3, 4.6)]
    assert pipeline.samples_per_second == (
        pytest.approx(statistics.mean(rates)),
        pytest.approx(statistics.stdev(rates)),
    )
    assert study.single(pipeline) is study.points[0]


def test_a_mode_is_compared_with_the_otherwise_equal_single_device_run(sweep: Sweep) -> None:
    for batch_size, seconds in ((60, 3.0), (120, 6.0)):
        sweep.add(seconds, batch_size=batch_size)
        sweep.add(seconds / 2, batch_size=batch_size, parallel=MODEL)
    sweep.add(1.0, batch_size=30, parallel=MODEL)
    study = sweep.study
    assert [study.single(point) for point in study.points] == [study.points[i] for i in (0, 0, 2, 2)] + [None]


def test_repeat_name_output_root_and_resume_do_not_separate_points(sweep: Sweep) -> None:
    for repeat in range(4):
        sweep.add(1.0 + repeat, repeat=repeat, name=f"n{repeat}", output_root=f"o{repeat}", resume="auto")
    (point,) = sweep.study.points
    assert (len(point.runs), sweep.study.keys) == (4, [])
    assert point.seconds == (2.5, pytest.approx(1.2909944))  # √(5/3)


def test_options_are_labeled_by_file_name_without_the_keys_they_set(sweep: Sweep) -> None:
    for model, precision in (("resnet50", "'16'"), ("resnet18", "bf16"), ("tiny", "bf16")):
        config = compose_config(f"model={model}", f"precision={precision}")
        sweep.add(1.0, model=config["model"], precision=config["precision"])
    study = sweep.study
    assert [point.values for point in study.points] == [
        {"model": "resnet50", "precision": "16"},
        {"model": "resnet18", "precision": "bf16"},
        {"model": "tiny", "precision": "bf16"},
    ]


def test_an_option_with_a_changed_key_keeps_its_name() -> None:
    labels = labels_of(compose_config("optimizer=adamw", "optimizer.lr=0.5", "model=tiny", "model.hidden=7"))
    assert (labels["optimizer"], labels["optimizer.lr"], labels["model"]) == ("adamw", 0.5, "tiny")
    assert labels["parallel"] == "single"


def test_a_changed_key_of_an_option_is_a_swept_key(sweep: Sweep) -> None:
    adam, sgd = (compose_config(f"optimizer={name}")["optimizer"] for name in ("adam", "sgd"))
    for optimizer in (adam, sgd, sgd | {"lr": 0.3}):
        sweep.add(1.0, optimizer=optimizer)
    assert sweep.study.keys == ["optimizer", "optimizer.lr"]
    assert len(sweep.study.points) == 3


def test_each_run_is_found_once_at_any_depth(sweep: Sweep) -> None:
    directory = sweep.add(1.0)
    sweep.add(2.0)
    (directory / "checkpoints").mkdir()
    (directory / "checkpoints" / "config.yaml").write_text("a: 1")
    found = list(find_runs([sweep.path, sweep.path.parent, directory]))
    assert [run.seconds for run in found] == [1.0, 2.0]


def test_one_value_has_no_spread() -> None:
    spread = Spread.of([3.0])
    assert spread.mean == 3.0
    assert math.isnan(spread.deviation)
    assert spread.bar == 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Runs that failed


def test_a_failed_run_is_listed_and_not_counted(sweep: Sweep) -> None:
    sweep.add(4.0, seed=0)
    crashed = sweep.add(9.0, seed=1, status="crashed")
    killed = sweep.add(None, seed=2)
    broken = sweep.add(1.0, seed=3)
    (broken / "config.yaml").write_text("a: [1")
    half = sweep.add(1.0, seed=4)
    (half / "result.json").write_text(
        json.dumps({"status": "done", "steps": 1, "step_seconds": {}, "metrics": {}, "best": {}})
    )
    study = sweep.study
    assert [run.directory for run in study.failed] == [crashed, killed, broken, half]
    assert study.points[0].seconds.mean == 4.0
    text = rendered_table(study)
    assert "4 of 5 runs are excluded" in text
    assert f"{crashed}: crashed: OutOfMemoryError: 4 GiB and more\n" in text
    assert f"{killed}: no result: killed, still running, or a damaged result.json\n" in text
    assert f"{broken}: its config.yaml cannot be read\n" in text
    assert f"{half}: it measured no step\n" in text


NO_RESULT = "no result: killed, still running, or a damaged result.json"
INVALID_RESULTS: dict[str, tuple[Any, str]] = {
    "metrics": ([0.5], NO_RESULT),
    "metrics.eval/accuracy": ("0.5", "metrics.eval/accuracy in its result.json is not a finite number, but '0.5'"),
    "metrics.eval/loss": (None, "metrics.eval/loss in its result.json is not a finite number, but null"),
    "metrics.a": ([1], "metrics.a in its result.json is not a finite number, but [1]"),
    "metrics.b": (math.nan, "metrics.b in its result.json is not a finite number, but nan"),
    "metrics.c": (True, "metrics.c in its result.json is not a finite number, but True"),
    "metrics.d": (10**400, "metrics.d in its result.json is not a finite number, but 1000"),
    "step_seconds": ("fast", NO_RESULT),
    "step_seconds.median": (0, "step_seconds.median in its result.json is not a duration, but 0"),
    "step_seconds.p90": ({}, "step_seconds.p90 in its result.json is not a finite number, but {}"),
    "best": (3, NO_RESULT),
    "best.metric": (["eval/loss"], NO_RESULT),
    "world_size": ("2", "world_size in its result.json is not a finite number, but '2'"),
    "peak_memory_bytes": ([], "peak_memory_bytes in its result.json is not a finite number, but []"),
    "samples_per_second": (math.inf, "samples_per_second in its result.json is not a finite number, but inf"),
}
"""A dict from a key of result.json to an invalid value and the reason why the run is excluded."""


@pytest.mark.usefixtures("drawing_once")
@pytest.mark.parametrize("key", INVALID_RESULTS)
def test_a_result_with_a_wrong_type_is_excluded_and_the_others_are_plotted(
    key: str, sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    for batch_size in (60, 120):
        sweep.add(2.0, batch_size=batch_size)
    wrong = sweep.add(9.0, seed=5)
    value, why = INVALID_RESULTS[key]
    result = json.loads((wrong / "result.json").read_text())
    group, _, name = key.partition(".")
    (result[group] if name else result)[name or group] = value
    (wrong / "result.json").write_text(json.dumps(result))
    assert plot.main([str(sweep.path)]) == 0
    console = capsys.readouterr().out
    assert "1 of 3 runs are excluded" in console
    assert why in " ".join(console.split())
    assert [point["seconds_per_step"] for point in rows(sweep.path / "plots" / "points.csv")] == ["2.0", "2.0"]


def write(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


BROKEN: dict[str, Callable[[Path], object]] = {
    "nothing": write(b""),
    "half": write(b'{"status": "done", "steps"'),
    "bytes": write(bytes(range(256))),
    "a list": write(b"[1, 2]"),
    "a text": write(b'"done"'),
    "a number": write(b"1e999"),
    "YAML of a class": write(b"!!python/object/apply:os.system [exit]"),
    "nested deeply": write(b"[" * 100_000),
    "nested mappings": write(b'{"a": ' * 50_000),
    "a key twice": write(b'{"a": 1, "a": 2}'),
    "null": write(b"null"),
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "large": lambda path: (path.touch(), os.truncate(path, 10**10)),
}


@pytest.mark.usefixtures("drawing_once")
@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("name", ["config.yaml", "result.json", "environment.json", "../sweep.json"])
def test_a_damaged_file_of_a_run_does_not_stop_plotting(
    name: str, kind: str, sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    for batch_size in (60, 120):
        sweep.add(2.0, batch_size=batch_size)
    broken = sweep.add(9.0, batch_size=240)
    (broken / name).unlink(missing_ok=True)
    BROKEN[kind](broken / name)
    assert plot.main([str(sweep.path)]) == 0
    console = capsys.readouterr().out
    excluded = name in ("config.yaml", "result.json") and (name, kind) != ("config.yaml", "a directory")
    assert ("1 of 3 runs are excluded" in console) == excluded
    counted = 2 if name in ("config.yaml", "result.json") else 3
    assert len(rows(sweep.path / "plots" / "points.csv")) == counted


@pytest.mark.usefixtures("drawing_once")
@pytest.mark.parametrize("value", ["many", -3, 0, 1.5, True, None, [2], 10**20])
@pytest.mark.parametrize("key", ["batch_size", "accumulation__steps"])
def test_a_run_with_an_invalid_value_in_its_config_is_excluded(
    key: str, value: Any, sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.add(2.0, seed=1)
    wrong = sweep.add(2.0, parallel=PIPELINE, **{key: value})
    assert plot.main([str(sweep.path)]) == 0
    assert "1 of 2 runs are excluded" in capsys.readouterr().out
    assert [run.directory for run in sweep.study.failed] == [wrong]
    assert f"{key.replace('__', '.')} in its config.yaml is not a positive integer" in sweep.study.failed[0].failure


@pytest.mark.parametrize(
    "name", [b"a b=c%d", b"a\nb", b"a\xffb", b"x" * 200], ids=["signs", "newline", "bytes", "long"]
)
def test_runs_in_a_directory_of_any_name_are_plotted(
    name: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = Sweep(tmp_path / os.fsdecode(name))
    for batch_size in (60, 120):
        sweep.add(2.0, batch_size=batch_size)
    sweep.add(2.0, status="crashed")
    assert plot.main([str(sweep.path)]) == 0
    console = capsys.readouterr().out
    assert console.encode()
    assert "1 of 3 runs are excluded" in console
    assert len(rows(sweep.path / "plots" / "runs.csv")) == 3
    assert (sweep.path / "plots" / "sweep.png").is_file()


def test_an_incomplete_sweep_is_reported_with_its_refused_jobs(sweep: Sweep) -> None:
    sweep.add(1.0, seed=1)
    sweep.add(2.0, seed=2)
    jobs: dict[str, Any] = {
        "0": {"overrides": ["seed=1"], "directory": "000-job", "code": 0, "error": ""},
        "1": {"overrides": ["seed=x"], "directory": "001-refused", "code": 2, "error": "seed: got x\nchoose a number"},
    }
    for job in jobs.values():
        job["config_hash"] = "a"
    ledger = {"typed": ["seed=1,x,2"], "complete": False, "jobs": jobs}
    (sweep.path / LEDGER).write_text(json.dumps(ledger))
    text = rendered_table(sweep.study)
    assert f"{sweep.path} is not complete: repeat its command with resume=auto" in text
    assert "seed=x: seed: got x choose a number\n" in text
    assert "seed=1:" not in text, "this one was done"
    (sweep.path / LEDGER).write_text(json.dumps(ledger | {"complete": True}))
    assert "not complete" not in rendered_table(sweep.study)


def test_a_sweep_without_a_successful_run_is_refused(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    directory = sweep.add(1.0, status="diverged")
    assert plot.main([str(sweep.path)]) == 2
    printed = capsys.readouterr()
    assert "diverged: OutOfMemoryError" in " ".join(printed.out.split())
    assert printed.err.startswith(f"PATH: got {str(sweep.path)!r}"[:60])
    assert printed.err.endswith(": none of its runs is done\n  see the log.txt of each run\n")
    assert not (sweep.path / "plots").exists()
    assert directory.name in printed.out


# ---------------------------------------------------------------------------------------------------------------------
# Tables and CSV


def test_the_table_has_mean_spread_and_speed_up(sweep: Sweep) -> None:
    sweep.add(5.0, seed=0, parallel=PIPELINE)
    sweep.add(None, seed=1)
    text = rendered_table(modes(sweep).study)
    (line,) = (line for line in text.splitlines() if line.split()[:3] == ["pipeline", "12", "4"])
    # 4.0, 4.3, 4.6 and 5.0: mean 4.475, deviation 0.4272; the single device takes 6.1
    assert "4.47 ± 0.43" in line or "4.48 ± 0.43" in line
    assert f"{6.1 / 4.475:.2f}" in line
    assert "0.447 ± 0.043" in line or "0.448 ± 0.043" in line
    assert "1 of 17 runs are excluded" in text


@pytest.mark.parametrize(
    ("mean", "deviation", "text"),
    [
        (5.3171, 0.0523, "5.317 ± 0.052"),
        (5.3171, 0.523, "5.32 ± 0.52"),
        (5.3171, 5.23, "5.3 ± 5.2"),
        (123.4, 52.3, "123 ± 52"),
        (0.001234, 0.0000523, "0.001234 ± 0.000052"),
        (5.0, 0.0, "5.0000 ± 0.0000"),
        (0.0, 0.0, "0.0 ± 0.0"),
        (5.31789, math.nan, "5.318"),
    ],
)
def test_mean_and_spread_are_rounded_to_two_digits_of_the_spread(mean: float, deviation: float, text: str) -> None:
    assert plus_minus(Spread(mean, deviation)) == text


def test_several_machines_are_reported(sweep: Sweep) -> None:
    sweep.add(1.0, seed=0)
    gpus = [{"name": "H100"}, {"name": "H100"}]
    sweep.add(1.0, seed=1, machine=MACHINE | {"devices": gpus})
    assert "measured on several machines: 2 × H100, torch 2.14.1; EPYC, 2 cores, torch 2.14.1" in rendered_table(
        sweep.study
    )


def test_csv_has_every_run_and_every_point(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    modes(sweep).add(9.0, seed=7, status="crashed")
    sweep.add(2.0, seed=7, batch_size=60)
    assert plot.main([str(sweep.path)]) == 0
    capsys.readouterr()
    runs, points = rows(sweep.path / "plots" / "runs.csv"), rows(sweep.path / "plots" / "points.csv")
    assert len(runs) == 17
    assert runs[3] == {
        "batch_size": "120", "parallel": "pipeline", "parallel.split_size": "12", "seed": "0", "status": "done",
        "seconds_per_step": "4.0", "p90_seconds_per_step": "8.0", "samples_per_second": "30.0", "eval/accuracy": "0.4",
        "peak_memory_bytes": "", "world_size": "2", "directory": str(sweep.path / "003-job"),
    }  # fmt: skip
    assert (runs[15]["status"], runs[15]["samples_per_second"]) == ("crashed: OutOfMemoryError: 4 GiB and more", "")
    assert [point["runs"] for point in points] == ["3"] * 5 + ["1"]
    assert float(points[3]["seconds_per_step"]) == pytest.approx(4.3)
    assert float(points[3]["seconds_per_step_std"]) == pytest.approx(0.3)
    assert float(points[3]["eval/accuracy_std"]) == pytest.approx(0.03)
    assert (points[5]["samples_per_second"], points[5]["samples_per_second_std"]) == ("30.0", "")


def test_csv_cells_that_look_like_formulas_in_a_spreadsheet_are_escaped(sweep: Sweep) -> None:
    for value in ("=1+1", -0.5):
        key: dict[str, Any] = {"@SUM(A1)": value}
        directory = sweep.add(1.0, **key)
        result = json.loads((directory / "result.json").read_text())
        result |= {"best": {"metric": "+m", "value": 0.5, "step": 1}, "metrics": {"+m": 0.5}}
        (directory / "result.json").write_text(json.dumps(result))
    write_runs(sweep.study, sweep.path / "runs.csv")
    write_points(sweep.study, sweep.path / "points.csv")
    for name in ("runs.csv", "points.csv"):
        assert [(row["'@SUM(A1)"], row["'+m"]) for row in rows(sweep.path / name)] == [
            ("'=1+1", "0.5"),
            ("-0.5", "0.5"),
        ]


# ---------------------------------------------------------------------------------------------------------------------
# Pipelines, and their theoretical bubble


def test_the_best_pipeline_is_the_fastest(sweep: Sweep) -> None:
    (best,) = best_pipelines(modes(sweep).study.points)
    assert best.values["parallel.split_size"] == 12


def test_the_theoretical_curve_touches_the_measurements_from_below(sweep: Sweep) -> None:
    (curve,) = split_curves(modes(sweep).study.points)
    assert [size for size, _ in curve.points] == [3, 12, 60]
    assert (curve.batch_size, curve.stages, curve.best[0]) == (120, 2, 12)
    # m = 40, 10, 2: (m+1)/m = 1.025, 1.1, 1.5; measured 5.3, 4.3, 5.1 on average
    assert [curve.slowdown(size) for size in (3, 12, 60)] == [pytest.approx(x) for x in (1.025, 1.1, 1.5)]
    assert curve.seconds_without_bubble == pytest.approx(5.1 / 1.5)
    gaps = [point.seconds.mean - curve.seconds_without_bubble * curve.slowdown(size) for size, point in curve.points]
    assert min(gaps) == pytest.approx(0, abs=1e-12)
    assert gaps[0] > 1


def test_the_batch_size_of_a_curve_is_that_of_an_accumulation_step(sweep: Sweep) -> None:
    for number in (2, 5):
        pipeline = PIPELINE | {"split_size": None, "num_micro_batches": number, "stages": "auto"}
        sweep.add(1.0, parallel=pipeline, accumulation__steps=2)
    (curve,) = split_curves(sweep.study.points)
    assert [size for size, _ in curve.points] == [12, 30]
    assert (curve.batch_size, curve.stages) == (60, 2)


def test_pipelines_that_differ_in_other_keys_have_separate_curves(sweep: Sweep) -> None:
    for schedule in ("gpipe", "1f1b"):
        for split_size in (12, 6):
            sweep.add(1.0, parallel=PIPELINE | {"schedule": schedule, "split_size": split_size})
    curves = split_curves(sweep.study.points)
    assert [(curve.label, [size for size, _ in curve.points]) for curve in curves] == [
        ("schedule=gpipe", [6, 12]),
        ("schedule=1f1b", [6, 12]),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Pictures: the contents of the matplotlib figures


def axes_of(study: Study, name: str) -> Any:
    return pictures(study)[name].axes[0]


def heights(axes: Any) -> list[float]:
    return [patch.get_height() for patch in axes.patches]


def bars_of(axes: Any) -> list[tuple[float, float]]:
    """(lower, upper) end of each error bar."""
    segments = [path for collection in axes.collections for path in collection.get_segments()]
    return [(float(segment[0][1]), float(segment[1][1])) for segment in segments]


def test_a_study_of_modes_and_split_sizes_has_three_pictures(sweep: Sweep) -> None:
    assert list(pictures(modes(sweep).study)) == ["modes", "modes_and_pipeline", "split_size"]


def test_modes_are_drawn_as_bars_with_error_bars(sweep: Sweep) -> None:
    axes = axes_of(modes(sweep).study, "modes")
    assert heights(axes) == [pytest.approx(6.1), pytest.approx(6.7)]
    assert bars_of(axes) == [(pytest.approx(6.0), pytest.approx(6.2)), (pytest.approx(6.6), pytest.approx(6.8))]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["single", "model"]
    assert axes.get_ylim()[0] == 0


def test_the_best_pipeline_is_drawn_beside_the_modes(sweep: Sweep) -> None:
    axes = axes_of(modes(sweep).study, "modes_and_pipeline")
    assert heights(axes) == [pytest.approx(x) for x in (6.1, 6.7, 4.3)]
    assert axes.get_xticklabels()[2].get_text() == "pipeline\nsplit_size=12"
    texts = [text.get_text() for text in axes.texts]
    assert any(text.endswith(f"\n{6.1 / 4.3:.2f} ×") for text in texts)
    assert any(text.endswith(f"\n{6.1 / 6.7:.2f} ×") for text in texts)


def test_the_split_size_picture_marks_the_best_and_shows_the_theory(sweep: Sweep) -> None:
    axes = axes_of(modes(sweep).study, "split_size")
    lines = {line.get_label(): line for line in axes.lines}
    (theory,) = (line for label, line in lines.items() if label.startswith("GPipe's bubble alone"))
    x, y = theory.get_xdata(), theory.get_ydata()
    assert (x[0], x[-1]) == (3, 60)
    assert y[-1] == pytest.approx(5.1)
    assert y[0] == pytest.approx(5.1 / 1.5 * 1.025)
    (star,) = (line for line in axes.lines if line.get_marker() == "*")
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (12, pytest.approx(4.3))
    assert lines["single: 6.1 s"].get_ydata()[0] == pytest.approx(6.1)
    assert bars_of(axes) == [(pytest.approx(m - 0.3), pytest.approx(m + 0.3)) for m in (5.3, 4.3, 5.1)]


def drawn_lines(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """The points of each line, by label."""
    return {line.get_label(): [tuple(point) for point in line.get_xydata()] for line in axes.lines}


def bands(axes: Any) -> list[list[tuple[float, float]]]:
    """(lower, upper) edge of each band at each of its points."""
    found = []
    for collection in axes.collections:
        [path] = collection.get_paths()
        corners: dict[float, list[float]] = {}
        for x, y in path.vertices:
            corners.setdefault(float(x), []).append(float(y))
        found.append([(min(ys), max(ys)) for _, ys in sorted(corners.items())])
    return found


def test_a_sweep_over_numbers_is_drawn_as_lines_with_bands(sweep: Sweep) -> None:
    for lr, seconds in ((0.3, 3.0), (0.01, 1.0), (0.1, 2.0)):
        for seed in (0, 1):
            sweep.add(seconds + 0.2 * seed, optimizer__lr=lr, seed=seed)
    quality, time = pictures(sweep.study)["sweep"].axes
    [line] = drawn_lines(quality).values()
    assert line == [(0.01, pytest.approx(0.11)), (0.1, pytest.approx(0.21)), (0.3, pytest.approx(0.31))]
    deviation = 0.02 / math.sqrt(2)
    [band] = bands(quality)
    assert band == [(pytest.approx(m - deviation), pytest.approx(m + deviation)) for m in (0.11, 0.21, 0.31)]
    assert [y for _, y in next(iter(drawn_lines(time).values()))] == [pytest.approx(y) for y in (1.1, 2.1, 3.1)]
    assert (quality.get_xlabel(), quality.get_ylabel(), time.get_ylabel()) == (
        "optimizer.lr",
        "eval/accuracy",
        "seconds per step",
    )
    assert quality.get_xscale() == "log"
    assert [label.get_text() for label in quality.get_xticklabels()] == ["0.01", "0.1", "0.3"]
    assert time.get_ylim()[0] == 0


def test_values_with_equal_shortened_labels_are_drawn_separately() -> None:
    _, (axes,) = charts.canvas("title", "caption", (4, 3))
    widths = [f"[64, 64, 128, 128, 256, 256, 512, {last}]" for last in (512, 1024)]
    charts.over_values(axes, [(widths[0], 0.9), (widths[1], 0.1), (widths[0], 0.8)])
    first, second = [label.get_text() for label in axes.get_xticklabels()]
    assert second == f"{first} (2)"
    dots = [(set(line.get_xdata()), list(line.get_ydata())) for line in axes.lines if line.get_marker() == "o"]
    assert dots == [({0.0}, [0.9, 0.8]), ({1.0}, [0.1])]


@pytest.mark.parametrize(
    ("values", "geometric"),
    [
        ((1, 2, 4, 8), True), ((0.01, 0.02, 0.05, 0.1), True), ((0.0, 1e-4, 1e-3), True), ((32, 64, 128), True),
        ((1, 2, 3, 4), False), ((0.1, 0.2), False), ((1, 10), True), ((-1, 1, 10), False), ((5,), False),
        ((0, 1), False), ((10, 20, 30), False), ((10**16, 10**16 + 2, 10**16 + 4), False), ((0.8, 0.9, 0.99), False),
    ],
)  # fmt: skip
def test_values_with_similar_ratios_are_drawn_on_a_logarithmic_axis(values: tuple[float, ...], geometric: bool) -> None:
    assert charts.is_geometric(values) == geometric


def test_a_sweep_over_options_is_drawn_as_bars_side_by_side(sweep: Sweep) -> None:
    for precision in ("32", "bf16", "tf32"):
        for lr in (0.1, 0.2):
            node = compose_config(f"precision='{precision}'")["precision"]
            sweep.add(10 * lr, optimizer__lr=lr, precision=node)
    figure = pictures(sweep.study)["sweep"]
    quality, time = figure.axes
    assert [label.get_text() for label in time.get_xticklabels()] == ["32", "bf16", "tf32"]
    assert heights(time) == [pytest.approx(1.0)] * 3 + [pytest.approx(2.0)] * 3
    assert heights(quality) == [pytest.approx(0.1)] * 3 + [pytest.approx(0.2)] * 3
    assert [text.get_text() for text in quality.texts] == ["0.1000"] * 3 + ["0.2000"] * 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["optimizer.lr=0.1", "optimizer.lr=0.2"]
    spans = sorted((patch.get_x(), patch.get_x() + patch.get_width()) for patch in time.patches)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(spans)), "no bar hides another"


def boxes(figure: Any) -> Any:
    """Draw the figure, and return a function that returns the bounding box of an artist in pixels."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return lambda artist: artist.get_window_extent(canvas.get_renderer())


def test_a_legend_does_not_overlap_the_axes(sweep: Sweep) -> None:
    for batch_size in (30, 60, 120):
        for lr in (0.1, 0.2, 0.3):
            sweep.add(lr, optimizer__lr=lr, batch_size=batch_size)
    figure = pictures(sweep.study)["sweep"]
    where = boxes(figure)
    [legend] = figure.legends
    assert not any(where(legend).overlaps(where(axes)) for axes in figure.axes)
    assert where(legend).x1 <= figure.bbox.x1


@pytest.mark.parametrize("count", [2, 5, 12])
def test_labels_of_modes_are_readable_for_any_number_of_bars(sweep: Sweep, count: int) -> None:
    """No label is white, overlaps another label, or lies outside of the figure."""
    for number in range(count):
        sweep.add(0.01 * (1 + number), epochs=number + 1)
        sweep.add(0.02 * (1 + number), epochs=number + 1, parallel=MODEL)
    figure = pictures(sweep.study)["modes"]
    where = boxes(figure)
    [axes] = figure.axes
    texts = [*axes.texts, *(axes.get_xticklabels() if count < 5 else axes.get_yticklabels())]
    assert len(axes.texts) == 2 * count
    assert all(text.get_color() != "white" for text in texts)
    assert not any(where(one).overlaps(where(other)) for one, other in itertools.combinations(texts, 2))
    assert all(where(text).x0 >= 0 and where(text).x1 <= figure.bbox.x1 for text in texts)


def test_a_sweep_over_two_keys_is_drawn_as_a_heat_map(sweep: Sweep) -> None:
    for batch_size in (60, 30):
        for lr in (0.1, 0.2, 0.3):
            if (batch_size, lr) != (30, 0.3):
                sweep.add(lr + batch_size, optimizer__lr=lr, batch_size=batch_size)
    axes = axes_of(sweep.study, "heat_map")
    [image] = axes.images
    expected = [[3.01, 3.02, math.nan], [6.01, 6.02, 6.03]]
    assert image.get_array().filled(math.nan).tolist() == [pytest.approx(row, nan_ok=True) for row in expected]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.1", "0.2", "0.3"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["30", "60"]
    assert [text.get_text() for text in axes.texts] == ["3.01", "3.02", "6.01", "6.02", "6.03"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("optimizer.lr", "batch_size")


def test_a_search_over_numbers_has_no_heat_map(sweep: Sweep) -> None:
    """Each trial has a different value, so that most cells would be empty and the labels unreadable."""
    for i in range(20):
        sweep.add(0.1 * i, optimizer__lr=0.01 * 1.1**i, batch_size=(30, 60)[i % 2])
    assert list(pictures(sweep.study)) == ["sweep"]


def test_more_than_two_keys_are_drawn_as_a_ranking_and_over_each_key(sweep: Sweep) -> None:
    for batch_size, lr, epochs in itertools.product((30, 60), (0.1, 0.2), (1, 2)):
        sweep.add(batch_size / 10 + lr + epochs / 20, optimizer__lr=lr, batch_size=batch_size, epochs=epochs)
    figures = pictures(sweep.study)
    assert list(figures) == ["ranking", "sweep"]
    [axes] = figures["ranking"].axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0] == "epochs=2, batch_size=60, lr=0.2"
    assert labels[-1] == "epochs=1, batch_size=30, lr=0.1"
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the best is at the top"
    assert [text.get_text() for text in axes.texts][:2] == ["0.6300", "0.6250"]
    panels = {axes.get_xlabel(): axes for axes in figures["sweep"].axes}
    assert set(panels) == {"epochs", "batch_size", "optimizer.lr"}
    [mean] = [line for line in panels["batch_size"].lines if line.get_linestyle() == "-"]
    assert [tuple(point) for point in mean.get_xydata()] == [(30, pytest.approx(0.3225)), (60, pytest.approx(0.6225))]


def test_ranked_runs_are_labeled_by_values_that_differ_from_most_runs(sweep: Sweep) -> None:
    sweep.add(1.0)
    for number, changes in enumerate(
        ({"batch_size": 60}, {"optimizer__lr": 0.3}, {"epochs": 8}, {"max_grad_norm": 1.0})
    ):
        sweep.add(2.0 + number, **changes)
    sweep.add(7.0, epochs=9, optimizer__lr=0.4)
    figures = pictures(sweep.study)
    assert list(figures) == ["ranking"], "no key was varied by itself"
    labels = [label.get_text() for label in figures["ranking"].axes[0].get_yticklabels()]
    assert labels == [
        "epochs=9, lr=0.4",
        "max_grad_norm=1.0",
        "epochs=8",
        "lr=0.3",
        "batch_size=60",
        "all as in most runs",
    ]


def test_a_ranking_of_many_settings_shows_the_best_ones(sweep: Sweep) -> None:
    for number in range(30):
        sweep.add(1.0 + number, optimizer__lr=number / 100, batch_size=30 + number, epochs=1 + number)
    figure = pictures(sweep.study)["ranking"]
    assert figure.get_suptitle() == "The best 20 of 30 settings by eval/accuracy"
    assert [text.get_text() for text in figure.axes[0].texts][:2] == ["3", "2.9"]


def log_curve(directory: Path, values: dict[int, float], first_step: int = 1, tag: str = "eval/accuracy") -> None:
    file = EventFile(directory, first_step)
    for step, value in values.items():
        file.add(points({tag: value}), step)
    file.close()


def test_learning_curves_are_averaged_over_seeds(sweep: Sweep) -> None:
    for lr in (0.1, 0.2, 0.3):
        for seed in (0, 1):
            directory = sweep.add(1.0, optimizer__lr=lr, seed=seed)
            log_curve(directory, {5: lr + seed, 10: 0.5, 15: 99.0})
            log_curve(directory, {15: 2 * lr, 20: 0.75}, first_step=11)  # it was resumed from step 10
    axes = axes_of(sweep.study, "curves")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("optimizer steps", "eval/accuracy")
    lines = drawn_lines(axes)
    assert list(lines) == ["lr=0.1", "lr=0.2", "lr=0.3"]
    assert lines["lr=0.2"] == [(5, pytest.approx(0.7)), (10, 0.5), (15, pytest.approx(0.4)), (20, 0.75)]
    assert bands(axes)[1][0] == (pytest.approx(0.7 - math.sqrt(0.5)), pytest.approx(0.7 + math.sqrt(0.5)))
    assert len({line.get_color() for line in axes.lines}) == 3


def test_the_training_metric_is_drawn_if_the_metric_was_evaluated_only_once(sweep: Sweep) -> None:
    for seed in (0, 1):
        directory = sweep.add(1.0, seed=seed)
        log_curve(directory, {9: 0.5})
        log_curve(directory, {3: 0.1, 6: 0.2, 9: 0.4}, tag="train/accuracy")
    assert list(pictures(sweep.study)) == ["curves"]
    axes = axes_of(sweep.study, "curves")
    assert axes.get_ylabel() == "train/accuracy"
    assert drawn_lines(axes) == {"2 runs": [(3, pytest.approx(0.1)), (6, pytest.approx(0.2)), (9, pytest.approx(0.4))]}


EVENTS = "events.out.tfevents.0000000001"
BROKEN_EVENTS: dict[str, Callable[[Path], object]] = {
    "nothing": write(b""),
    "bytes": write(bytes(range(256))),
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "large": lambda path: (path.touch(), os.truncate(path, 10**10)),
}


@pytest.mark.parametrize("kind", BROKEN_EVENTS)
def test_a_run_with_broken_event_files_has_no_curve(kind: str, sweep: Sweep) -> None:
    for lr in (0.1, 0.2):
        log_curve(sweep.add(1.0, optimizer__lr=lr), {1: 0.1, 2: 0.2, 3: 0.3})
    BROKEN_EVENTS[kind](sweep.add(1.0, optimizer__lr=0.3) / EVENTS)
    assert list(drawn_lines(axes_of(sweep.study, "curves"))) == ["lr=0.1", "lr=0.2"]


def test_lists_and_booleans_are_drawn_as_categories(sweep: Sweep) -> None:
    for indices in ([], [0, 1]):
        for compiled in (False, True):
            sweep.add(1.0, device__indices=indices, compile=compiled)
    figure = pictures(sweep.study)["sweep"]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["false", "true"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["device.indices=[]", "device.indices=[0,1]"]


def test_a_line_without_the_metric_is_left_out_of_its_panel(sweep: Sweep) -> None:
    for lr in (0.1, 0.2, 0.3):
        sweep.add(lr, optimizer__lr=lr)
    directory = sweep.add(1.0, optimizer__lr=0.1, batch_size=60)
    result = json.loads((directory / "result.json").read_text())
    (directory / "result.json").write_text(json.dumps(result | {"metrics": {}, "best": {}}))
    quality, time = pictures(sweep.study)["sweep"].axes
    assert [len(line) for line in drawn_lines(time).values()] == [1, 3]
    assert [len(line) for line in drawn_lines(quality).values()] == [3]


def test_a_study_of_one_point_has_no_picture(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    sweep.add(1.0, seed=0)
    sweep.add(2.0, seed=1)
    assert pictures(sweep.study) == {}
    assert plot.main([str(sweep.path)]) == 0
    assert "1.50 ± 0.71" in capsys.readouterr().out
    assert sorted(path.name for path in (sweep.path / "plots").iterdir()) == ["points.csv", "runs.csv"]


# ---------------------------------------------------------------------------------------------------------------------
# The command


def test_plots_are_not_written_through_symbolic_links(sweep: Sweep, tmp_path: Path) -> None:
    modes(sweep)
    canary = tmp_path / "canary"
    canary.write_text("as it was")
    plot.main([str(sweep.path)])
    out = sweep.path / "plots"
    written = [path for path in out.iterdir() if path.suffix in (".csv", ".png")]
    assert len(written) > 2
    for path in written:
        path.unlink()
        path.symlink_to(canary)
    plot.main([str(sweep.path)])
    assert not any(path.is_symlink() for path in written)
    shutil.rmtree(out)
    (tmp_path / "elsewhere").mkdir()
    out.symlink_to(tmp_path / "elsewhere")
    assert plot.main([str(sweep.path)]) == 2
    assert not list((tmp_path / "elsewhere").iterdir())
    assert canary.read_text() == "as it was"


def test_a_sweep_that_was_interrupted_is_plotted(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    modes(sweep)
    running = {"state": "running", "config_hash": "a", "directory": "099-seed=1"}
    ledger = {"typed": [], "complete": False, "jobs": {"99": running}}
    (sweep.path / "sweep.json").write_text(json.dumps(ledger))
    assert plot.main([str(sweep.path)]) == 0


def test_png_and_tensorboard_show_the_same_pictures(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    modes(sweep)
    for _ in range(2):
        assert plot.main([str(sweep.path)]) == 0
    printed, out = capsys.readouterr().out, sweep.path / "plots"
    read = load_events(out)
    for name in ("modes", "modes_and_pipeline", "split_size"):
        (shown,) = read.Images(f"study/{name}")  # the images of the first call are replaced
        png = numpy.asarray(Image.open(out / f"{name}.png").convert("RGB")).astype(int)
        board = numpy.asarray(Image.open(io.BytesIO(shown.encoded_image_string)).convert("RGB")).astype(int)
        assert png.shape == board.shape
        assert abs(png - board).max() <= 2
        assert png.std() > 10, "not a blank sheet"
        assert f"{name}.png\n" in printed
    assert "look: tensorboard --logdir" in printed


def test_several_sweeps_are_plotted_together_in_their_common_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, changes in (("first", {}), ("second", {"parallel": MODEL})):
        Sweep(tmp_path / "name" / name).add(1.0, **changes)
    monkeypatch.chdir(tmp_path)
    assert plot.main(["name/first", str(tmp_path / "name" / "second")]) == 0
    assert len(rows(tmp_path / "name" / "plots" / "points.csv")) == 2
    assert plot.main(["name", "--out", "elsewhere"]) == 0
    assert (tmp_path / "elsewhere" / "modes.png").is_file()
    assert "elsewhere/modes.png" in capsys.readouterr().out


def refusals(sweep: Sweep) -> Iterator[tuple[list[str], str]]:
    (sweep.path.parent / "empty").mkdir()
    (sweep.path.parent / "file").write_text("")
    sweep.add(1.0)
    yield ["absent"], "PATH: got 'absent': there is no such directory\n  name the directory of a sweep"
    yield ["empty"], "PATH: got 'empty': it contains no run\n  "
    yield ["sweep", "--out", "file"], "--out: got 'file': nothing can be written there (it is not a directory)\n  "


def test_paths_that_cannot_be_plotted_are_refused(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(sweep.path.parent)
    for arguments, why in refusals(sweep):
        assert plot.main(arguments) == 2
        assert capsys.readouterr().err.startswith(why)


def test_without_matplotlib_the_error_says_how_to_install_it(sweep: Sweep) -> None:
    sweep.add(1.0)
    words = [sys.executable, "-m", "helpers.plot_without_matplotlib", str(sweep.path)]
    ran = subprocess.run(words, env=child_environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("matplotlib: ")
    assert "pip install" in ran.stderr
    assert not (sweep.path / "plots").exists()


def test_a_real_sweep_is_plotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = (*TINY_CPU, "steps=6", "data=synthetic", "data.num_samples=64", "data.num_classes=3", "data.holdout=8")
    code, said = run_command("-m", *small, "seed=0,1", "precision=32,bf16", cwd=tmp_path)
    assert code == 0, said
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plot.py", "outputs/sweeps"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(plot.__file__), run_name="__main__")  # as `python -m runner plot` does
    assert ended.value.code == 0
    points = rows(tmp_path / "outputs" / "sweeps" / "plots" / "points.csv")
    assert [(point["precision"], point["runs"]) for point in points] == [("32", "2"), ("bf16", "2")]
    for point, target in zip(points, ("Precision", "BFloat16"), strict=True):
        results = [
            json.loads((path.parent / "result.json").read_text())["step_seconds"]["median"]
            for path in tmp_path.glob("outputs/sweeps/classifier/*/*/config.yaml")
            if OmegaConf.load(path).precision._target_.endswith(f".{target}")
        ]
        assert float(point["seconds_per_step"]) == pytest.approx(statistics.mean(results))
    assert (tmp_path / "outputs" / "sweeps" / "plots" / "sweep.png").is_file()


HOSTILE = {
    "a formula": ("$\\frac{$", "\\$\\frac{\\$"),
    "an empty formula": ("$$", "\\$\\$"),
    "markup": ("[/red]", "[/red]"),
    "an escape code": ("\x1b[31mred", "\\x1b[31mred"),
    "half a surrogate": ("\ud800", "\\ud800"),
}
"""Texts in the files of a run, and how they are drawn: what matplotlib and rich would interpret is escaped."""


@pytest.mark.parametrize("kind", HOSTILE)
def test_special_characters_in_keys_metrics_and_machines_are_escaped(sweep: Sweep, kind: str) -> None:
    text, drawn = HOSTILE[kind]
    for value in (1, 2):
        machine = MACHINE | {"cpu": {"model": text, "allowed_cores": 2}}
        key: dict[str, Any] = {f"model__{text}": value}
        directory = sweep.add(1.0 + value, machine=machine, **key)
        result = json.loads((directory / "result.json").read_text())
        result |= {"best": {"metric": text, "value": 0.5, "step": 1}, "metrics": {text: 0.5}}
        (directory / "result.json").write_text(json.dumps(result))
    shown = drawn.replace("\\$", "$")
    title = re.split("  +", rendered_table(sweep.study).split("\n")[1].strip())
    assert title == [f"model.{shown}", "runs", "seconds per step", "samples/s", shown]
    figure = pictures(sweep.study)["sweep"]
    figure.savefig(io.BytesIO())
    first, _ = figure.axes
    assert (first.get_xlabel(), first.get_ylabel()) == (f"model.{drawn}", drawn)
    assert first.get_title(loc="left").startswith(f"{drawn}, 2 cores")


@pytest.mark.parametrize("numbers", [(1, 2), (1, 2, 3, 4, 5, 6, 7, 8)])
@pytest.mark.parametrize("text", ["$\\frac$", "$" + "{" * 400 + "x" + "}" * 400 + "$", ""])
def test_dollar_signs_in_legends_and_labels_are_escaped(sweep: Sweep, numbers: tuple[int, ...], text: str) -> None:
    """Keys are shown in the legend of a grid, and in the labels of a ranking."""
    machine = MACHINE | {"cpu": {"model": "$" * 60, "allowed_cores": 2}}  # long enough to be wrapped in the caption
    pairs = itertools.product(numbers, numbers) if len(numbers) == 2 else zip(numbers, numbers, strict=True)
    for first, second in pairs:
        key: dict[str, Any] = {text: first, "model__depth": second}
        sweep.add(1.0 + first, machine=machine, **key)
    figures = pictures(sweep.study)
    assert figures.keys() == ({"sweep", "heat_map" if len(numbers) == 2 else "ranking"})
    for name, figure in figures.items():
        figure.savefig(io.BytesIO())
        texts = [each for each in figure.findobj(Text) if "$" in each.get_text()]
        assert all(each.get_text().count("$") == each.get_text().count("\\$") for each in texts)
        assert len(texts) >= 1, name


@pytest.mark.parametrize("values", [("$\\frac{$", "[/red]"), (10**400, 1), (-(10**400), "\x1b")])
def test_values_that_cannot_be_drawn_as_numbers_are_drawn_as_categories(sweep: Sweep, values: tuple[Any, Any]) -> None:
    for value in values:
        sweep.add(1.0, model__depth=value)
    [(name, figure)] = pictures(sweep.study).items()  # long names are drawn as a ranking
    figure.savefig(io.BytesIO())
    ticks = figure.axes[0].get_xticklabels() if name == "sweep" else figure.axes[0].get_yticklabels()
    labels = [label.get_text().replace("\\$", "$").removeprefix("depth=") for label in ticks]
    assert [label[:19] for label in labels] == [one_line(str(value))[:19] for value in values]


def test_a_top_level_key_that_contains_a_dot_is_a_swept_key(sweep: Sweep) -> None:
    keys: list[dict[str, Any]] = [{"x.y": value} for value in (1, 2)]
    for key in keys:
        sweep.add(1.0, **key)
    assert sweep.study.keys == ["x.y"]


def test_more_micro_batches_than_samples_do_not_stop_plotting(sweep: Sweep) -> None:
    """No run has such a config, but a file that was edited by hand may."""
    sweep.add(1.0, parallel=PIPELINE | {"num_micro_batches": 10 * BATCH, "split_size": None})
    for split_size in (3, 7):
        sweep.add(1.0, accumulation__steps=10 * BATCH, parallel=PIPELINE | {"split_size": split_size})
    first, second = split_curves(sweep.study.points), pictures(sweep.study)
    assert [[size for size, _ in curve.points] for curve in first] == [[3, 7]]
    second["split_size"].savefig(io.BytesIO())
