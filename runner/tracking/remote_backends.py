"""Tracking with MLflow, Trackio and Weights & Biases (`tracking=mlflow`, `trackio`, `wandb`)."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import sqlite3
import sys
import threading
import time
from contextlib import closing, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TextIO

from runner.config.errors import check
from runner.storage.files import json_text, write_text
from runner.storage.run_directory import free_name
from runner.tracking.mlflow_tracker import MLflow as MLflow  # where saved configs look for it
from runner.tracking.remote import Background, RemoteTracker, array, sweep_name
from runner.tracking.wandb_file import has_row, set_aside

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.02
"""The time until W&B writes what was logged to its file. By default it is 15 seconds, which a kill would lose."""


class _Output:
    """Standard output, but what this thread writes goes to `target`, or nowhere: it is for the result of the run."""

    def __init__(self, target: TextIO | None):
        self._thread, self._target, self._stdout = threading.get_ident(), target, sys.stdout

    def write(self, text: str) -> None:
        stream = self._target if threading.get_ident() == self._thread else self._stdout
        if stream is not None:
            stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)


def _prints_go_to(target: TextIO | None) -> redirect_stdout[Any]:
    output: Any = _Output(target)
    return redirect_stdout(output)


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
        self._options = {"project": self.project, "name": name, "group": sweep_name(directory), "resume": "allow"}
        self._options |= {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        with _prints_go_to(sys.stderr):
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
        self._run.log({tag: self._trackio.Image(array(pixels)) for tag, pixels in images.items()}, step=step)

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        self._options["config"] = dict(config)
        self._run.config.update(config)

    def flush(self) -> None:
        with _prints_go_to(None):
            self._run.finish()  # the only way to wait until it has saved everything
            self._run = self._trackio.init(**self._options)

    def close(self, status: str) -> None:
        with _prints_go_to(sys.stderr):
            self._run.finish()


@dataclass
class Wandb(RemoteTracker):
    """A tracker that logs to Weights & Biases, with optimizer steps as the x-axis.

    https://docs.wandb.ai/ref/python/
    """

    package: ClassVar[str] = "wandb"
    destinations: ClassVar[tuple[str, ...]] = ("mode",)

    project: str = "runner"
    mode: Literal["offline", "online"] = "offline"

    def check(self) -> None:
        super().check()
        installed = version(self.package)
        is_new = tuple(map(int, re.findall("[0-9]+", installed)[:2])) >= (0, 31)
        why = "offline, it saves what is logged only every 15 seconds, which a run that is killed would lose"
        check(is_new or self.mode == "online", "tracking", f"wandb {installed}", why, "pip install 'wandb>=0.31'")

    def start(self, directory: Path, identifier: str, first_step: int) -> str:
        import wandb  # pyright: ignore[reportMissingImports]

        if os.path.lexists(directory / "wandb" / "settings"):  # perhaps from somebody else; W&B would read it
            raise RuntimeError("wandb/settings in the run directory may say where data is sent: remove it")
        # No symbolic links: W&B would replace those at fixed paths, and in somebody else's run they may lead elsewhere.
        options = {"x_transaction_log_flush_interval": _FLUSH_SECONDS} if self.mode == "offline" else {}
        settings = wandb.Settings(console="off", silent=True, symlink=False, **options)
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
            group=sweep_name(directory),
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
        taken = [tag for tag in values if tag == "step" or tag.startswith("_")]  # W&B has its own meaning for them
        values = {f"logged/{tag}" if tag in taken else tag: value for tag, value in values.items()}
        self._run.log({"step": step, **values}, step=step if self.mode == "offline" else None)

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._log(values, step)

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        self._log({tag: self._wandb.Image(array(pixels)) for tag, pixels in images.items()}, step)

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

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "done" else 1)
