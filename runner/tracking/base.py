"""The base class of tracking backends, to which the curves and images of a run are logged, and several at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.errors import check, did_you_mean
from runner.config.schema import build

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

    def backends(self) -> list[Tracker]:
        """Return the trackers to which everything is logged, which for most is this one."""
        return [self]

    def check(self) -> None:
        """Raise a `ConfigError` if the backend cannot be used; called on every rank before the run begins."""

    def open(self, directory: Path, first_step: int) -> None:
        """Start a session, at the start of a run or when it is resumed, whose first optimizer step is `first_step`."""

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Log the scalars in `values` by tag. `step` is the number of completed optimizer steps."""

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        """Log RGB images, uint8 [3, height, width], and animations, uint8 [frames, 3, height, width], by tag.

        They are on any device.
        """

    def texts(self, texts: dict[str, str], step: int) -> None:
        """Log preformatted texts by tag, for the optimizer step `step`."""

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        """Log the config of the run, as values by dotted key; `typed` is the part that the user overrode."""

    def flush(self) -> None:
        """Save everything that was logged, before a checkpoint: a run resumed from it does not log it again."""

    def close(self, status: str) -> None:
        """End the session with the `status` of the run: `done`, `stopped`, `diverged` or `crashed`."""


@dataclass
class MultiTracker(Tracker):
    """Several trackers at once (`tracking=several`).

    Args:
        names: the options of the config group `tracking` to combine, each with its defaults.
        trackers: the content of each of these options, by name; composed from `names`.
    """

    names: list[str] = field(default_factory=lambda: ["tensorboard", "csv"])
    trackers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(bool(self.names), "names", self.names, "it is empty", "tracking=none tracks nothing")
        for name in self.names:
            check(name in self.trackers, "names", name, "there is no such tracker;", did_you_mean(name, self.trackers))
        names = dict.fromkeys(self.names)
        self._trackers = [build(self.trackers[name], Tracker, f"trackers.{name}") for name in names]

    @classmethod
    def untrusted_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the replacement of the trackers of a saved config: they are composed from their names again."""
        return {"trackers": {}}

    def backends(self) -> list[Tracker]:
        return [backend for tracker in self._trackers for backend in tracker.backends()]
