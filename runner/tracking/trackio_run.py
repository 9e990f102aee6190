"""Tracking with Trackio (`tracking=trackio`), in SQLite files on this machine."""

from __future__ import annotations

import secrets
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from runner.config.errors import check
from runner.tracking.remote import RemoteTracker


@dataclass
class Trackio(RemoteTracker):
    """A tracker that logs scalars, images and the config to Trackio, which `trackio show` displays.

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

    def log_scalars(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def log_images(self, images: dict[str, Any], step: int) -> None:
        self._run.log({tag: self._trackio.Image(pixels) for tag, pixels in images.items()}, step=step)

    def log_texts(self, texts: dict[str, str]) -> None:
        """Log nothing: Trackio saves the config only with the first data, and texts are logged before the config."""

    def log_config(self, config: dict[str, float | str | bool]) -> None:
        self._run.config.update(config)

    def finish(self, done: bool) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()
