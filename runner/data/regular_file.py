"""Reading the files of a data set, which somebody else may have made."""

from __future__ import annotations

import os
import stat


def read_regular_file(path: str, limit_bytes: int) -> bytes:
    """Return the content of a file. Unlike in a run directory, links are followed: data sets are often made of them.

    Args:
        limit_bytes: maximum size of the file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is a pipe, a device or a directory, or too large.
    """
    _check_regular(os.stat(path))  # before opening, as the driver of a device may act on that
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # does not wait for the writer of a pipe
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)  # another process may have replaced it in between
        _check_regular(status)
        if status.st_size > limit_bytes:
            raise ValueError(f"it has {status.st_size:,} bytes, more than {limit_bytes:,}")
        return file.read(status.st_size)  # in a single read; no more, should it grow


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
