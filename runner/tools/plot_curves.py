"""Reads the curves of runs from their event files, and averages them over repeats."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runner.storage.safe_read import open_regular
from runner.tools.plot_runs import Point, Study
from runner.tracking.spread import Spread

_LIMIT_BYTES = 500_000_000
"""Size limit of the event files of one run; pictures take most of it."""
_LIMIT_RECORD_BYTES = 10_000
"""Size limit of an event with scalars; events with pictures and texts are longer."""

_MOST_EVENTS = 500_000
"""The largest number of events that are read of one run: they take some seconds."""

_MOST_RUNS = 120
"""The largest number of runs that are read: each takes some milliseconds."""

_FEWEST_STEPS = 3


@dataclass(frozen=True)
class LearningCurve:
    """A metric over optimizer steps, averaged over the repeats of one setting.

    Args:
        point: the setting.
        steps: the steps, in order.
        spreads: mean and standard deviation of the repeats at each step.
    """

    point: Point
    steps: list[int]
    spreads: list[Spread]


def learning_curves(study: Study) -> tuple[str, list[LearningCurve]]:
    """Return the tag of a metric, and its curves.

    The metric is that of the study or, if it was evaluated at few steps, the training metric of the same name or the
    training loss. If no run has event files, there are no curves.
    """
    metric = study.metric
    wanted = [metric, f"train/{metric.rpartition('/')[2]}", "train/loss"]
    read = {point: [scalars(run.directory, wanted) for run in point.runs] for point in _first_runs(study)}
    longest = {tag: max((len(run.get(tag, {})) for runs in read.values() for run in runs), default=0) for tag in wanted}
    tag = next((tag for tag in wanted if longest[tag] >= _FEWEST_STEPS), "")
    averaged = (
        [_average(point, [run[tag] for run in runs if tag in run]) for point, runs in read.items()] if tag else []
    )
    return tag, [curve for curve in averaged if curve.steps]


def _first_runs(study: Study) -> list[Point]:
    """Return the first points of a study, as many as have no more runs than can be read in some seconds."""
    points, count = [], 0
    for point in study.points:
        count += len(point.runs)
        if count <= _MOST_RUNS:
            points.append(point)
    return points


def _average(point: Point, runs: list[dict[int, float]]) -> LearningCurve:
    steps = sorted({step for run in runs for step in run})
    return LearningCurve(point, steps, [Spread.of(run[step] for run in runs if step in run) for step in steps])


def scalars(directory: Path, tags: list[str]) -> dict[str, dict[int, float]]:
    """Return the finite values of scalars by tag and step, without tags that were not logged.

    The files may be damaged, or written by somebody else: what cannot be read is left out. A later session replaces the
    steps that it computed again.

    Args:
        directory: a run directory.
        tags: the tags to read.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

    found: dict[str, dict[int, float]] = {}
    paths = sorted(directory.glob("events.out.tfevents.*"))
    try:
        if sum(path.stat().st_size for path in paths) > _LIMIT_BYTES:
            return {}
        records = itertools.chain.from_iterable(map(_records, paths))
        for record in itertools.islice(records, _MOST_EVENTS):
            event = Event.FromString(record)
            if event.session_log.status == SessionLog.START:
                for values in found.values():
                    while values and next(reversed(values)) >= event.step:  # the steps of a session are in order
                        values.popitem()
            for each in event.summary.value:
                if each.tag in tags and each.HasField("simple_value") and abs(each.simple_value) < 1e30:
                    found.setdefault(each.tag, {})[event.step] = each.simple_value
    except Exception:  # a damaged file may raise anything
        return {tag: values for tag, values in found.items() if values}
    return {tag: values for tag, values in found.items() if values}


def _records(path: Path) -> Iterator[bytes]:
    """Yield the records of an event file, without those that are as long as pictures.

    TensorBoard's own reader takes seconds for each picture, because it computes all checksums in Python.

    Raises:
        ValueError: if a record is damaged.
        OSError: if the file cannot be read, or is a link or a pipe.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    with open_regular(path) as file:
        while len(head := file.read(12)) == 12:  # the length, and its checksum
            length = int.from_bytes(head[:8], "little")
            if length > _LIMIT_RECORD_BYTES:
                file.seek(length + 4, os.SEEK_CUR)
                continue
            record, checksum = file.read(length), file.read(4)
            if masked_crc32c(record) != int.from_bytes(checksum, "little"):
                raise ValueError(f"a record of {path} is damaged")
            yield record
