"""The base class of tracking backends, to which the curves and images of a run are logged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class Tracker:
    """Logs nothing (`tracking=none`). A backend overrides the methods for what it can display.

    It is used on rank 0 only. When a method returns, what it has logged must not be lost if the process is killed.
    A resumed run opens the tracker again with a `first_step`, from which on it logs all steps again.
    """

    def open(self, directory: Path, first_step: int) -> None:
        """Start a session.

        Args:
            directory: the run directory.
            first_step: the next optimizer step.
        """

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Log scalars by tag, after `step` optimizer steps."""

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        """Log by tag RGB images, uint8 [3, height, width], or animations, uint8 [frames, 3, height, width]."""

    def texts(self, texts: dict[str, str], step: int) -> None:
        """Log preformatted texts by tag."""

    def hyperparameters(self, values: dict[str, float | str | bool]) -> None:
        """Log the config of the run, flattened to dotted keys."""

    def flush(self) -> None:
        """Flush to disk; called before a checkpoint, as a run resumed from it does not log earlier steps again."""

    def close(self, done: bool) -> None:
        """End the session.

        Args:
            done: whether the run has reached its last step.
        """
