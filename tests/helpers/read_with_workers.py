"""`python -m helpers.read_with_workers exit|endless|DIRECTORY` reads with two workers.

It prints their process ids after the first item. If a directory with a folder of images per class is named, the items
are batches of its held-out images; otherwise, they are numbers.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time

import torch

from runner.data.imagefolder import ImageFolder
from runner.data.workers import Loader, Workers


class Echo:
    """A dataset whose items are their indices, each available after a millisecond."""

    def __getitem__(self, number: int) -> int:
        time.sleep(0.001)
        return number


def main() -> None:
    if sys.argv[1] in ("exit", "endless"):
        results = Loader(Echo(), Workers(2)).read(itertools.count())
    else:
        _, held_out = ImageFolder(sys.argv[1], workers=2, size=8).load()
        results = held_out.in_order(1, (0, 1), torch.device("cpu"))
    next(results)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    for _ in results:
        if sys.argv[1] == "exit":
            sys.exit(0)
    sys.stdin.readline()


if __name__ == "__main__":
    from helpers.read_with_workers import Echo  # workers do not import the main module

    main()
