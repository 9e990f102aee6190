"""The contract of a tracking backend: where the curves and pictures of a run go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class Tracker:
    """`tracking=none`: nothing is tracked; a backend overrides what it can show.

    Only rank 0 opens it. What is logged must be safe when a method returns: a run can be killed at any time. A resumed
    run opens it again, and what was logged from `first_step` on is logged once more.
    """

    def open(self, directory: Path, first_step: int) -> None:
        """Begin a session of the run in `directory`, whose next optimizer step is `first_step`."""

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Log a point of the curve of each tag, after `step` optimizer steps."""

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        """Log pictures by tag: RGB images, uint8 [3, height, width], and films, uint8 [frames, 3, height, width]."""

    def texts(self, texts: dict[str, str], step: int) -> None:
        """Log preformatted texts by tag."""

    def hyperparameters(self, values: dict[str, float | str | bool]) -> None:
        """Log the run's config, flattened to dotted keys."""

    def flush(self) -> None:
        """Wait until everything logged so far is on disk: a checkpoint follows, whose resume does not log it again."""

    def close(self, done: bool) -> None:
        """End the session; `done`: the run has reached its last step."""
