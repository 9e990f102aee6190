"""Keeps freed memory in the process. By default, glibc returns large blocks to the operating system at once.

A step of ResNet50 with eight micro-batches of three samples would get 130,000 to 200,000 new pages, filled with zeros.
https://man7.org/linux/man-pages/man3/mallopt.3.html
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""The parameters M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of `mallopt`, from malloc.h."""

_KEPT = 2**30
"""Blocks of at least this size, such as a data set, are returned nevertheless."""

_DEFAULT = 2**25
"""The largest threshold that glibc chooses by itself (DEFAULT_MMAP_THRESHOLD_MAX on 64-bit systems)."""


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """A context in which glibc keeps freed blocks of less than 1 GiB, and at its end returns them.

    With any other C library, and if an environment variable sets the thresholds, this context does nothing.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    _set_thresholds(libc, _KEPT)
    try:
        yield
    finally:
        _set_thresholds(libc, _DEFAULT)
        libc.malloc_trim(0)


def _set_thresholds(libc: ctypes.CDLL, size: int) -> None:
    for parameter in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        if not libc.mallopt(parameter, size):  # older versions refuse more than the largest default
            libc.mallopt(parameter, _DEFAULT)


def _glibc() -> ctypes.CDLL | None:
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys():
        return None
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # on Windows
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") else None
