"""Tests of whether freed memory stays in the process."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest
from helpers.command import child_environment

from runner.system import freed_memory
from runner.system.freed_memory import freed_memory_kept

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc"
)

_PROGRAM = """
import json, resource
import psutil
from runner.system.freed_memory import freed_memory_kept

def fill(count):
    blocks = [bytearray(b"x") * 2**24 for _ in range(8)]  # 16 MiB each
    for _ in range(count - 1):
        blocks = []
        blocks = [bytearray(b"x") * 2**24 for _ in range(8)]

def faults(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fill(count)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with freed_memory_kept():
    fill(1)
    inside = faults(4)
    kept = psutil.Process().memory_info().rss
returned = psutil.Process().memory_info().rss
print(json.dumps({"inside": inside, "kept": kept, "returned": returned}))
"""


def test_freed_blocks_are_used_again_and_returned_at_the_end() -> None:
    # 128 MiB are 32,768 pages, which four rounds would take four times.
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, env=child_environment()
    )
    found = json.loads(done.stdout)
    assert found["inside"] < 5_000
    assert found["kept"] - found["returned"] > 100 * 2**20


def test_thresholds_are_those_that_glibc_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class OldLibrary:
        """A glibc that refuses thresholds above 32 MiB, as those before 2.35."""

        def mallopt(self, parameter: int, value: int) -> int:
            calls.append((parameter, value))
            return int(value <= 2**25)

        def malloc_trim(self, pad: int) -> int:
            calls.append((0, pad))
            return 1

    monkeypatch.setattr(freed_memory, "_glibc", OldLibrary)
    with freed_memory_kept():
        assert calls == [(-3, 2**30), (-3, 2**25), (-1, 2**30), (-1, 2**25)]
        calls.clear()
    assert calls == [(-3, 2**25), (-1, 2**25), (0, 0)]


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "_glibc", lambda: None)
    with freed_memory_kept():
        pass


def test_settings_are_restored_after_an_error() -> None:
    with pytest.raises(KeyError), freed_memory_kept():
        raise KeyError
