"""Signals that request a stop: the run finishes its step and saves a checkpoint, from which it can be resumed."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from types import FrameType

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """A context manager in which SIGINT (Ctrl-C), SIGTERM and SIGUSR1 set `received`, which the loop reads each step.

    In the main process, the second Ctrl-C raises `KeyboardInterrupt`; child processes are stopped by the main process.
    A child process starts with these signals blocked, and receives those that are pending on entering the context.
    """

    def __init__(self) -> None:
        self.received = ""
        self._before: dict[signal.Signals, object] = {}
        self._is_main_process = multiprocessing.parent_process() is None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers only there
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
            self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        if self.received:
            log.debug("asked to stop by %s", self.received)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.received and number == signal.SIGINT and self._is_main_process:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        if not self._is_main_process:
            return
        # os.write, as the signal may have interrupted a write of a logger or a file object, which are not reentrant.
        with suppress(OSError):
            message = f"\n{self.received}: finishing the step, then saving; press Ctrl-C to stop at once\n"
            os.write(2, message.encode())
