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


def fresh(size: int) -> mmap.mmap:
    """Map new pages and write to them; memory of the heap could be reused without the process growing."""
    block = mmap.mmap(-1, size)
    for _ in range(0, size, mmap.PAGESIZE):  # one page at a time, because the written bytes take memory, too
        block.write(b"x" * mmap.PAGESIZE)
    return block


def resident() -> int:
    """Resident memory of this process in bytes, from a file that `runner.system.memory` does not read."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measured() -> dict[str, Any]:
    return {"usage": memory.usage(torch.device("cpu")), "resident": resident()}


def main() -> None:
    size = int(sys.argv[1])
    gc.disable()
    fresh(size).close()  # allocates beforehand what writing and the first call allocate
    measured()
    memory.reset_peak(torch.device("cpu"))
    before = measured()
    with fresh(size):
        during = measured()
    print(json.dumps({"before": before, "during": during, "after": measured()}))


if __name__ == "__main__":
    main()
