"""Tests of trackers other than TensorBoard: CSV files, several trackers at once, and backends of other packages."""

import csv
import errno
import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
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
from helpers.rank_functions import fail_at, sigkill_at, sigterm_at
from helpers.wandb_log import wandb_records

from runner.config.composition import Composer
from runner.config.errors import ConfigError
from runner.result import CrashedError
from runner.run import build_run
from runner.storage.run_directory import StorageError, check_regular
from runner.tracking import csv_file
from runner.tracking.base import Tracker
from runner.tracking.csv_file import CsvFile
from runner.tracking.mlflow_tracker import create_database
from runner.tracking.recorder import Recorder
from runner.tracking.remote import Background, RemoteTracker
from runner.tracking.remote_backends import MLflow, Wandb

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
    config = Composer(str(tmp_path)).run([*TINY_CPU, *STEPS, "tracking=[tensorboard,mine]"]).config
    run = tmp_path / "run"
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
    tracker.close("done")
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
    tracker.close("stopped")


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


class Several(Tracker):
    """A tracker with these backends."""

    def __init__(self, backends: list[Any]) -> None:
        self._backends = backends

    def backends(self) -> list[Any]:
        return self._backends


@pytest.mark.cases(
    ("open", ["open a", "open b", "close a stopped"]),
    ("close", ["open a", "open b", "open c", "close c done", "close b done", "close a done"]),
)
def test_if_one_of_several_trackers_fails_the_others_are_closed(broken, noted, tmp_path):
    notes: list[str] = []

    def note(method: str, name: str, *values: Any) -> None:
        notes.append(" ".join([method, name, *(str(value) for value in values if isinstance(value, str))]))
        if (method, name) == (broken, "b"):
            raise OSError(errno.ENOSPC, "No space left on device")

    backends = [SimpleNamespace(open=partial(note, "open", n), close=partial(note, "close", n)) for n in "abc"]
    with pytest.raises(OSError, match="No space left"), Recorder(Several(backends), tmp_path, 0) as recorder:
        recorder.finish("done")
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

    def start(self, directory: Path, identifier: str, first_step: int) -> str:
        self._note("start", identifier)
        return identifier or "id7"

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._note("scalars", values, step)

    def images(self, images: dict[str, Any], step: int) -> None:
        self._note("images", list(images), step)

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        self._note("config", config)

    def close(self, status: str) -> None:
        self._note("finish", status)


def use(noted: Noted, directory: Path) -> None:
    """Run a session of a few calls."""
    [tracker] = noted.backends()
    tracker.open(directory, 1)
    tracker.hyperparameters({"seed": 0}, {})
    for step in (1, 2):
        tracker.scalars({"train/loss": 0.5}, step)
    tracker.images({"still": torch.zeros(3, 2, 2), "film": torch.zeros(4, 3, 2, 2)}, 2)
    tracker.close("done")


def test_calls_are_made_in_order_and_a_resumed_run_continues_the_same_one(tmp_path):
    first, second = Noted(), Noted()
    use(first, tmp_path)
    use(second, tmp_path)
    scalars = [("scalars", {"train/loss": 0.5}, step) for step in (1, 2)]
    rest = [("config", {"seed": 0}), *scalars, ("images", ["still"], 2), ("finish", "done")]
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


def test_a_flush_waits_for_the_calls_before_it(tmp_path):
    tracker = Noted()
    tracker.may_go_on.clear()
    [background] = tracker.backends()
    background.open(tmp_path, 1)
    background.scalars({"train/loss": 0.5}, 1)
    threading.Timer(0.2, tracker.may_go_on.set).start()
    background.flush()
    assert tracker.calls == [("start", ""), ("scalars", {"train/loss": 0.5}, 1)]
    background.close("done")


