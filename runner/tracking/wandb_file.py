"""Reads the file of a W&B run that is tracked offline, and cuts off the steps that a resumed run logs once more.

The file is a LevelDB log of protocol buffers: blocks of 32 KiB with pieces of records, each after a head of 7 bytes.
https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner.storage.files import read_regular, write_bytes
from runner.storage.run_directory import free_name

MAX_BYTES = 1_000_000_000
_BLOCK, _HEAD = 32768, 7
_LAST_PIECES = (1, 4)
"""The kinds of the last piece of a record: the whole record, or its end."""


def set_aside(path: Path, first_step: int) -> bool:
    """Cut off the records from the row of `first_step`, or the first later one, on, and return whether there are any.

    The whole file is kept beside it, as `*.superseded`.
    """
    data = read_regular(path, MAX_BYTES)
    for start, record in _records(data):
        if record.HasField("history") and record.history.step.num >= first_step:
            write_bytes(free_name(path, "superseded"), data)
            write_bytes(path, data[:start])
            return True
    return False


def has_row(path: Path, step: int) -> bool:
    """Return whether the last rows in the file include that of `step`."""
    from wandb.proto.wandb_internal_pb2 import HistoryItem  # pyright: ignore[reportMissingImports]

    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size // _BLOCK - 8) * _BLOCK)
        blocks = iter(lambda: file.read(_BLOCK), b"")
        joined = b"".join(block[_HEAD:] for block in blocks)  # without the head of a piece that continues a record
    return HistoryItem(nested_key=["_step"], value_json=str(step)).SerializeToString() in joined


def _records(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the position of each whole record, and the record."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    position = start = _HEAD  # of the file
    pieces = b""
    while position + _HEAD <= len(data):
        if (left := _BLOCK - position % _BLOCK) < _HEAD:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        start = start if pieces else position
        pieces += data[position + _HEAD : position + _HEAD + length]
        position += _HEAD + length
        if kind in _LAST_PIECES:
            yield start, Record.FromString(pieces)
            pieces = b""
