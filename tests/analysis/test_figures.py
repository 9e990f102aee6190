"""Tests of `runner plot` and its figures, on runs whose results are written by the tests."""

import itertools
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from helpers.handmade_runs import evaluation_entries, write_run_directory
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from scipy import stats

from runner.analysis.comparison import STEP_SECONDS, Comparison
from runner.analysis.figures import pictures
from runner.analysis.split_curves import split_curves
from runner.commands import plot
from runner.storage.saved_run import config_text
from runner.tracking.event_file import EventFile, points


class Sweep:
    """A sweep directory whose runs are written without training."""

    def __init__(self, path: Path):
        self.path, self.count = path, 0

    def add(self, seconds: float, *overrides: str, **result: Any) -> Path:
        """Write a run with this median step time of 120 samples, and a tenth of it as its accuracy."""
        speed = {"step_seconds": {"median": seconds}, "samples_per_second": 120 / seconds}
        entries = evaluation_entries(seconds / 10, 0.0, **speed, world_size=2) | result
        self.count += 1
        return write_run_directory(self.path / f"{self.count:03d}-job", *overrides, **entries)

    def compare(self) -> Comparison:
        return Comparison([self.path])

    def pictures(self) -> dict[str, Figure]:
        return pictures(self.compare())


@pytest.fixture
def sweep(tmp_path) -> Sweep:
    return Sweep(tmp_path / "sweep")


def add_modes(sweep: Sweep) -> Sweep:
    """For each of three seeds, add one run of `single`, one of `model`, and three of `pipeline`, by split size."""
    for seed in range(3):
        base = ("workload=resnet50", f"seed={seed}")
        sweep.add(6.0 + 0.1 * seed, *base)
        sweep.add(6.6 + 0.1 * seed, *base, "parallel=model")
        for size, seconds in ((3, 5.0), (12, 4.0), (60, 4.8)):
            pipeline = ("parallel=pipeline", f"parallel.split_size={size}", "parallel.stages=2")
            sweep.add(seconds + 0.3 * seed, *base, *pipeline)
    return sweep


def log_curve(directory: Path, values: dict[int, float], first_step: int = 1, tag: str = "eval/accuracy") -> None:
    file = EventFile(directory, first_step)
    for step, value in values.items():
        file.add(points({tag: value}), step)
    file.close()


def lines(axes: Any) -> list[list[tuple[float, float]]]:
    """The points of each line that has any."""
    return [[(float(xy[0]), float(xy[1])) for xy in line.get_xydata()] for line in axes.lines if len(line.get_xydata())]


def test_modes_have_error_bars_and_the_theoretical_curve_touches_the_measurements_from_below(sweep):
    figures = add_modes(sweep).pictures()
    assert list(figures) == ["modes", "modes_and_pipeline", "split_size"]
    [axes] = figures["modes_and_pipeline"].axes
    assert [bar.get_width() for bar in axes.patches] == [pytest.approx(x) for x in (6.1, 6.7, 4.3)]  # pyright: ignore
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["parallel=single", "parallel=model", "parallel=pipeline, parallel.split_size=12"]
    bars = [segment for each in axes.collections for segment in each.get_segments()]  # pyright: ignore
    assert [(bar[0][0], bar[1][0]) for bar in bars][2] == (pytest.approx(4.0), pytest.approx(4.6))
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["19.7 samples/s", f"17.9 samples/s, {6.1 / 6.7:.2f} ×", f"28 samples/s, {6.1 / 4.3:.2f} ×"]

    (curve,) = split_curves(sweep.compare().rows)
    assert [size for size, _ in curve.points] == [3, 12, 60]
    assert (curve.batch_size, curve.stages) == (120, 2)
    # m = 40, 10, 2: (m+1)/m = 1.025, 1.1, 1.5; measured 5.3, 4.3, 5.1 on average
    assert [curve.slowdown(size) for size in (3, 12, 60)] == [pytest.approx(x) for x in (1.025, 1.1, 1.5)]
    assert curve.seconds_without_bubble == pytest.approx(5.1 / 1.5)
    labels = {line.get_label() for line in figures["split_size"].axes[0].lines}
    assert {"GPipe's bubble alone: 3.4 s · (m+1)/m", "best: 12, 4.3 s", "single: 6.1 s"} <= labels


def test_the_batch_size_of_a_curve_is_that_of_an_accumulation_step(sweep):
    for number, schedule in itertools.product((2, 5), ("gpipe", "1f1b")):
        pipeline = ("parallel=pipeline", "parallel.split_size=null", f"parallel.num_micro_batches={number}")
        sweep.add(1.0, "batch_size=120", *pipeline, f"parallel.schedule={schedule}", "accumulation=2")
    curves = split_curves(sweep.compare().rows)
    assert {curve.label: [size for size, _ in curve.points] for curve in curves} == {
        "schedule=gpipe": [12, 30],
        "schedule=1f1b": [12, 30],
    }
    assert {(curve.batch_size, curve.stages) for curve in curves} == {(60, 2)}


