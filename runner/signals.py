"""Asked to stop: finish the step, save, and say that the run can go on."""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import suppress
from types import FrameType

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """A context in which Ctrl-C, SIGTERM and SIGUSR1 set `received`, for the loop to see between two steps.

    The second Ctrl-C raises `KeyboardInterrupt` at once.
    """

    def __init__(self) -> None:
        self.received = ""
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        if self.received:
            log.debug("asked to stop by %s", self.received)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        # Straight to the terminal: a logger or a file object may be in the middle of a write of its own.
        with suppress(OSError):
            os.write(2, f"\n{self.received}: finishing the step, then saving; Ctrl-C leaves at once\n".encode())
