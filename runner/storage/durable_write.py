"""Writing small files so that after a crash or a power loss either the old or the new content is there, whole."""

from __future__ import annotations

import json
import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`: to a temporary file, which is synced to disk and then renamed.

    Raises:
        OSError: if it cannot be written; the previous content is still there.
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with part.open("x", encoding="utf-8") as file:  # never through a link that has that name
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync(path.parent)


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, in the same way.

    Raises:
        OSError: if it cannot be written; the previous content is still there.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
