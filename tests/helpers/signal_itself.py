"""`python -m helpers.signal_itself PLACE SIGNAL` sends itself a signal whose exception is hard to propagate.

- `exec`: in code that is run by `exec`, as when a dataclass is defined;
- `destructor`: in `__del__`, where Python only prints exceptions.

It prints `cleaned up` in a `finally` block.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from runner.system.signals import run_main

PLACE, NUMBER = sys.argv[1], signal.Signals[sys.argv[2]]


class SignalsInDestructor:
    def __del__(self) -> None:
        os.kill(os.getpid(), NUMBER)


def main() -> int:
    places: dict[str, Any] = {"exec": lambda: os.kill(os.getpid(), NUMBER), "destructor": SignalsInDestructor}
    try:
        exec("place()", {"place": places[PLACE]})
        for _ in range(1000):
            time.sleep(0.1)
    finally:
        print("cleaned up", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
