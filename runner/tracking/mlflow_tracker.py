"""Tracking with MLflow (`tracking=mlflow`)."""

from __future__ import annotations

import fcntl
import logging
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from math import isinf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from runner.config.overrides import LOCATION_KEYS
from runner.tracking.remote import MAX_IDENTIFIER_BYTES, RemoteTracker, array, sweep_name

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_MAX_NAME, _MAX_VALUE = 250, 6000
"""The largest numbers of characters of a name and of the value of a parameter in MLflow; longer ones are cut."""
_OTHERS = re.compile(r"[^/\w.\- ]")
"""The characters that MLflow does not allow in names, such as `*`."""
_MAX_POINTS, _MAX_PARAMS = 1000, 100
"""The largest numbers of points and of parameters in a request to MLflow."""
_PARENT = "mlflow.parentRunId"


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
            file = Path(self.uri.removeprefix("sqlite:///")).resolve()
            file.parent.mkdir(parents=True, exist_ok=True)
            artifacts = (file.parent / "mlflow_artifacts").as_uri()
            create_database(file)
        self._client: Any = MlflowClient(tracking_uri=self.uri)
        self._directory, self._first_step = directory, first_step
        self._points: list[Any] = []
        self._tags: dict[str, str] = {}  # by name
        self._has_left_out = False
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
        if (name := sweep_name(self._directory)) is None:
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
        self._log_points(begun, kept)
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
        self._points += [Metric(self._name(tag), value, now, step) for tag, value in values.items() if not isinf(value)]
        infinite = [tag for tag, value in values.items() if isinf(value)]
        if infinite and not self._has_left_out:
            self._has_left_out = True
            log.warning(
                "MLflow has no infinite numbers: they are left out, as that of %s at step %d", infinite[0], step
            )
        if len(self._points) >= _MAX_POINTS:
            self.send()

    def send(self) -> None:
        self._log_points(self._run, self._points)
        self._points = []

    def _log_points(self, run: str, points: list[Any]) -> None:
        for start in range(0, len(points), _MAX_POINTS):
            self._client.log_batch(run, points[start : start + _MAX_POINTS])

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        for tag, pixels in images.items():
            self._client.log_image(self._run, array(pixels), f"{self._name(tag)}/step_{step:08d}.png")

    def texts(self, texts: dict[str, str], step: int) -> None:
        for tag, text in texts.items():
            self._client.log_text(self._run, text, f"{self._name(tag)}.txt")

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        known = self._client.get_run(self._run).data.params
        logged = {self._name(key): str(value)[:_MAX_VALUE] for key, value in config.items()}
        changed = [key for key, value in logged.items() if known.get(key, value) != value and not _is_location(key)]
        if changed:
            self._begin_another(f"parameters cannot be changed ({', '.join(changed)})")
            known = {}
        new = [Param(key, value) for key, value in logged.items() if key not in known]
        for start in range(0, len(new), _MAX_PARAMS):
            self._client.log_batch(self._run, params=new[start : start + _MAX_PARAMS])

    def _name(self, tag: str) -> str:
        """Return the name of a metric, parameter or artifact in MLflow, which allows fewer and shorter ones."""
        parts = _OTHERS.sub("_", tag).split("/")
        name = "/".join(part if part.strip(".") else "_" * max(1, len(part)) for part in parts)
        if self._tags.setdefault(name, tag) != tag or len(name) > _MAX_NAME:
            name = f"{name[: _MAX_NAME - 9]}-{sha256(tag.encode()).hexdigest()[:8]}"
        return name

    def close(self, status: str) -> None:
        ends = {"done": "FINISHED", "stopped": "KILLED"}
        self._client.set_terminated(self._run, ends.get(status, "FAILED"))


def create_database(file: Path) -> None:
    """Have MLflow create an SQLite file, unless it exists, and rename it: after a kill, it could not be opened."""
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    with file.with_name(f"{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            (part := file.with_name(f"{file.name}.part")).unlink(missing_ok=True)
            MlflowClient(tracking_uri=f"sqlite:///{part}").search_experiments()
            part.replace(file)


def _is_location(key: str) -> bool:
    """Return whether `key` says only where a run is saved and tracked."""
    return key in LOCATION_KEYS or key.partition(".")[0] == "tracking"
