"""Functions that read the learning curves of runs from their event files, and average the curves over repeats."""

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
"""The maximum total size of the event files of one run, in bytes. Images take most of this space."""
_LIMIT_RECORD_BYTES = 10_000
"""The maximum size of an event with scalars, in bytes. Events with images and texts are larger, and are skipped."""

_MOST_EVENTS = 500_000
"""The maximum number of events that are read from the files of one run. Reading so many takes a few seconds."""

_MOST_RUNS = 120
"""The maximum number of runs whose event files are read. Reading one run takes a few milliseconds."""

_FEWEST_STEPS = 3


@dataclass(frozen=True)
class LearningCurve:
    """A metric over optimizer steps, averaged over the repeats of one setting.

    Args:
        point: the setting, a point of the study.
        steps: the optimizer steps, in ascending order.
        spreads: the mean and the standard deviation over the repeats at each step.
    """

    point: Point
    steps: list[int]
    spreads: list[Spread]


def learning_curves(study: Study) -> tuple[str, list[LearningCurve]]:
    """Return the tag of a metric, and the learning curves of this metric.

    The metric is the metric of the study. If it was logged at fewer than 3 steps, the training metric of the same name
    is used instead or, if that has too few steps as well, the training loss. If none of them has enough steps, for
    example because no run has event files, the tag and the list of curves are empty.
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
    """Return the first points of a study, as many as have at most `_MOST_RUNS` runs in total."""
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
    """Return the finite values of the scalars in `tags` by tag and step. Tags that were not logged are left out.

    If a resumed session repeated steps of an earlier session, the values of the resumed session are returned. The event
    files may be damaged or written by somebody else, so everything that cannot be read is left out.

    Args:
        directory: a run directory.
        tags: the TensorBoard tags to read.
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
    """Yield the records of an event file, but skip records that are so long that they must contain images or texts.

    TensorBoard's own reader is not used: it takes seconds for each image, because it computes checksums in Python.

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
