"""Tracking with MLflow (`tracking=mlflow`), by default in an SQLite file."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from runner.tracking.remote import RemoteTracker

_LONGEST = 6000
"""The largest number of characters of a parameter value in MLflow; longer values are cut."""


@dataclass
class MLflow(RemoteTracker):
    """A tracker that logs to MLflow: scalars as metrics, the config as parameters, images and texts as artifacts.

    https://mlflow.org/docs/latest/ml/tracking/
    """

    package: ClassVar[str] = "mlflow"
    destinations: ClassVar[tuple[str, ...]] = ("uri",)

    uri: str = "sqlite:///outputs/mlflow.db"
    experiment: str = "runner"

    def start(self, directory: Path, identifier: str) -> str:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        artifacts = None
        if self.uri.startswith("sqlite:///"):  # beside the file, not in the working directory
            folder = Path(self.uri.removeprefix("sqlite:///")).resolve().parent
            folder.mkdir(parents=True, exist_ok=True)
            artifacts = (folder / "mlflow_artifacts").as_uri()
        self._client: Any = MlflowClient(tracking_uri=self.uri)
        if identifier:
            self._run = identifier
            self._client.update_run(self._run, status="RUNNING")
            return self._run
        experiment = self._client.get_experiment_by_name(self.experiment)
        if experiment is None:
            try:
                self._client.create_experiment(self.experiment, artifacts)
            except Exception:  # another run may have created it in the meantime
                if self._client.get_experiment_by_name(self.experiment) is None:
                    raise
            experiment = self._client.get_experiment_by_name(self.experiment)
        self._run = self._client.create_run(experiment.experiment_id, run_name=directory.name).info.run_id
        return self._run

    def log_scalars(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(1000 * time.time())
        self._client.log_batch(self._run, [Metric(_name(tag), value, now, step) for tag, value in values.items()])

    def log_images(self, images: dict[str, Any], step: int) -> None:
        for tag, pixels in images.items():
            self._client.log_image(self._run, pixels, f"{tag}/step_{step:08d}.png")

    def log_texts(self, texts: dict[str, str]) -> None:
        for tag, text in texts.items():
            self._client.log_text(self._run, text, f"{tag}.txt")

    def log_config(self, config: dict[str, float | str | bool]) -> None:
        known = self._client.get_run(self._run).data.params  # they cannot be changed, and a resumed run logs them again
        for key, value in {_name(key): value for key, value in config.items()}.items():
            if key not in known:
                self._client.log_param(self._run, key, str(value)[:_LONGEST])

    def finish(self, done: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if done else "KILLED")


def _name(key: str) -> str:
    return re.sub(r"[^/\w.\- ]", "_", key)  # MLflow does not allow others, such as `*`
