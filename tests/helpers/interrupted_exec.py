"""A command that Ctrl-C interrupts inside `exec`, as it may while a dataclass is made."""

from __future__ import annotations

import os
import signal
import sys

from runner.system.signals import run_main


def main() -> int:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    exec("interrupt()", {"interrupt": interrupt})
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
