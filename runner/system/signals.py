"""Signals that request a stop: the run finishes its step and saves a checkpoint, from which it can be resumed.

Ctrl-C (SIGINT), what schedulers send before they kill (SIGTERM, SIGUSR1, SIGUSR2), a closed terminal (SIGHUP), and
Ctrl-\\ (SIGQUIT). Before training there is nothing to save: the command ends at once.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

STOPPED, INTERRUPTED = 75, 130
"""The exit codes of a command that was asked to stop, and of one that was interrupted by Ctrl-C."""


class StopRequest:
    """A context manager in which a stop signal sets `received`, which the loop reads each step.

    In the main process, the second Ctrl-C raises `KeyboardInterrupt`; child processes are stopped by the main process.
    A child process starts with these signals blocked, and receives those that are pending on entering the context.
    SIGHUP stays ignored if it is, as by `nohup`.
    """

    before_training = False

    def __init__(self) -> None:
        self.received = ""
        self._interrupted = False
        self._outer: StopRequest | None = None
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers only there
            self._outer = _installed()
            self._install()
            if self._outer is not None:
                self._outer.before_training = False
                self.received = self.received or self._outer.received
            self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._restore()
        if self._outer is not None:
            self._outer.received = self._outer.received or self.received
            self._outer._interrupted |= self._interrupted
        if self.received:
            import logging  # here: the command handles signals before it imports anything else

            log = logging.getLogger(__name__)
            log.debug("asked to stop by %s", self.received)

    def _install(self) -> None:
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle) or signal.SIG_DFL  # None: not of Python

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a process forked from this one, which will stop it
            return
        if number == signal.SIGHUP:
            _forget_closed_terminal()
        if not self.received:
            self.received = signal.Signals(number).name
            self._begin(number)
        elif number == signal.SIGINT and _is_main_process():
            self._interrupt()

    def _begin(self, number: int) -> None:
        """Serve the first signal."""
        if _is_main_process():
            _say(f"{self.received}: finishing the step, then saving; press Ctrl-C to stop at once")

    def _interrupt(self) -> None:
        if self._interrupted:  # once more, while the interrupt is served: it would end in a traceback
            os._exit(INTERRUPTED)
        self._interrupted = True
        raise KeyboardInterrupt


class CommandSignals(StopRequest):
    """A context manager around the command: a stop signal before training ends it at once, by SystemExit.

    After training, a signal is only remembered: the result is written, and the next job of a sweep does not begin. In
    between, the loop has a `StopRequest`.
    """

    before_training = True

    def __enter__(self) -> CommandSignals:
        if threading.current_thread() is threading.main_thread() and _installed() is None:
            self._install()
            self._hook, sys.unraisablehook = sys.unraisablehook, _leave_if_unraisable
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            sys.unraisablehook = self._hook
        self._restore()

    def _begin(self, number: int) -> None:
        if not self.before_training:
            return
        if number == signal.SIGINT:
            self._interrupt()
        _say(f"{self.received}: stopped before the first step")
        raise SystemExit(STOPPED)


def run_main(main: Callable[[], int]) -> int:
    """Return the exit code of `main`, which is all that this process does: no signal ends it otherwise.

    Signals are ignored from then on, as Python restores the default handlers while it exits, which takes a second.
    """
    CommandSignals().__enter__()  # never left
    try:
        return main()
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def before_training() -> None:
    """Let stop signals end the command at once, until a `StopRequest` is entered.

    Raises:
        SystemExit: if a signal has been received, in the previous job of a sweep.
    """
    command = _installed()
    if isinstance(command, CommandSignals):
        command.before_training = True
        if command.received:
            _say(f"{command.received}: stopped before the first step")
            raise SystemExit(STOPPED)


def _installed() -> StopRequest | None:
    """Return the object whose handlers are installed."""
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return owner if isinstance(owner, StopRequest) else None


def _is_main_process() -> bool:
    from multiprocessing import parent_process

    return parent_process() is None


def _say(line: str) -> None:
    """Write to stderr by os.write: the signal may have interrupted a write of a file object, which is not reentrant."""
    with suppress(OSError):
        os.write(2, f"\n{line}\n".encode())


def _forget_closed_terminal() -> None:
    """Redirect output to nowhere if the terminal is closed, as every further write would raise an OSError."""
    for stream in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)


def _leave_if_unraisable(lost: Any) -> None:
    """Exit if a signal arrived where no exception can be raised, as in a destructor; print other exceptions."""
    if isinstance(lost.exc_value, KeyboardInterrupt | SystemExit):
        os._exit(STOPPED if isinstance(lost.exc_value, SystemExit) else INTERRUPTED)
    sys.__unraisablehook__(lost)
