"""Tracking with MLflow, Trackio and Weights & Biases (`tracking=mlflow`, `trackio`, `wandb`)."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from runner.config.errors import check, check_choice
from runner.config.overrides import LOCATION_KEYS
from runner.storage.files import json_text, write_text
from runner.storage.ledger_file import LEDGER
from runner.storage.run_directory import free_name
from runner.tracking.remote import MAX_IDENTIFIER_BYTES, Background, RemoteTracker
from runner.tracking.wandb_file import has_row, set_aside

if TYPE_CHECKING:
    import numpy
    import torch

log = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.02
"""The time until W&B writes what was logged to its file. By default it is 15 seconds, which a kill would lose."""
_MAX_VALUE = 6000
"""The largest number of characters of a parameter value in MLflow; longer values are cut."""
_MAX_POINTS, _MAX_PARAMS = 1000, 100
"""The largest numbers of points and of parameters in a request to MLflow."""
_PARENT = "mlflow.parentRunId"


def _sweep_name(directory: Path) -> str | None:
    """Return the name of the sweep that a run directory is in."""
    sweep = directory.parent
    return sweep.name if (sweep / LEDGER).is_file() else None


def _array(pixels: torch.Tensor) -> numpy.ndarray:
    return pixels.permute(1, 2, 0).contiguous().numpy()


@dataclass
class MLflow(RemoteTracker):
    """A tracker that logs to MLflow: scalars as metrics, the config as parameters, images and texts as artifacts.

    https://mlflow.org/docs/latest/ml/tracking/
    """

    package: ClassVar[str] = "mlflow"
    destinations: ClassVar[tuple[str, ...]] = ("uri",)

    uri: str = "sqlite:///outputs/mlflow.db"
    experiment: str = "runner"

    def start(self, directory: Path, identifier: str, first_step: int) -> str:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

        artifacts = None
        if self.uri.startswith("sqlite:///"):  # beside the file, not in the working directory
            folder = Path(self.uri.removeprefix("sqlite:///")).resolve().parent
            folder.mkdir(parents=True, exist_ok=True)
            artifacts = (folder / "mlflow_artifacts").as_uri()
        self._client: Any = MlflowClient(tracking_uri=self.uri)
        self._directory, self._first_step, self._status = directory, first_step, "KILLED"
        if identifier:
            self._run = identifier
            self._client.update_run(self._run, status="RUNNING")
            if any(point.step >= first_step for point in self._history()):
                self._begin_another("points cannot be removed")
            return self._run
        with suppress(MlflowException):  # it exists; another run may be creating it just now
            self._client.create_experiment(self.experiment, artifacts)
        experiment = self._client.get_experiment_by_name(self.experiment).experiment_id
        tags = {_PARENT: parent} if (parent := self._sweep_run(experiment)) else {}
        self._run = self._client.create_run(experiment, run_name=directory.name, tags=tags).info.run_id
        return self._run

    def _sweep_run(self, experiment: str) -> str:
        """Return the run of the sweep that the run directory is in, which jobs begin once; empty if there is none."""
        if (name := _sweep_name(self._directory)) is None:
            return ""
        with (self._directory.parent / "mlflow_run.txt").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if not (parent := file.read(MAX_IDENTIFIER_BYTES).strip()):
                parent = self._client.create_run(experiment, run_name=name).info.run_id
                self._client.set_terminated(parent)
                file.write(parent + "\n")
        return parent

    def _history(self) -> Iterator[Any]:
        for key in self._client.get_run(self._run).data.metrics:
            yield from self._client.get_metric_history(self._run, key)

    def _begin_another(self, why: str) -> None:
        """Continue in a new run with the points and artifacts before the first step; the old one becomes its child."""
        old = self._client.get_run(self._run)
        tags = {**old.data.tags, _PARENT: self._run}
        begun = self._client.create_run(old.info.experiment_id, start_time=old.info.start_time, tags=tags).info.run_id
        kept = [point for point in self._history() if point.step < self._first_step]
        for start in range(0, len(kept), _MAX_POINTS):
            self._client.log_batch(begun, kept[start : start + _MAX_POINTS])
        with TemporaryDirectory() as scratch:
            if self._client.list_artifacts(self._run):
                self._client.download_artifacts(self._run, "", scratch)
                for picture in Path(scratch).rglob("step_*.png"):
                    if int(picture.stem.removeprefix("step_")) >= self._first_step:
                        picture.unlink()
                self._client.log_artifacts(begun, scratch)
        self.remember(self._directory, begun)
        if parent := old.data.tags.get(_PARENT):
            self._client.set_tag(begun, _PARENT, parent)
        else:
            self._client.delete_tag(begun, _PARENT)
        self._client.set_tag(self._run, _PARENT, begun)
        self._client.update_run(self._run, status="KILLED", name=f"{old.info.run_name} (superseded)")
        log.info("MLflow: run %s goes on as %s, whose child it is now: %s", self._run, begun, why)
        self._run = begun

    def scalars(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(1000 * time.time())
        self._client.log_batch(
            self._run, [Metric(_mlflow_name(tag), value, now, step) for tag, value in values.items()]
        )

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        for tag, pixels in images.items():
            self._client.log_image(self._run, _array(pixels), f"{tag}/step_{step:08d}.png")

    def texts(self, texts: dict[str, str], step: int) -> None:
        for tag, text in texts.items():
            self._client.log_text(self._run, text, f"{tag}.txt")

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        known = self._client.get_run(self._run).data.params
        logged = {_mlflow_name(key): str(value)[:_MAX_VALUE] for key, value in config.items()}
        changed = [key for key, value in logged.items() if known.get(key, value) != value and not _is_location(key)]
        if changed:
            self._begin_another(f"parameters cannot be changed ({', '.join(changed)})")
            known = {}
        new = [Param(key, value) for key, value in logged.items() if key not in known]
        for start in range(0, len(new), _MAX_PARAMS):
            self._client.log_batch(self._run, params=new[start : start + _MAX_PARAMS])

    def failed(self) -> None:
        self._status = "FAILED"

    def close(self, done: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if done else self._status)


def _is_location(key: str) -> bool:
    """Return whether `key` says only where a run is saved and tracked."""
    return key in LOCATION_KEYS or key.partition(".")[0] == "tracking"


def _mlflow_name(key: str) -> str:
    return re.sub(r"[^/\w.\- ]", "_", key)  # MLflow does not allow others, such as `*`


@dataclass
class Trackio(RemoteTracker):
    """A tracker that logs scalars, images and the config to Trackio, which `trackio show` displays; it has no texts.

    https://huggingface.co/docs/trackio. The environment variable TRACKIO_DIR names the directory of Trackio's files.
    """

    package: ClassVar[str] = "trackio"

    project: str = "runner"

    def __post_init__(self) -> None:
        why = "it is part of a file name"
        check("/" not in self.project and "\\" not in self.project, "project", self.project, why, "project=NAME")

    def start(self, directory: Path, identifier: str, first_step: int) -> str:
        import trackio  # pyright: ignore[reportMissingImports]

        self._trackio: Any = trackio
        if identifier:
            self._set_aside(directory, identifier, first_step)
        # Runs are told apart by their names, and directories of jobs have the same names in each sweep.
        name = identifier or f"{directory.name}-{secrets.token_hex(3)}"
        self._options = {"project": self.project, "name": name, "group": _sweep_name(directory), "resume": "allow"}
        self._options |= {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        with redirect_stdout(sys.stderr):  # it prints, and standard output is for the result of the run
            self._run = trackio.init(**self._options)
        return name

    def _set_aside(self, directory: Path, name: str, first_step: int) -> None:
        """Move the points that this session logs once more from Trackio's database to a file in the run directory."""
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        database = SQLiteStorage.get_project_db_path(self.project)
        if not database.exists():
            return
        with closing(sqlite3.connect(database, timeout=30.0)) as connection, connection:
            of_run = "FROM metrics WHERE run_name = ? AND step >= ?", (name, first_step)
            points = connection.execute(
                f"SELECT step, timestamp, metrics {of_run[0]} ORDER BY id", of_run[1]
            ).fetchall()
            if points:
                path = free_name(directory / "trackio.json", "superseded")
                lines = [{"step": step, "timestamp": then, **json.loads(metrics)} for step, then, metrics in points]
                write_text(path, json_text(lines))
                connection.execute(f"DELETE {of_run[0]}", of_run[1])
                log.info(
                    "Trackio: the points from step %d on, of an earlier session, are now in %s", first_step, path.name
                )

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        self._run.log({tag: self._trackio.Image(_array(pixels)) for tag, pixels in images.items()}, step=step)

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        self._options["config"] = dict(config)
        self._run.config.update(config)

    def flush(self) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()  # the only way to wait until it has saved everything
            self._run = self._trackio.init(**self._options)

    def close(self, done: bool) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