def test_numbers_are_ascending_if_null_is_among_them(sweep):
    for number, value in enumerate((20, 3, 7, "null", 10)):
        sweep.add(1.0 + number, f"save_every={value}")
    labels = sweep.pictures()["sweep"].axes[0].get_xticklabels()
    assert [label.get_text() for label in labels] == ["3", "7", "10", "20", "null"]


def test_a_sweep_over_numbers_is_drawn_as_lines_with_bands(sweep):
    for lr, seconds in ((0.3, 3.0), (0.01, 1.0), (0.1, 2.0)):
        for seed in (0, 1):
            sweep.add(seconds + 0.2 * seed, f"optimizer.lr={lr}", f"seed={seed}")
    quality, time = sweep.pictures()["sweep"].axes
    assert lines(quality) == [[(0.01, pytest.approx(0.11)), (0.1, pytest.approx(0.21)), (0.3, pytest.approx(0.31))]]
    band = {float(x): float(y) for x, y in quality.collections[0].get_paths()[0].vertices}  # pyright: ignore
    assert abs(band[0.1] - 0.21) == pytest.approx(0.02 / math.sqrt(2))
    assert [y for _, y in lines(time)[0]] == [pytest.approx(y) for y in (1.1, 2.1, 3.1)]
    assert (quality.get_xlabel(), quality.get_ylabel()) == ("optimizer.lr", "best eval/accuracy")
    assert (quality.get_xscale(), time.get_ylim()[0]) == ("log", 0)
    assert [label.get_text() for label in quality.get_xticklabels()] == ["0.01", "0.1", "0.3"]


def test_a_sweep_over_two_keys_is_drawn_over_each_with_colors_for_the_other_and_as_a_heat_map(sweep):
    for precision, lr in itertools.product(("'32'", "bf16", "'64'"), (0.1, 0.2)):
        if (precision, lr) != ("'64'", 0.2):
            sweep.add(10 * lr, f"optimizer.lr={lr}", f"precision={precision}")
    figures = sweep.pictures()
    panels = {axes.get_xlabel(): axes for axes in figures["sweep"].axes}
    assert [label.get_text() for label in panels["precision"].get_xticklabels()] == ["32", "bf16", "64"]
    heights = [patch.get_height() for patch in panels["precision"].patches if patch.get_height()]  # pyright: ignore
    assert heights == [pytest.approx(0.1)] * 3 + [pytest.approx(0.2)] * 2
    legend = panels["precision"].get_legend()
    assert legend is not None
    assert [legend.get_title().get_text(), *(text.get_text() for text in legend.get_texts())] == [
        *("optimizer.lr", "0.1", "0.2")
    ]
    assert lines(panels["optimizer.lr"])[0] == [(0.1, pytest.approx(0.1)), (0.2, pytest.approx(0.2))]
    cells = [text.get_text() for text in figures["heat_map"].axes[0].texts]
    assert cells == ["0.1", "0.2", "0.1", "0.1", "0.2"]


def test_differences_to_the_best_row_have_their_confidence_intervals(sweep):
    accuracies = {0.1: (0.90, 0.92, 0.91), 0.2: (0.80, 0.81, 0.83), 0.3: (0.88, 0.93, 0.89)}
    for lr, values in accuracies.items():
        for seed, accuracy in enumerate(values):
            sweep.add(1.0, f"optimizer.lr={lr}", f"seed={seed}", **evaluation_entries(accuracy, accuracy))
    [axes] = sweep.pictures()["differences"].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["optimizer.lr=0.3", "optimizer.lr=0.2"]
    bars = [segment for each in axes.collections for segment in each.get_segments()]  # pyright: ignore
    for at, (lr, bar) in enumerate(zip((0.3, 0.2), bars, strict=True)):
        theirs = stats.ttest_rel(accuracies[lr], accuracies[0.1])
        assert [tuple(point) for point in bar] == [(pytest.approx(x), at) for x in theirs.confidence_interval(0.95)]


def test_more_than_two_keys_are_drawn_over_each_key(sweep):
    for batch_size, lr, epochs in itertools.product((30, 60), (0.1, 0.2), (1, 2)):
        keys = (f"batch_size={batch_size}", f"optimizer.lr={lr}", f"epochs={epochs}")
        sweep.add(batch_size / 10 + lr + epochs / 20, *keys)
    figures = sweep.pictures()
    assert list(figures) == ["sweep"]
    panels = {axes.get_xlabel(): axes for axes in figures["sweep"].axes}
    assert set(panels) == {"epochs", "batch_size", "optimizer.lr"}
    assert lines(panels["batch_size"]) == [[(30, pytest.approx(0.3225)), (60, pytest.approx(0.6225))]]


