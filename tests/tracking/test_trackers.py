"""Tests of trackers other than TensorBoard: CSV files, several trackers at once, and backends of other packages."""

import csv
import errno
import os
import re
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, prepare_session, train_in
from helpers.events import scalar_curves
from helpers.extras import require
from helpers.rank_functions import sigterm_at

from runner.config.composition import Composer
from runner.config.errors import ConfigError
from runner.run import build_run
from runner.storage.run_directory import StorageError, check_regular
from runner.tracking import csv_file
from runner.tracking.base import Tracker
from runner.tracking.csv_file import CsvFile
from runner.tracking.recorder import Recorder
from runner.tracking.remote import Background, RemoteTracker
from runner.tracking.remote_backends import Wandb

STEPS = ("steps=6", "log_every=1", "eval_every=3", "save_every=2")


def points(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points (step, value) of every curve in the CSV file of a run directory, by tag."""
    with (directory / "curves.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "tag", "value"]
    found: dict[str, list[tuple[int, float]]] = {}
    for step, tag, value in rows:
        found.setdefault(tag, []).append((int(step), float(value)))
    return found


def test_several_trackers_with_one_of_the_users_get_every_point_once_across_a_resume(tmp_path):
    (tmp_path / "tracking").mkdir()
    (tmp_path / "tracking" / "mine.yaml").write_text("defaults: [csv, _self_]\n")
    config, run = (
        Composer(str(tmp_path)).run([*TINY_CPU, *STEPS, "tracking=[tensorboard,mine]"]).config,
        tmp_path / "run",
    )
    train_in(run, build_run(config), partial(sigterm_at, 3, 0))
    with (run / "curves.csv").open("a") as file:
        file.write("4,train/loss,1.0\n5,train/lo")  # points after the last checkpoint; the last line is incomplete
    train_in(run, build_run(config))
    got, wanted = points(run), scalar_curves(run)
    assert got.keys() == wanted.keys()
    for tag, values in wanted.items():
        assert [step for step, _ in got[tag]] == [step for step, _ in values]
        assert [value for _, value in got[tag]] == pytest.approx([value for _, value in values], rel=1e-6)
    assert [step for step, _ in got["train/loss"]] == [1, 2, 3, 4, 5, 6]


def test_a_resumed_run_leaves_out_incomplete_lines_of_its_csv_file(tmp_path):
    others = [b"\xff", "²,a,1".encode(), b"9" * 5000 + b",a,1", b"4,a,1"]
    lines = [b"step,tag,value", b"1,a,0.5", *others, b'3,"b,c",0.25', b"3,to"]
    (tmp_path / "curves.csv").write_bytes(b"\r\n".join(lines))
    tracker = CsvFile()
    tracker.open(tmp_path, 4)
    tracker.scalars({"a": 0.125}, 4)
    tracker.close(True)
    assert points(tmp_path) == {"a": [(1, 0.5), (4, 0.125)], "b,c": [(3, 0.25)]}


def test_a_csv_file_that_cannot_be_continued_or_written_is_a_storage_error(tmp_path, monkeypatch):
    file = tmp_path / "curves.csv"
    with file.open("wb") as large:
        large.truncate(30 << 30)  # takes no space on the disk
    monkeypatch.setattr(csv_file, "MAX_BYTES", 5_000_000)  # to save time
    with pytest.raises(StorageError, match="more than 5,000,000 bytes"):
        CsvFile().open(tmp_path, 4)
    file.rename(tmp_path / "large.csv")
    file.symlink_to("large.csv")
    with pytest.raises(StorageError, match="a symbolic link"):
        CsvFile().open(tmp_path, 4)
    assert (tmp_path / "large.csv").stat().st_size == 30 << 30
    file.unlink()
    tracker = CsvFile()
    tracker.open(tmp_path, 1)
    os.dup2(os.open("/dev/full", os.O_WRONLY), tracker._out.fileno())
    with pytest.raises(StorageError, match="No space left"):
        tracker.scalars({"train/loss": 1.0}, 1)
    tracker.close(False)


@pytest.mark.cases(
    (("tracking=several", "tracking.names=[]"), "tracking.names"),
    (("tracking=several", "tracking.names=[csv,tensorbord]"), "tracking.names"),
    (("tracking=several", "tracking.names=[several]"), "tracking.names"),
    (("tracking=several", "+tracking.trackers.wandb.mode=online"), "tracking.trackers"),
    (("tracking=wandb", "tracking.mode=on"), "tracking.mode"),
)
def test_invalid_tracking_options_are_refused(overrides, key):
    with pytest.raises(ConfigError) as refusal:
        build_composed_run(*TINY_CPU, *overrides)
    assert refusal.value.key == key


@pytest.mark.cases(
    ("open", ["open a", "open b", "close a False"]),
    ("close", ["open a", "open b", "open c", "close c True", "close b True", "close a True"]),
)
def test_if_one_of_several_trackers_fails_the_others_are_closed(broken, noted, tmp_path):
    several, notes = Tracker(), []

    def note(method: str, name: str, *values: Any) -> None:
        notes.append(" ".join([method, name, *(str(value) for value in values if isinstance(value, bool))]))
        if (method, name) == (broken, "b"):
            raise OSError(errno.ENOSPC, "No space left on device")

    backends = [SimpleNamespace(open=partial(note, "open", n), close=partial(note, "close", n)) for n in "abc"]
    several.backends = lambda: backends
    with pytest.raises(OSError, match="No space left"), Recorder(several, tmp_path, 0) as recorder:
        recorder.finish()
    assert notes == noted


@dataclass
class Noted(RemoteTracker):
    """A backend that records the calls of its methods. The method whose name is in `broken` raises an error."""

    package: ClassVar[str] = "torch"
    broken: str = ""

    def __post_init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def _note(self, name: str, *values: Any) -> None:
        self.may_go_on.wait()
        self.calls.append((name, *values))
        if name == self.broken:
            raise ConnectionError("no route to host")

    def start(self, directory: Path, identifier: str) -> str:
        self._note("start", identifier)
        return identifier or "id7"

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._note("scalars", values, step)

    def images(self, images: dict[str, Any], step: int) -> None:
        self._note("images", list(images), step)

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        self._note("config", config)

    def close(self, done: bool) -> None:
        self._note("finish", done)


def use(noted: Noted, directory: Path) -> None:
    """Run a session of a few calls."""
    [tracker] = noted.backends()
    tracker.open(directory, 1)
    tracker.hyperparameters({"seed": 0}, {})
    for step in (1, 2):
        tracker.scalars({"train/loss": 0.5}, step)
    tracker.images({"still": torch.zeros(3, 2, 2), "film": torch.zeros(4, 3, 2, 2)}, 2)
    tracker.close(True)


def test_calls_are_made_in_order_and_a_resumed_run_continues_the_same_one(tmp_path):
    first, second = Noted(), Noted()
    use(first, tmp_path)
    use(second, tmp_path)
    scalars = [("scalars", {"train/loss": 0.5}, step) for step in (1, 2)]
    rest = [("config", {"seed": 0}), *scalars, ("images", ["still"], 2), ("finish", True)]
    assert first.calls == [("start", ""), *rest]
    assert second.calls == [("start", "id7"), *rest]


def test_an_identifier_that_is_far_too_large_ends_the_tracking(tmp_path, caplog):
    with (tmp_path / "torch_run.txt").open("wb") as file:
        file.truncate(30 << 30)  # takes no space on the disk
    tracker = Noted()
    use(tracker, tmp_path)
    assert [bool(re.search(r"it has more than 1[0,]+ bytes", text)) for text in caplog.messages] == [True]
    assert tracker.calls == []


@pytest.mark.cases(
    ("start", []),
    ("scalars", ["config", "scalars", "finish"]),
    ("finish", ["config", "scalars", "scalars", "images", "finish"]),
)
def test_a_failure_of_a_backend_is_reported_once_and_ends_the_tracking(broken, made, tmp_path, caplog):
    tracker = Noted(broken)
    use(tracker, tmp_path)
    assert ["ConnectionError: no route to host" in text for text in caplog.messages] == [True]
    assert [call[0] for call in tracker.calls] == ["start", *made], "a session that was begun is ended"


def test_a_backend_that_hangs_does_not_slow_the_training(tmp_path, monkeypatch, caplog):
    tracker = Noted()
    tracker.may_go_on.clear()
    monkeypatch.setattr(Background, "patience", 0.01)
    use(tracker, tmp_path)
    assert (tracker.calls, len(caplog.records)) == ([], 1)
    tracker.may_go_on.set()


def test_a_run_completes_if_its_tracker_fails(tmp_path):
    run = build_composed_run(*TINY_CPU, *STEPS)
    object.__setattr__(run, "tracking", Noted("scalars"))
    assert train_in(tmp_path, run).result.status == "done"


def test_a_package_that_is_not_installed_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr("runner.tracking.remote.is_installed", lambda name: False)
    for package in ("wandb", "mlflow", "trackio"):
        with pytest.raises(ConfigError) as refusal:
            prepare_session(build_composed_run(*TINY_CPU, f"tracking=[csv,{package}]"))
        assert (refusal.value.key, refusal.value.got) == ("tracking", package)
        assert f"pip install {package}" in refusal.value.remedy


@pytest.mark.filterwarnings("default")
def test_mlflow_has_every_point_in_one_run(tmp_path):
    mlflow = require("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    groups = "optimizer.groups={*.bias:{lr:0.1}}"
    overrides = (*TINY_CPU, *STEPS, "tracking=mlflow", f"tracking.uri={uri}", groups)
    train_in(tmp_path / "run", build_composed_run(*overrides), partial(sigterm_at, 3, 0))
    result = train_in(tmp_path / "run", build_composed_run(*overrides)).result
    client = mlflow.MlflowClient(tracking_uri=uri)
    [run] = client.search_runs([client.get_experiment_by_name("runner").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer.lr"] == "0.05"
    assert run.data.params["optimizer.groups._.bias.lr"] == "0.1", "MLflow allows no * in names"
    assert run.data.metrics["lr/_.bias"] > 0
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert {point.step for point in history} == {1, 2, 3, 4, 5, 6}
    assert {item.path for item in client.list_artifacts(run.info.run_id)} == {
        *("eval", "config.txt", "environment.txt", "network.txt")
    }
    assert run.info.artifact_uri.startswith(f"file://{tmp_path}/mlflow_artifacts/")
    assert run.data.metrics["eval/accuracy"] == pytest.approx(result.metrics["eval/accuracy"])


def test_wandb_creates_no_links_and_refuses_settings_in_the_run_directory(tmp_path, monkeypatch):
    asked: dict[str, Any] = {}
    package: Any = ModuleType("wandb")
    package.Settings = lambda **options: options
    run = SimpleNamespace(id="x", define_metric=lambda *_, **__: None)
    package.init = lambda **options: asked.update(options) or run
    monkeypatch.setitem(sys.modules, "wandb", package)
    assert Wandb().start(tmp_path, "") == "x"
    assert (asked["settings"]["symlink"], asked["mode"], asked["dir"]) == (False, "offline", str(tmp_path))
    asked.clear()
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = https://elsewhere.invalid\n")
    with pytest.raises(RuntimeError, match="wandb/settings"):
        Wandb().start(tmp_path, "")
    assert asked == {}


@pytest.mark.filterwarnings("default")
def test_wandb_writes_to_the_run_directory_and_resumes_the_run(tmp_path):
    require("wandb")
    overrides = (*TINY_CPU, *STEPS, "tracking=wandb")
    train_in(tmp_path / "run", build_composed_run(*overrides), partial(sigterm_at, 3, 0))
    identifier = (tmp_path / "run" / "wandb_run.txt").read_text()
    check_regular(tmp_path / "run")  # as `resume=` does
    assert train_in(tmp_path / "run", build_composed_run(*overrides)).result.status == "done"
    assert (tmp_path / "run" / "wandb_run.txt").read_text() == identifier
    files = list((tmp_path / "run").glob(f"wandb/offline-run-*-{identifier.strip()}"))
    assert files


@pytest.mark.filterwarnings("default")
def test_trackio_has_every_point_in_one_run(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    storage = require("trackio.sqlite_storage").SQLiteStorage
    overrides = (*TINY_CPU, *STEPS, "tracking=trackio")
    train_in(tmp_path / "run", build_composed_run(*overrides), partial(sigterm_at, 3, 0))
    train_in(tmp_path / "run", build_composed_run(*overrides))
    name = (tmp_path / "run" / "trackio_run.txt").read_text().strip()
    assert re.fullmatch("run-[0-9a-f]{6}", name), "directories of jobs have the same names in each sweep"
    points = [(each["step"], each["train/loss"]) for each in storage.get_logs("runner", name) if "train/loss" in each]
    assert {step for step, _ in points} == {1, 2, 3, 4, 5, 6}
    assert storage.get_run_config("runner", name)["optimizer.lr"] == 0.05
    assert capfd.readouterr().out == "", "standard output is for the result"