@dataclass
class Wandb(RemoteTracker):
    """A tracker that logs to Weights & Biases, with optimizer steps as the x-axis.

    https://docs.wandb.ai/ref/python/
    """

    package: ClassVar[str] = "wandb"
    destinations: ClassVar[tuple[str, ...]] = ("mode",)

    project: str = "runner"
    mode: str = "offline"

    def __post_init__(self) -> None:
        check_choice(self, "mode", ("offline", "online"))

    def start(self, directory: Path, identifier: str, first_step: int) -> str:
        import wandb  # pyright: ignore[reportMissingImports]

        if os.path.lexists(directory / "wandb" / "settings"):  # perhaps from somebody else; W&B would read it
            raise RuntimeError("wandb/settings in the run directory may say where data is sent: remove it")
        # No symbolic links: W&B would replace those at fixed paths, and in somebody else's run they may lead elsewhere.
        settings = wandb.Settings(
            console="off", silent=True, symlink=False, x_transaction_log_flush_interval=_FLUSH_SECONDS
        )
        self._step: int | None = None  # the last one that was logged after a flush
        for file in sorted(directory.glob(f"wandb/offline-run-*-{identifier}/run-{identifier}.wandb")):
            if set_aside(file, first_step):
                log.info(
                    "W&B: the steps from %d on, of an earlier session, are now in %s", first_step, file.parent.name
                )
        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=self.project,
            id=identifier or None,
            name=directory.name,
            group=_sweep_name(directory),
            dir=str(directory),
            mode=self.mode,
            resume="allow",
            settings=settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def _log(self, values: dict[str, Any], step: int) -> None:
        # Offline, W&B would count the rows of each session from 0. Online, it goes on counting, and refuses numbers
        # that it has had, which a run that is set back logs once more: `step` is the axis of its curves.
        self._step = step
        self._run.log({"step": step, **values}, step=step if self.mode == "offline" else None)

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._log(values, step)

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        self._log({tag: self._wandb.Image(_array(pixels)) for tag, pixels in images.items()}, step)

    def flush(self) -> None:
        if self.mode == "online" or self._step is None:  # online, a server has what was logged
            return
        self._run.log({}, step=self._step, commit=True)  # otherwise, W&B waits for more values of this step
        file, deadline = Path(self._run.settings.sync_file), time.monotonic() + Background.patience
        while not has_row(file, self._step):
            if time.monotonic() > deadline:
                raise TimeoutError(f"W&B has not written step {self._step} to {file.name}")
            time.sleep(_FLUSH_SECONDS)
        self._step = None

    def texts(self, texts: dict[str, str], step: int) -> None:
        self._run.summary.update(texts)

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        self._run.config.update(config, allow_val_change=True)

    def close(self, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)
