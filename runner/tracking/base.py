"""The base class of tracking backends, to which the curves and images of a run are logged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class Tracker:
    """A tracker that logs nothing (`tracking=none`), and the base class of tracking backends.

    A backend overrides the methods for everything that it can display. Trackers are used on rank 0 only. What a method
    has logged must not be lost if the process is killed after the method has returned. A resumed run calls `open`
    again, and then logs all steps from `first_step` on, including steps that an earlier session has logged.
    """

    def open(self, directory: Path, first_step: int) -> None:
        """Start a session: the first one of a run, or a new one on each resume.

        Args:
            directory: the run directory.
            first_step: the first optimizer step of the session.
        """

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Log scalars by tag, after `step` optimizer steps."""

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        """Log RGB images, uint8 [3, height, width], and animations, uint8 [frames, 3, height, width], by tag."""

    def texts(self, texts: dict[str, str], step: int) -> None:
        """Log preformatted texts by tag, after `step` optimizer steps."""

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        """Log the config of the run, as values by dotted key.

        Args:
            config: the whole config.
            typed: the values of the keys that the user overrode. All runs of a sweep have the same keys here.
        """

    def flush(self) -> None:
        """Flush to disk everything that was logged.

        The trainer calls this before it saves a checkpoint, because a run that is resumed from the checkpoint does not
        log earlier steps again.
        """

    def close(self, done: bool) -> None:
        """End the session.

        Args:
            done: whether the run has reached its last step.
        """
