"""Asked to stop: finish the step, save, and say that the run can go on."""

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
    """A context in which Ctrl-C, SIGTERM and SIGUSR1 set `received`, for the loop to see between two steps.

    The second Ctrl-C raises `KeyboardInterrupt` at once; not in a process of several that another started and ends.
    Such a process has the signals blocked outside the context: what comes earlier is received as it is entered.
    """

    def __init__(self) -> None:
        self.received = ""
        self._before: dict[signal.Signals, object] = {}
        self._leads = multiprocessing.parent_process() is None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
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
        if self.received and number == signal.SIGINT and self._leads:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        if not self._leads:
            return
        # Straight to the terminal: a logger or a file object may be in the middle of a write of its own.
        with suppress(OSError):
            os.write(2, f"\n{self.received}: finishing the step, then saving; Ctrl-C leaves at once\n".encode())
