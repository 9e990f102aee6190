"""`python -m helpers.read_with_workers exit|endless` reads with two workers.

It prints their process ids after the first item.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time

from runner.data.workers import Workers


class Echo:
    """A dataset whose items are their indices, each available after a millisecond."""

    def __getitem__(self, number: int) -> int:
        time.sleep(0.001)
        return number


def main() -> None:
    results = Workers(2).read(Echo(), itertools.count())
    next(results)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    for _ in results:
        if sys.argv[1] == "exit":
            sys.exit(0)


if __name__ == "__main__":
    from helpers.read_with_workers import Echo  # workers do not import the main module

    main()
