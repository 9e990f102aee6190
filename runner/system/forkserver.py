"""The fork server of `multiprocessing`: a single-threaded process that imports torch, and then forks the children.

Forking the main process could deadlock on locks that its threads hold (OpenMP, CUDA, TensorBoard). Spawning would
import torch in each child: seconds, and 290 MB. A child of the server starts in 0.1 s.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from runner.system.import_path import python_path
from runner.system.signals import STOP_SIGNALS


def start_server(module: str, *modules: str) -> None:
    """Unless the fork server is already running, start it, and let it import the modules in the background.

    Its children start with stop signals blocked: Ctrl-C reaches the whole process group, but only the main process
    should handle it, and then stop the children.
    """
    from multiprocessing import forkserver, resource_tracker, util
    from unittest.mock import patch

    forkserver.set_forkserver_preload(["runner.system.preload", module, *modules])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        util.get_temp_dir()  # a stop signal between its creation and the registration of its removal would leave it
        resource_tracker.ensure_running()  # it unblocks SIGINT and SIGTERM here, and ignores them itself
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        with patch.dict(os.environ, python_path()):  # it must not import another copy of the project
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def server_stopped() -> Iterator[None]:
    """A context manager that stops the fork server at the end, unless the server was running at the beginning.

    Otherwise, `Process.terminate` would not end children of the caller's code: SIGTERM is blocked in those of ours.
    """
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    was_running, preloaded = server._forkserver_pid is not None, server._preload_modules
    method = multiprocessing.get_start_method(allow_none=True)  # None: the caller may still choose it
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)
        server._preload_modules = preloaded
        if not was_running:
            server._stop()


@contextmanager
def without_main_module() -> Iterator[None]:
    """A context manager in which the processes that `multiprocessing` starts do not import this program's main module.

    A script may train at its top level, and each rank or data worker that imports it would begin to train, too.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def become_command() -> None:
    """Make this process, a child of the fork server, a command in the background, which Ctrl-C does not reach."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # it is the main process of its run
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config.pop("tempdir", None)  # a directory of its own, because this process may outlive the parent
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def show_name(name: str) -> None:
    """Let `ps -e` and `top` show the first 15 bytes of `name` for this process, on Linux."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def run_in_child(function: Callable[..., object], *arguments: Any) -> None:
    """Call `function(*arguments)` in a child of the fork server, which prints any error, and wait until it exits."""
    start_server(function.__module__)
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments)
    with without_main_module():
        process.start()
    process.join()
