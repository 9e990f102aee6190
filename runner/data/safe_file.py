"""Safe reading of data set files, which may come from an untrusted source."""

from __future__ import annotations

import os
import stat


def read_regular_file(path: str, limit_bytes: int) -> bytes:
    """Return the content of the file `path`.

    Symbolic links are followed, because data sets often consist of links.

    Args:
        path: path of the file.
        limit_bytes: maximum size of the file in bytes.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is a pipe, a device or a directory, or too large.
    """
    _check_regular(os.stat(path))  # before opening, because that alone may make the driver of a device act
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
