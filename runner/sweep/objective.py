"""The objective of a search: the metric by which trials are compared when jobs have ended and while they run."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any, NamedTuple

from runner.config.errors import ConfigError, did_you_mean
from runner.tracking.event_file import EventReader


class Objective(NamedTuple):
    """The metric by which a search compares its trials.

    Args:
        tag: the TensorBoard tag of the metric.
        goal: `min` if smaller values are better, `max` if larger values are better.
        best: True to compare the best values of the jobs; False to compare their last values.
    """

    tag: str
    goal: str
    best: bool

    def value(self, result: dict[str, Any]) -> float:
        """Return the value of the metric in the result of a job that is done.

        Raises:
            ConfigError: if the job did not measure the metric.
        """
        measured = {str(tag): value for tag, value in result.get("metrics", {}).items()}
        if self.best and result.get("best", {}).get("metric") == self.tag:
            return self._number(result["best"].get("value"))
        if self.tag in measured:
            return self._number(measured[self.tag])
        if not measured:
            remedy = "see result.json in the run directories of the jobs"
            raise ConfigError("sweep.metric", self.tag, "the jobs measure no metrics", remedy)
        why = f"the jobs do not measure it, but {', '.join(sorted(measured))};"
        raise ConfigError("sweep.metric", self.tag, why, did_you_mean(self.tag, measured))

    def _number(self, value: object) -> float:
        try:
            return float(value) if isinstance(value, int | float) else float("")
        except (ValueError, OverflowError):
            why = f"its value in the result of a job is not a number, but {reprlib.repr(value)}"
            raise ConfigError("sweep.metric", self.tag, why, "remove the directory of this job") from None


class Curve:
    """The values of a metric after each evaluation of a job, read from its event files while the job still runs.

    Args:
        directory: the run directory of the job.
        tag: the TensorBoard tag of the metric.
    """

    def __init__(self, directory: Path, tag: str):
        self._events, self._tag = EventReader(directory, [tag]), tag

    def read(self) -> list[float]:
        """Return the values of all evaluations so far, in the order of their steps."""
        return [value for _, value in sorted(self._events.read().get(self._tag, {}).items())]
