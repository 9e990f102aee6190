"""Tracking with several backends at once (`tracking=several`)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.errors import ConfigError, check, did_you_mean
from runner.config.schema import build
from runner.tracking.base import Tracker

if TYPE_CHECKING:
    import torch


@dataclass
class MultiTracker(Tracker):
    """A tracker that passes everything to several other trackers, in turn.

    Args:
        names: the options of the config group `tracking` to combine, each with its defaults.
        trackers: the content of each of these options, by name; composed from `names`.
    """

    names: list[str] = field(default_factory=lambda: ["tensorboard", "csv"])
    trackers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(len(self.names) > 0, "names", self.names, "it is empty", "tracking=none tracks nothing")
        check(len(set(self.names)) == len(self.names), "names", self.names, "a name is there twice", "leave one out")
        for name in self.names:
            if name not in self.trackers:
                raise ConfigError("names", name, "there is no such tracker;", did_you_mean(name, self.trackers))
        self._trackers = [build(self.trackers[name], Tracker, f"trackers.{name}") for name in self.names]

    @classmethod
    def untrusted_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the replacement of the trackers of a saved config: they are composed from their names again."""
        return {"trackers": {}}

    def check(self) -> None:
        self._each("check")

    def writes_event_files(self) -> bool:
        return any(tracker.writes_event_files() for tracker in self._trackers)

    def open(self, directory: Path, first_step: int) -> None:
        with ExitStack() as opened:  # if one cannot be opened, those before it are closed
            for tracker in self._trackers:
                tracker.open(directory, first_step)
                opened.callback(tracker.close, False)
            opened.pop_all()

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._each("scalars", values, step)

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        self._each("images", images, step)

    def texts(self, texts: dict[str, str], step: int) -> None:
        self._each("texts", texts, step)

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        self._each("hyperparameters", config, typed)

    def flush(self) -> None:
        self._each("flush")

    def close(self, done: bool) -> None:
        with ExitStack() as closing:  # all of them, even if one raises an error
            for tracker in reversed(self._trackers):
                closing.callback(tracker.close, done)

    def _each(self, method: str, *arguments: Any) -> None:
        for tracker in self._trackers:
            getattr(tracker, method)(*arguments)
