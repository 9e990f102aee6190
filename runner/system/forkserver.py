"""The fork server of `multiprocessing`: a single-threaded process that has imported torch, and forks the children.

Forking the main process would copy locks that its threads hold (OpenMP, CUDA, TensorBoard) and could deadlock, of which
Python 3.12 warns. Spawning would import torch in each child, which takes seconds and 290 MB per process. The server
imports torch once, in parallel with the main process; a child then starts in 0.1 s.
"""

from __future__ import annotations

import multiprocessing
import signal

from runner.system.signals import STOP_SIGNALS

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def start_server(*modules: str) -> None:
    """Start the server, if it is not running, and let it import `modules` in the background.

    Its children start with stop signals blocked: the terminal sends Ctrl-C to the whole process group, but only the
    main process should handle it, and stop the children.
    """
    if METHOD != "forkserver":
        return
    from multiprocessing import forkserver, resource_tracker

    forkserver.set_forkserver_preload(list(modules))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # it unblocks SIGINT and SIGTERM here, and ignores them itself
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
