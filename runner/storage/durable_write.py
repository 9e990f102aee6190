"""Durable writing of small files: after a crash or power loss, a file has its complete old or complete new content."""

from __future__ import annotations

import json
import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, in the same way as `write_bytes`.

    Raises:
        OSError: as in `write_bytes`.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to a temporary file, flush it to disk, rename it to `path`, and flush the directory.

    Raises:
        OSError: if the file cannot be written (`path` then keeps its previous content), or if the directory cannot be
            flushed (`path` then already has its new content).
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with part.open("xb") as file:  # never through a link that has that name
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync(path.parent)


def write_json(path: Path, value: object) -> None:
    """Write `value` to `path` as JSON, in the same way as `write_text`.

    Raises:
        OSError: as in `write_text`.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sync(path: Path) -> None:
    """Flush the file `path` to disk. If `path` is a directory, flush only its list of entries, not the files in it.

    Raises:
        OSError: if `path` cannot be opened or flushed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