def test_learning_curves_are_averaged_over_seeds_and_sessions(sweep):
    for lr, seed in itertools.product((0.1, 0.2, 0.3), (0, 1)):
        directory = sweep.add(1.0 - lr, f"optimizer.lr={lr}", f"seed={seed}")
        log_curve(directory, {5: lr + seed, 10: 0.5, 15: 99.0})
        log_curve(directory, {15: 2 * lr, 20: 0.75}, first_step=11)  # it was resumed from step 10
    figure = sweep.pictures()["curves"]
    [axes] = figure.axes
    assert axes.get_legend_handles_labels()[1] == [f"optimizer.lr={lr}" for lr in (0.1, 0.2, 0.3)]
    assert lines(axes)[1] == [(5, pytest.approx(0.7)), (10, 0.5), (15, pytest.approx(0.4)), (20, 0.75)]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("optimizer steps", "eval/accuracy")


def test_networks_of_several_sizes_are_compared_over_operations(sweep):
    for width, tflops, seconds in ((64, 2.0, 0.5), (128, 8.0, 0.25)):
        for seed in (0, 1):
            speed = {"tflops": tflops * (1 + 0.01 * seed), "step_seconds": {"median": seconds / (1 + 0.01 * seed)}}
            log_curve(sweep.add(0.5, f"optimizer.lr={width}", f"seed={seed}", **speed), {10: 0.4, 20: 0.6 + seed})
    figures = sweep.pictures()
    assert {"curves", "compute"} <= figures.keys()
    [axes] = figures["compute"].axes
    assert axes.get_xlabel() == "TFLOP of training"
    assert sorted(lines(axes)) == [
        [(10, pytest.approx(0.4)), (20, pytest.approx(1.1))],
        [(20, pytest.approx(0.4)), (40, pytest.approx(1.1))],
    ]


def test_the_training_metric_is_drawn_if_the_metric_was_evaluated_only_once(sweep):
    directory = sweep.add(1.0)
    log_curve(directory, {9: 0.5})
    log_curve(directory, {3: 0.1, 6: 0.2, 9: 0.4}, tag="train/accuracy")
    figures = sweep.pictures()
    assert list(figures) == ["curves"]
    assert figures["curves"].axes[0].get_ylabel() == "train/accuracy"


def test_pictures_replace_those_of_an_earlier_call(sweep, capsys):
    sweep.add(3.0, "workload=resnet50")
    out = sweep.path / "plots"
    assert plot.main([str(sweep.path)]) == 0
    assert capsys.readouterr().out.startswith("nothing is drawn")
    assert not out.exists(), "no empty directory"
    sweep.add(4.0, "workload=resnet50", "optimizer.lr=0.5")
    assert plot.main([str(sweep.path)]) == 0
    assert [path.name for path in out.iterdir()] == ["sweep.png"]
    (out / "notes.txt").write_text("mine")
    shutil.rmtree(sweep.path / "002-job")
    add_modes(sweep)
    capsys.readouterr()
    assert plot.main([str(sweep.path)]) == 0
    names = ["modes.png", "modes_and_pipeline.png", "split_size.png"]
    assert capsys.readouterr().out.splitlines() == [str(out / name) for name in names]
    assert {path.name for path in out.iterdir()} == {*names, "notes.txt"}
    for name in names:
        assert numpy.asarray(Image.open(out / name)).std() > 10, "not a blank sheet"


def test_links_and_files_of_other_programs_are_not_replaced(sweep, tmp_path):
    for mode in ("single", "model"):
        sweep.add(1.0, f"parallel={mode}")
    out, elsewhere = sweep.path / "plots", tmp_path / "elsewhere"
    assert plot.main([str(sweep.path)]) == 0
    [picture] = out.iterdir()
    before = picture.read_bytes()
    picture.rename(elsewhere)
    picture.symlink_to(elsewhere)
    assert plot.main([str(sweep.path)]) == 2
    picture.unlink()
    picture.write_text("mine")
    assert plot.main([str(sweep.path)]) == 2
    assert picture.read_text() == "mine"
    picture.unlink()
    out.rename(tmp_path / "folder")
    out.symlink_to(tmp_path / "folder")
    assert plot.main([str(sweep.path)]) == 2
    assert elsewhere.read_bytes() == before


def test_several_sweeps_are_plotted_together_in_their_common_directory(tmp_path, monkeypatch):
    for name, mode in (("first", "single"), ("second", "model")):
        Sweep(tmp_path / "name" / name).add(1.0, f"parallel={mode}")
    monkeypatch.chdir(tmp_path)
    assert plot.main(["name/first", str(tmp_path / "name" / "second")]) == 0
    assert (tmp_path / "name" / "plots" / "modes.png").is_file()


