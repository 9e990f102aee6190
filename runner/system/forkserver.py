"""The fork server: a process without threads that has imported what its children need, and forks them.

Forking this process itself would copy the locks that its threads hold (OpenMP, CUDA, TensorBoard) and may deadlock,
which Python 3.12 warns of; starting each child from nothing would import torch in each (seconds, and 290 MB a process).
The server imports once, while this process goes on; a child is there in a tenth of a second.
"""

from __future__ import annotations

import multiprocessing
import signal

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def start_server(*modules: str) -> None:
    """Have the server import `modules` while this process goes on; nothing where it runs already.

    Its children begin with SIGINT, SIGTERM and SIGUSR1 blocked: a Ctrl-C in the terminal, or a signal to the process
    group, is the run's to answer, not for each of them to die of.
    """
    if METHOD != "forkserver":
        return
    from multiprocessing import forkserver, resource_tracker

    forkserver.set_forkserver_preload(list(modules))
    resource_tracker.ensure_running()  # the server would start it, and that clears the signal mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
