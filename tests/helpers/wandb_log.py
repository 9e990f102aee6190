"""Reads the file of a W&B run that was tracked offline."""

import struct
from pathlib import Path
from typing import Any


def wandb_records(path: Path, record_type: Any) -> list[Any]:
    """Return the records of a LevelDB log: after 7 bytes, blocks of 32 KiB with pieces after heads of 7 bytes each."""
    data = path.read_bytes()
    pieces, found, position = b"", [], 7
    while position < len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        pieces += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            found.append(record_type.FromString(pieces))
            pieces = b""
    return found
