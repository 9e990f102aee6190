"""Functions that take turns in one thread: each runs until it asks for something, as if it were alone.

What belongs to the process, such as where it prints and logs, is another one for each of them. They are greenlets: a
turn begins and ends within a microsecond, where threads would wait for each other and for the operating system.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TextIO

from runner.system import signals
from runner.system.console import CRASHED, STOPPED
from runner.system.section_timer import SectionTimer, timer

_LOGGERS = ("runner", "py.warnings")

_own_seat: ContextVar[Seat | None] = ContextVar("own_seat", default=None)


class Seat:
    """The place of one function among those that take turns.

    Args:
        number: the number of the function.
        main: the function, which returns an exit code.
        console: the file to which it prints; None: that of the process.
        common: what the functions share, such as data that they only read.

    Attributes:
        request: what the function waits for; None before its first turn, and once it is answered.
        code: the exit code, when the function has returned.
    """

    def __init__(
        self,
        number: int,
        main: Callable[[], int],
        console: TextIO | None = None,
        common: dict[str, Any] | None = None,
    ):
        from greenlet import greenlet  # optional

        self.number, self.common = number, {} if common is None else common
        self.request: Any = None
        self.code: int | None = None
        self._answer: Any = None
        self._requests: list[signals.StopRequest] = []
        self._greenlet, self._main = greenlet(self._run), main
        self._streams: tuple[Any, Any] = (console or sys.stdout, console or sys.stderr)
        self._handlers: list[list[logging.Handler]] = [[] for _ in _LOGGERS]
        self._timer = vars(SectionTimer())

    # For the one that gives turns

    def go_on(self) -> None:
        """Let the function run until it asks for something, or returns."""
        self.exchange()
        self._greenlet.switch()
        self.exchange()

    def answer(self, answer: Any) -> None:
        """Give the function what it has asked for; it gets it in its next turn."""
        self.request, self._answer = None, answer

    def stop(self, why: str) -> None:
        """Ask the function to save and stop, as the signal `why` would ask a process of its own."""
        if not self._greenlet:  # it has not begun
            self.code = STOPPED if self.code is None else self.code
        for request in self._requests:
            request.received = request.received or why

    def exchange(self) -> None:
        """Exchange what belongs to the process for what is this function's; called again, back."""
        (sys.stdout, sys.stderr), self._streams = self._streams, (sys.stdout, sys.stderr)
        for index, name in enumerate(_LOGGERS):
            logger = logging.getLogger(name)
            logger.handlers, self._handlers[index] = self._handlers[index], logger.handlers
        timer.__dict__, self._timer = self._timer, timer.__dict__

    # For the function

    def ask(self, request: Any) -> Any:
        """End this turn, and return the answer to `request` when the next one begins."""
        self.request = request
        self._greenlet.parent.switch()  # pyright: ignore[reportOptionalMemberAccess]
        return self._answer

    def _run(self) -> None:
        _own_seat.set(self)
        signals.relayed.set(self._requests)
        code = CRASHED
        try:
            code = self._main()
        finally:
            self.code = code


def own_seat() -> Seat | None:
    """Return the seat of the function that has its turn; None if none takes turns."""
    return _own_seat.get()
