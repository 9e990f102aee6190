"""Runs a command that the kernel of Linux kills as soon as its parent process ends.

`python die_with_parent.py PID WORD …`

SLURM and Ray may kill the process that manages a job. The job must then end, too, because nothing would manage it
anymore. This is a separate program, because a `preexec_fn`, which runs between fork and exec, may deadlock if the
parent process has threads, and Ray's workers have many threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2); the setting survives exec


def main() -> None:
    """Replace this process with the command `WORD …`, unless the parent process `PID` has already ended."""
    parent, *words = sys.argv[1:]
    if sys.platform == "linux":  # elsewhere the job runs on
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        raise SystemExit(-signal.SIGKILL)
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
