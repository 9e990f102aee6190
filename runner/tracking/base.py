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

    A backend overrides the methods for the kinds of data that it can display. Only rank 0 logs to a backend. If the
    process is killed, the data of earlier calls must not be lost; only a `RemoteTracker` may lose data. A resumed run
    calls `open` again, and then logs all steps from `first_step` on, including steps that an earlier session has
    already logged. A method may raise `StorageError` if the disk is full or fails; the run then ends.
    """

    def check(self) -> None:
        """Raise a `ConfigError` if the backend cannot be used; called on every rank before the run begins."""

    def writes_event_files(self) -> bool:
        """Return whether scalars are written to TensorBoard's event files, which a search with `sweep.prune` reads."""
        return False

    def open(self, directory: Path, first_step: int) -> None:
        """Start a session, at the start of a run or when it is resumed, whose first optimizer step is `first_step`."""

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Log the scalars in `values` by tag. `step` is the number of completed optimizer steps."""

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        """Log images and animations.

        Args:
            images: RGB images, uint8 [3, height, width], and animations, uint8 [frames, 3, height, width], by tag, on
                any device.
            step: the number of completed optimizer steps.
        """

    def texts(self, texts: dict[str, str], step: int) -> None:
        """Log preformatted texts by tag, for the optimizer step `step`."""

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        """Log the config of the run, as values by dotted key; `typed` is the part that the user overrode."""

    def flush(self) -> None:
        """Flush to disk everything that was logged, before a checkpoint: a resumed run does not log it again."""

    def close(self, done: bool) -> None:
        """End the session; `done` is whether the run has reached its last step."""
