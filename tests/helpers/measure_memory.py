"""`python -m helpers.measure_memory BYTES` measures its memory before, while and after it holds BYTES bytes."""

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


def map_new_pages(size: int) -> mmap.mmap:
    """Map new pages and write to them, so that the memory of this process grows by `size` bytes.

    An allocation on the heap could reuse free memory that this process already has, and the process would not grow.
    """
    block = mmap.mmap(-1, size)
    for _ in range(0, size, mmap.PAGESIZE):  # one page at a time, because the written bytes take memory, too
        block.write(b"x" * mmap.PAGESIZE)
    return block


def resident_bytes() -> int:
    """Resident memory of this process in bytes, from a file that `runner.system.memory` does not read."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_usage() -> dict[str, Any]:
    return {"usage": memory.usage(torch.device("cpu")), "resident": resident_bytes()}


def main() -> None:
    size = int(sys.argv[1])
    gc.disable()
    map_new_pages(size).close()  # allocates beforehand what writing and the first call allocate
    measure_usage()
    memory.reset_peak(torch.device("cpu"))
    before = measure_usage()
    with map_new_pages(size):
        during = measure_usage()
    print(json.dumps({"before": before, "during": during, "after": measure_usage()}))


if __name__ == "__main__":
    main()
