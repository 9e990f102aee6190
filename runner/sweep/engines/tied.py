"""Becomes another command, which the kernel kills when the process that started it ends: `python tied.py PID WORD …`.

SLURM and Ray may kill the process that looks after a job; the job must not run on, unknown to all. It is a program of
its own because a function that runs between fork and exec, as `preexec_fn` does, may deadlock where the parent has
threads, and Ray's workers have many.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2); the setting survives exec


def main() -> None:
    """Become the command that the arguments name, unless the process PID, the parent, has ended already."""
    parent, *words = sys.argv[1:]
    if sys.platform == "linux":  # elsewhere the job runs on
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        raise SystemExit(-signal.SIGKILL)
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