@pytest.mark.cases(
    (["crashed"], "PATH: got 'crashed': none of its runs is done\n"),
    (["sweep", "--out", "file"], "--out: got 'file': nothing can be written there (it is not a directory)\n"),
)
def test_what_cannot_be_plotted_is_refused(arguments, why, sweep, monkeypatch, capsys):
    monkeypatch.chdir(sweep.path.parent)
    sweep.add(1.0)
    Path("file").write_text("")
    Sweep(Path("crashed")).add(1.0, status="crashed")
    assert plot.main(arguments) == 2
    assert capsys.readouterr().err.startswith(why)
    monkeypatch.setitem(sys.modules, "seaborn", None)  # importing it fails
    assert plot.main(["sweep"]) == 2
    assert capsys.readouterr().err.endswith("pip install seaborn\n")
    assert not (sweep.path / "plots").exists()


NUMBERS = '{"status": "done", "steps": 1, "step_seconds": {"median": 1e999}, "metrics": {"a": "0.5"}}'
BROKEN: dict[str, Callable[[Path], object]] = {
    "bytes": lambda path: path.write_bytes(bytes(range(256))),
    "a list": lambda path: path.write_text("[1, 2]"),
    "YAML of a class": lambda path: path.write_text("!!python/object/apply:os.system [exit]"),
    "nested deeply": lambda path: path.write_text("[" * 100_000),
    "numbers": lambda path: path.write_text(NUMBERS),
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "large": lambda path: (path.touch(), os.truncate(path, 10**10)),
}


def test_damaged_files_do_not_stop_plotting(sweep, capsys):
    for lr in (0.1, 0.2):
        log_curve(sweep.add(2.0, f"optimizer.lr={lr}"), {1: 0.1, 2: 0.2, 3: 0.3})
    names = ("config.yaml", "result.json", "environment.json", "events.out.tfevents.0000000001")
    for name, damage in itertools.product(names, BROKEN.values()):
        broken = sweep.add(9.0, "batch_size=240")
        (broken / name).unlink(missing_ok=True)
        damage(broken / name)
    for number, damage in enumerate(BROKEN.values()):
        (sweep.path / f"{number}").mkdir()
        damage(sweep.path / f"{number}" / "sweep.json")
    assert plot.main([str(sweep.path)]) == 0
    compared = sweep.compare()
    good = [row for row in compared.rows if row.values.get("batch_size") != 240]
    assert {row.values["optimizer.lr"]: row.measures["best"].mean for row in good} == {0.1: 0.2, 0.2: 0.2}
    assert len(lines(pictures(compared)["curves"].axes[0])) >= 2


FORMULA = "$\\frac{$"
HOSTILE = {
    FORMULA: "\\$\\frac{\\$",
    "$" * 60: "\\$\\$",
    "[/red]": "[/red]",
    "\x1b[31mred": "\\x1b[31mred",
    "\ud800": "\\ud800",
}
"""Texts in the files of a run, and how they are drawn: what matplotlib and rich would interpret is escaped."""


def test_special_characters_in_values_keys_and_metrics_are_escaped(sweep, capsys):
    for kind, text in enumerate(HOSTILE):
        for value in (text, "b", 10**400):
            directory = sweep.add(1.0, **evaluation_entries(0.5, 0.5, FORMULA))
            config = {"batch_size": 1, "model": {"_target_": "a.b", text: value}, "kind": kind}
            (directory / "config.yaml").write_text(config_text(config), errors="surrogatepass")
    assert plot.main([str(sweep.path)]) == 0
    assert not {"\x1b", "\ud800"} & set(capsys.readouterr().out)
    texts = []
    for figure in sweep.pictures().values():
        figure.draw_without_rendering()
        texts += [each.get_text() for each in figure.findobj(Text)]  # pyright: ignore[reportAttributeAccessIssue]
    assert all(each.count("$") == each.count("\\$") for each in texts)
    assert not {"\x1b", "\ud800"} & set("".join(texts))
    for drawn in HOSTILE.values():
        assert any(drawn[:10] in each for each in texts)


def test_a_config_that_no_run_can_have_does_not_stop_plotting(sweep):
    for size, value in itertools.product((3, 7), ("many", -3, 10**20, None)):
        directory = sweep.add(1.0, "parallel=pipeline", f"parallel.split_size={size}")
        config = {"batch_size": value, "parallel": {"_target_": "a.b", "split_size": size, "stages": value}}
        (directory / "config.yaml").write_text(config_text(config))
    assert "split_size" in sweep.pictures()
    assert all(STEP_SECONDS in row.measures for row in sweep.compare().rows)
