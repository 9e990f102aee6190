"""Tests of whether freed memory stays in the process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from helpers.command import child_environment

from runner.system import freed_memory

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


@pytest.mark.skipif(freed_memory._glibc() is None, reason="the C library is not glibc")
def test_freed_blocks_are_used_again_and_returned_at_the_end() -> None:
    # 128 MiB are 32,768 pages, which four rounds would take four times.
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, env=child_environment()
    )
    found = json.loads(done.stdout)
    assert found["inside"] < 5_000
    assert found["kept"] - found["returned"] > 100 * 2**20
