"""Tracking with MLflow, Trackio and Weights & Biases (`tracking=mlflow`, `trackio`, `wandb`)."""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from runner.config.errors import check, check_choice
from runner.tracking.remote import RemoteTracker

if TYPE_CHECKING:
    import numpy
    import torch

_MAX_VALUE = 6000
"""The largest number of characters of a parameter value in MLflow; longer values are cut."""


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

    def start(self, directory: Path, identifier: str) -> str:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

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
        with suppress(MlflowException):  # it exists; another run may be creating it just now
            self._client.create_experiment(self.experiment, artifacts)
        experiment = self._client.get_experiment_by_name(self.experiment)
        self._run = self._client.create_run(experiment.experiment_id, run_name=directory.name).info.run_id
        return self._run

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
        known = self._client.get_run(self._run).data.params  # they cannot be changed, and a resumed run logs them again
        for key, value in {_mlflow_name(key): value for key, value in config.items()}.items():
            if key not in known:
                self._client.log_param(self._run, key, str(value)[:_MAX_VALUE])

    def close(self, done: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if done else "KILLED")


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

    def start(self, directory: Path, identifier: str) -> str:
        import trackio  # pyright: ignore[reportMissingImports]

        self._trackio: Any = trackio
        # Runs are told apart by their names, and directories of jobs have the same names in each sweep.
        name = identifier or f"{directory.name}-{secrets.token_hex(3)}"
        quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        with redirect_stdout(sys.stderr):  # it prints, and standard output is for the result of the run
            self._run = trackio.init(project=self.project, name=name, resume="allow", **quiet)
        return name

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        self._run.log({tag: self._trackio.Image(_array(pixels)) for tag, pixels in images.items()}, step=step)

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        self._run.config.update(config)

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

    def start(self, directory: Path, identifier: str) -> str:
        import wandb  # pyright: ignore[reportMissingImports]

        if os.path.lexists(directory / "wandb" / "settings"):  # perhaps from somebody else; W&B would read it
            raise RuntimeError("wandb/settings in the run directory may say where data is sent: remove it")
        # No symbolic links: W&B would replace those at fixed paths, and in somebody else's run they may lead elsewhere.
        settings = wandb.Settings(console="off", silent=True, symlink=False)
        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=self.project,
            id=identifier or None,
            name=directory.name,
            dir=str(directory),
            mode=self.mode,
            resume="allow",
            settings=settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._run.log({"step": step, **values})

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        self._run.log({"step": step} | {tag: self._wandb.Image(_array(pixels)) for tag, pixels in images.items()})

    def texts(self, texts: dict[str, str], step: int) -> None:
        self._run.summary.update(texts)

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        self._run.config.update(config, allow_val_change=True)

    def close(self, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)
