"""Tracking with Weights & Biases (`tracking=wandb`), by default offline."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from runner.config.errors import check_choice
from runner.tracking.remote import RemoteTracker


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

    def log_scalars(self, values: dict[str, float], step: int) -> None:
        self._run.log({"step": step, **values})

    def log_images(self, images: dict[str, Any], step: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run.log({"step": step} | {tag: wandb.Image(pixels) for tag, pixels in images.items()})

    def log_texts(self, texts: dict[str, str]) -> None:
        self._run.summary.update(texts)

    def log_config(self, config: dict[str, float | str | bool]) -> None:
        self._run.config.update(config, allow_val_change=True)

    def finish(self, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)
