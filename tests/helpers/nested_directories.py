"""Directories that are nested more deeply than Python's recursive functions can go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def nested(directory: Path, levels: int = 1_050) -> Iterator[Path]:
    """Create `levels` nested directories in `directory`, and yield the innermost one."""
    for _ in range(levels):  # from the inside, because long paths are slow
        os.mkdir(directory / "next")
        if (directory / "d").exists():
            os.rename(directory / "d", directory / "next" / "d")
        os.rename(directory / "next", directory / "d")
    innermost = directory.joinpath(*["d"] * levels)
    try:
        yield innermost
    finally:
        if innermost.exists():
            for file in innermost.iterdir():
                file.unlink()
            for _ in range(levels - 1):  # from the outside, because rmtree is recursive
                os.rename(directory / "d" / "d", directory / "next")
                os.rmdir(directory / "d")
                os.rename(directory / "next", directory / "d")
            os.rmdir(directory / "d")
