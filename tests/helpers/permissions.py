"""File permissions that also apply to root."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_VERSION_3 = 0x20080522
_OVERRIDES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH (see capabilities(7)), with which root ignores permissions."""


@contextmanager
def enforced_permissions(path: Path, bits: int) -> Iterator[Path]:
    """Give `path` the permissions `bits` inside the context, and make this thread obey permissions even as root."""
    before = path.stat().st_mode
    with _without_root_overrides():
        path.chmod(bits)
        try:
            yield path
        finally:
            path.chmod(before)


@contextmanager
def _without_root_overrides() -> Iterator[None]:
    if os.geteuid():
        yield
        return
    if not hasattr(ctypes.CDLL(None), "capset"):
        pytest.skip("root obeys permissions only where capabilities can be dropped, on Linux")
    libc = ctypes.CDLL(None, use_errno=True)
    head, data = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(head, data) == 0, os.strerror(ctypes.get_errno())
    effective = data[0]
    data[0] = effective & ~_OVERRIDES
    assert libc.capset(head, data) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        data[0] = effective
        assert libc.capset(head, data) == 0, os.strerror(ctypes.get_errno())
