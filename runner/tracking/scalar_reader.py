"""Reads the scalars of a run from its event files, which may be damaged or written by somebody else."""

from __future__ import annotations

import itertools
import os
from collections.abc import Container, Iterator
from pathlib import Path

from runner.storage.safe_read import open_regular

_LIMIT_BYTES = 500_000_000
"""The maximum total size of the event files of one run, in bytes. Images take most of this space."""
_LIMIT_RECORD_BYTES = 10_000
"""The maximum size of an event with scalars, in bytes. Events with images and texts are larger, and are skipped."""

_MOST_EVENTS = 500_000
"""The maximum number of events that are read from the files of one run. Reading so many takes a few seconds."""


def scalars(directory: Path, tags: Container[str] | None = None) -> dict[str, dict[int, float]]:
    """Return the finite values of scalars by tag and step, in the order of the steps.

    If a resumed session repeated steps of an earlier session, the values of the resumed session are returned. The event
    files may be damaged or written by somebody else, so everything that cannot be read is left out.

    Args:
        directory: a run directory.
        tags: the TensorBoard tags to read, those of them that were logged; None for all.
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
                wanted = tags is None or each.tag in tags
                if wanted and each.HasField("simple_value") and abs(each.simple_value) < 1e30:
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
