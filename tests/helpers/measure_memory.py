"""`python -m helpers.measure_memory BYTES` measures a process that does nothing but hold so many bytes for a while."""

from __future__ import annotations

import gc
import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import torch

from runner.system import memory


def fresh(size: int) -> mmap.mmap:
    """New pages, written to: what is freed of the heap may be used again without the process growing."""
    block = mmap.mmap(-1, size)
    for _ in range(0, size, mmap.PAGESIZE):  # a page at a time: what is written takes memory, too
        block.write(b"x" * mmap.PAGESIZE)
    return block


def resident() -> int:
    """Bytes of this process in RAM, from another file than the module reads."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measured() -> dict[str, Any]:
    return {"usage": memory.usage(torch.device("cpu")), "resident": resident()}


def main() -> None:
    size = int(sys.argv[1])
    gc.disable()
    fresh(size).close()  # the bytes that are written, and what the first call allocates, are there before
    measured()
    memory.reset_peak(torch.device("cpu"))
    before = measured()
    with fresh(size):
        during = measured()
    print(json.dumps({"before": before, "during": during, "after": measured()}))


if __name__ == "__main__":
    main()