def test_a_server_that_does_not_answer_holds_up_one_checkpoint_for_a_limited_time(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    tracker = Noted()
    [background] = tracker.backends()
    background.open(tmp_path, 1)
    background.flush()
    assert caplog.messages == []
    tracker.may_go_on.clear()
    monkeypatch.setattr(Background, "flush_patience", 0.2)
    begin = time.monotonic()
    for step in range(1, 100):
        background.scalars({"train/loss": 0.5}, step)
        background.flush()
    assert 0.2 <= time.monotonic() - begin < 2
    assert ["torch has not taken what was logged within 0.2 s" in text for text in caplog.messages] == [True]
    monkeypatch.setattr(Background, "flush_patience", 20.0)
    tracker.may_go_on.set()
    while len(caplog.messages) < 2 and time.monotonic() < begin + 60:
        background.flush()
    assert len(tracker.calls) == 100
    assert len(caplog.messages) == 2, "that it answers again is said once"
    background.close("done")


def test_a_backend_that_fails_does_not_hold_up_a_checkpoint(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Background, "flush_patience", 1000.0)
    begin = time.monotonic()
    [background] = Noted("scalars").backends()
    background.open(tmp_path, 1)
    background.scalars({"train/loss": 0.5}, 1)
    background.flush()
    background.flush()
    background.close("done")
    assert time.monotonic() - begin < 500
    assert ["ConnectionError: no route to host" in text for text in caplog.messages] == [True]


@pytest.mark.cases(
    (ValueError("crash"), None, "crashed"),
    (KeyboardInterrupt(), None, "stopped"),
    (None, "diverged", "diverged"),
    (None, "stopped", "stopped"),
    (None, "done", "done"),
)
def test_a_tracker_is_told_how_the_run_ended(error, status, told, tmp_path):
    calls: list[str] = []
    backend = SimpleNamespace(open=lambda *_: None, close=calls.append)
    with suppress(BaseException), Recorder(Several([backend]), tmp_path, 0) as recorder:
        if error:
            raise error
        recorder.finish(status)
    assert calls == [told]


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


def train_until_killed(overrides: tuple[str, ...], directory: Path, step: int) -> None:
    Background.flush_patience = 300.0  # on a busy machine, the start of a tracker takes longer than 20 seconds
    train_in(directory, build_composed_run(*overrides), partial(sigkill_at, step))


def killed_resumed_and_set_back(directory: Path, overrides: tuple[str, ...], logged: Callable[[], list[int]]) -> None:
    """Train sessions of one run: one is killed in step 5, one completes the run, one repeats it after step 2.

    The last one has another learning rate and fewer steps, and evaluates in others. `logged` returns the steps of the
    points that a tracker has of one curve, in order.
    """
    killed = multiprocessing.get_context("spawn").Process(
        target=train_until_killed, args=((*TINY_CPU, *STEPS, *overrides), directory, 5)
    )
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert logged()[:4] == [1, 2, 3, 4], "what the checkpoint of step 4 promises"
    train_in(directory, build_composed_run(*TINY_CPU, *STEPS, *overrides))
    assert logged() == [1, 2, 3, 4, 5, 6]
    for later in directory.glob("checkpoints/step_0000000[3-6]"):  # as `resume=RUN/checkpoints/step_00000002` does
        shutil.rmtree(later)
    other = ("optimizer.lr=0.01", "steps=4", "eval_every=4")
    train_in(directory, build_composed_run(*TINY_CPU, *STEPS, *overrides, *other))
    assert logged() == [1, 2, 3, 4]


def test_wandb_is_refused_if_it_would_lose_what_a_checkpoint_promises(monkeypatch):
    monkeypatch.setattr("runner.tracking.remote.is_installed", lambda name: True)
    for installed, mode in (("0.31.0", "offline"), ("1.0", "offline"), ("0.9", "online"), ("0.30.2", "offline")):
        monkeypatch.setattr("runner.tracking.remote_backends.version", lambda name, installed=installed: installed)
        if installed != "0.30.2":
            Wandb(mode=mode).check()
    with pytest.raises(ConfigError) as refusal:
        Wandb().check()
    assert (refusal.value.key, refusal.value.got) == ("tracking", "wandb 0.30.2")
    assert "wandb>=0.31" in refusal.value.remedy


@pytest.fixture(scope="module")
def empty_mlflow_database(tmp_path_factory) -> Path:
    """An SQLite file with MLflow's tables, made after a process was killed that made it; this takes ten seconds."""
    require("mlflow")
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    with closing(sqlite3.connect(f"{path}.part")) as killed:  # MLflow: "table experiments already exists"
        killed.execute("CREATE TABLE experiments (experiment_id INTEGER)")
    create_database(path)
    return path


@pytest.fixture
def mlflow_client(empty_mlflow_database, tmp_path) -> Any:
    """A client of an MLflow database in `tmp_path`."""
    path = shutil.copy(empty_mlflow_database, tmp_path / "mlflow.db")
    return require("mlflow").MlflowClient(tracking_uri=f"sqlite:///{path}")


def tracked(tracker: RemoteTracker, directory: Path, log: Callable[[Tracker], None]) -> None:
    """Run a session in which `log` logs to the tracker."""
    directory.mkdir()
    [background] = tracker.backends()
    background.open(directory, 1)
    log(background)
    background.close("done")


@pytest.mark.filterwarnings("default")
def test_mlflow_has_names_and_numbers_that_it_does_not_allow(mlflow_client, tmp_path, caplog):
    tags = ["lr/*.bias", "lr/?.bias", "lr/_.bias", "/a", "b//c", "../d", "a" * 300, "a" * 299 + "b", "mAP@50"]

    def log(tracker: Tracker) -> None:
        tracker.hyperparameters({f"groups.{tag}": value for value, tag in enumerate(tags)}, {})
        tracker.scalars({tag: float(value) for value, tag in enumerate(tags)}, 1)
        tracker.scalars({"norm": math.inf, "loss": 0.5}, 1)
        tracker.scalars({"norm": 2.0, "other": -math.inf}, 2)
        tracker.images({"../picture": torch.zeros(3, 2, 2, dtype=torch.uint8)}, 1)
        tracker.texts({"a:b": "text"}, 1)

    tracked(MLflow(uri=mlflow_client.tracking_uri), tmp_path / "run", log)
    [run] = mlflow_client.search_runs([mlflow_client.get_experiment_by_name("runner").experiment_id])
    metrics, params = run.data.metrics, run.data.params
    assert sorted(metrics.values()) == [0, 0.5, 1, 2, 2, *range(3, 9)]
    assert sorted(map(int, params.values())) == list(range(9))
    assert (metrics["lr/_.bias"], metrics["b/_/c"], metrics["mAP_50"], metrics["norm"]) == (0, 4, 8, 2)
    assert [(point.step, point.value) for point in mlflow_client.get_metric_history(run.info.run_id, "norm")] == [
        (2, 2.0)
    ]
    assert {item.path for item in mlflow_client.list_artifacts(run.info.run_id)} == {"__", "a_b.txt"}
    assert caplog.messages == ["MLflow has no infinite numbers: they are left out, as that of norm at step 1"]


@pytest.mark.filterwarnings("default")
def test_mlflow_gets_the_points_of_many_steps_in_few_requests(mlflow_client, tmp_path):
    tracker, may_begin, requests = MLflow(uri=mlflow_client.tracking_uri), threading.Event(), []
    start = tracker.start

    def start_later(directory: Path, identifier: str, first_step: int) -> str:
        may_begin.wait()
        identifier = start(directory, identifier, first_step)
        original = tracker._client.log_batch
        tracker._client.log_batch = lambda *batch: requests.append(batch) or original(*batch)
        return identifier

    tracker.start = start_later

    def log(tracker: Tracker) -> None:
        for step in range(1, 1001):
            tracker.scalars({"a": 1.0 / step, "b": float(step)}, step)
        may_begin.set()
        tracker.flush()

    tracked(tracker, tmp_path / "run", log)
    assert len(requests) <= 4
    [run] = mlflow_client.search_runs([mlflow_client.get_experiment_by_name("runner").experiment_id])
    history = mlflow_client.get_metric_history(run.info.run_id, "a")
    assert sorted((point.step, point.value) for point in history) == [(step, 1.0 / step) for step in range(1, 1001)]


@pytest.mark.filterwarnings("default")
def test_mlflow_has_each_point_once_after_a_kill_and_after_the_run_was_set_back(mlflow_client, tmp_path):
    client, uri = mlflow_client, mlflow_client.tracking_uri

    def current() -> Any:
        experiment = client.get_experiment_by_name("runner").experiment_id
        [run] = [each for each in client.search_runs([experiment]) if "mlflow.parentRunId" not in each.data.tags]
        return run

    def steps(tag: str) -> list[int]:
        return [point.step for point in client.get_metric_history(current().info.run_id, tag)]

    overrides = ("tracking=mlflow", f"tracking.uri={uri}")
    killed_resumed_and_set_back(tmp_path / "run", overrides, lambda: steps("train/loss"))
    run = current()
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert (run.data.params["optimizer.lr"], run.data.params["steps"]) == ("0.01", "4")
    assert run.data.metrics["epoch"] == pytest.approx(4 * 64 / 1438)
    assert steps("eval/accuracy") == [4]
    assert [item.path for item in client.list_artifacts(run.info.run_id, "eval/samples")] == [
        "eval/samples/step_00000004.png"
    ]
    superseded = client.search_runs([run.info.experiment_id], f"tags.mlflow.parentRunId = '{run.info.run_id}'")
    assert [(each.info.run_name, each.data.params["steps"]) for each in superseded] == [("run (superseded)", "6")]
    assert [point.step for point in client.get_metric_history(superseded[0].info.run_id, "eval/loss")] == [3, 6]


@pytest.mark.cases(
    (ValueError(), "FAILED"),
    (None, "KILLED"),
)
@pytest.mark.filterwarnings("default")
def test_mlflow_shows_how_a_run_has_ended(error, status, mlflow_client, tmp_path):
    client, uri = mlflow_client, mlflow_client.tracking_uri
    run = build_composed_run(*TINY_CPU, *STEPS, "tracking=mlflow", f"tracking.uri={uri}")
    with suppress(CrashedError):
        train_in(tmp_path / "run", run, partial(fail_at, 0, 3, error) if error else partial(sigterm_at, 3, 0))
    [run] = client.search_runs([client.get_experiment_by_name("runner").experiment_id])
    assert run.info.status == status


@pytest.mark.filterwarnings("default")
def test_jobs_of_a_sweep_are_children_of_one_run_in_mlflow(mlflow_client, tmp_path):
    (tmp_path / "sweep.json").write_text("{}")
    client, tracker = mlflow_client, MLflow(uri=mlflow_client.tracking_uri)
    jobs = [tracker.start(tmp_path / name, "", 1) for name in ("000", "001")]
    [parent] = {client.get_run(job).data.tags["mlflow.parentRunId"] for job in jobs}
    assert client.get_run(parent).info.run_name == tmp_path.name
    assert client.get_run(parent).info.status == "FINISHED"


@pytest.mark.filterwarnings("default")
def test_mlflow_has_every_point_in_one_run(mlflow_client, tmp_path):
    client, uri = mlflow_client, mlflow_client.tracking_uri
    groups = "optimizer.groups={*.bias:{lr:0.1}}"
    overrides = (*TINY_CPU, *STEPS, "tracking=mlflow", f"tracking.uri={uri}", groups)
    train_in(tmp_path / "run", build_composed_run(*overrides), partial(sigterm_at, 3, 0))
    result = train_in(tmp_path / "run", build_composed_run(*overrides)).result
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
    assert Wandb().start(tmp_path, "", 1) == "x"
    assert (asked["settings"]["symlink"], asked["mode"], asked["dir"]) == (False, "offline", str(tmp_path))
    asked.clear()
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = https://elsewhere.invalid\n")
    with pytest.raises(RuntimeError, match="wandb/settings"):
        Wandb().start(tmp_path, "", 1)
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
def test_wandb_keeps_the_axis_of_a_run_that_logs_a_curve_of_that_name(tmp_path):
    proto = require("wandb.proto.wandb_internal_pb2")
    tracked(Wandb(), tmp_path / "run", lambda tracker: tracker.scalars({"step": 70.0, "_step": 5.0, "loss": 0.5}, 3))
    [file] = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    [row] = [record.history.item for record in wandb_records(file, proto.Record) if record.HasField("history")]
    values = {item.nested_key[0]: json.loads(item.value_json) for item in row}
    wanted = {"_step": 3, "step": 3, "logged/step": 70, "logged/_step": 5, "loss": 0.5}
    assert wanted.items() <= values.items()


@pytest.mark.filterwarnings("default")
def test_wandb_has_each_step_once_after_a_kill_and_after_the_run_was_set_back(tmp_path):
    proto = require("wandb.proto.wandb_internal_pb2")
    directory = tmp_path / "run"

    def rows() -> list[dict[str, Any]]:
        files = sorted(directory.glob("wandb/offline-run-*/*.wandb"))
        records = [record for file in files for record in wandb_records(file, proto.Record)]
        histories = [record.history.item for record in records if record.HasField("history")]
        return [{item.nested_key[0]: json.loads(item.value_json) for item in items} for items in histories]

    killed_resumed_and_set_back(directory, ("tracking=wandb",), lambda: [row["_step"] for row in rows()])
    assert [row["step"] for row in rows()] == [1, 2, 3, 4]
    assert [row["_step"] for row in rows() if "eval/accuracy" in row] == [4]
    assert len({file.stem for file in directory.glob("wandb/offline-run-*/*.wandb")}) == 1, "one run"
    last = max(directory.glob("wandb/offline-run-*/*.wandb"))
    config = [update for record in wandb_records(last, proto.Record) for update in record.config.update]
    assert {"0.01"} == {update.value_json for update in config if "optimizer.lr" in (update.key, *update.nested_key)}


@pytest.fixture(scope="module")
def trackio_storage(tmp_path_factory) -> Iterator[Any]:
    """Trackio's storage, in a directory for all tests, as it reads TRACKIO_DIR only once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        yield require("trackio.sqlite_storage").SQLiteStorage


@pytest.mark.filterwarnings("default")
def test_trackio_has_every_point_in_one_run(trackio_storage, tmp_path, capfd):
    storage = trackio_storage
    overrides = (*TINY_CPU, *STEPS, "tracking=trackio")
    train_in(tmp_path / "run", build_composed_run(*overrides), partial(sigterm_at, 3, 0))
    train_in(tmp_path / "run", build_composed_run(*overrides))
    name = (tmp_path / "run" / "trackio_run.txt").read_text().strip()
    assert re.fullmatch("run-[0-9a-f]{6}", name), "directories of jobs have the same names in each sweep"
    points = [(each["step"], each["train/loss"]) for each in storage.get_logs("runner", name) if "train/loss" in each]
    assert {step for step, _ in points} == {1, 2, 3, 4, 5, 6}
    assert storage.get_run_config("runner", name)["optimizer.lr"] == 0.05
    printed = capfd.readouterr()
    assert printed.out == "", "standard output is for the result"
    assert printed.err.count("Run finished") <= 2 * 2, "checkpoints are silent"


@pytest.mark.filterwarnings("default")
def test_trackio_has_each_point_once_after_a_kill_and_after_the_run_was_set_back(trackio_storage, tmp_path):
    def name() -> str:
        return (tmp_path / "run" / "trackio_run.txt").read_text().strip()

    def points(tag: str) -> list[int]:
        return [each["step"] for each in trackio_storage.get_logs("runner", name()) if tag in each]

    killed_resumed_and_set_back(tmp_path / "run", ("tracking=trackio",), lambda: points("train/loss"))
    assert points("eval/accuracy") == [4]
    assert trackio_storage.get_run_config("runner", name())["optimizer.lr"] == 0.01
    saved = [json.loads(path.read_text()) for path in sorted((tmp_path / "run").glob("trackio.json.superseded*"))]
    assert [each["step"] for each in saved[-1] if "eval/accuracy" in each] == [3, 6]
