"""Signals that request a stop: the run finishes its step and saves a checkpoint, from which it can be resumed.

The signals are SIGINT (Ctrl-C), SIGQUIT (Ctrl-\\), SIGHUP (the terminal was closed), and SIGTERM, SIGUSR1 and SIGUSR2,
which schedulers send before they kill a job. Before training, a signal ends the command at once.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

from runner.system.console import CRASHED, INTERRUPTED, STOPPED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import Any

relayed: ContextVar[list[StopRequest] | None] = ContextVar("relayed", default=None)
"""The requests of a function that takes turns with others (see `turns`), which gets no signals itself."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """A context manager that stores the name of a stop signal in `received`, which the training loop reads every step.

    In the main process, which `prints` that it saves, Ctrl-C after an earlier stop signal raises `KeyboardInterrupt`.
    Its children start with stop signals blocked, and receive pending ones when they enter the context. An ignored
    SIGHUP (`nohup`) stays ignored.
    """

    before_training = False

    def __init__(self, prints: bool = True) -> None:
        self.received, self._prints = "", prints
        self._interrupted = False
        self._outer: StopRequest | None = None
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if (requests := relayed.get()) is not None:
            requests.append(self)
        elif threading.current_thread() is threading.main_thread():  # Python allows signal handlers only there
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
            import logging  # not at the top: the command handles signals before it imports anything else

            logging.getLogger(__name__).debug("asked to stop by %s", self.received)

    def _install(self) -> None:
        for number in STOP_SIGNALS:  # `signal.signal` returns None for a handler that was not installed from Python
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle) or signal.SIG_DFL

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:  # in a forked child, which its parent stops
            return
        if number == signal.SIGHUP:
            _forget_closed_terminal()
        if not self.received:
            self.received = signal.Signals(number).name
            self._first(number)
        elif number == signal.SIGINT and _is_main_process():
            self._interrupt()

    def _first(self, number: int) -> None:
        if self._prints and _is_main_process():
            _say(f"{self.received}: finishing the step, then saving; press Ctrl-C to stop at once")

    def _interrupt(self) -> None:
        if self._interrupted:  # Ctrl-C again, while the interrupt is handled: this would end in a traceback
            os._exit(INTERRUPTED)
        self._interrupted = True
        raise KeyboardInterrupt


class CommandSignals(StopRequest):
    """A context manager for the whole command, in which a stop signal before training raises an exception.

    It is `KeyboardInterrupt` for Ctrl-C, and `SystemExit` for other signals. After training, a signal is only recorded
    in `received`: the result is still written, but this process does not start another run.
    """

    before_training = True
    exit_code: int | None = None
    """The exit code of the command if a signal has ended it before training; otherwise None."""

    def __enter__(self) -> CommandSignals:
        if threading.current_thread() is threading.main_thread() and _installed() is None:
            self._install()
            self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            self.before_training = False
            sys.unraisablehook = self._hook
            self._restore()

    def _first(self, number: int) -> None:
        if not self.before_training:
            return
        self.exit_code = INTERRUPTED if number == signal.SIGINT else STOPPED
        if number == signal.SIGINT:
            self._interrupt()
        _say(f"{self.received}: stopped before the first step")
        raise SystemExit(STOPPED)

    def _unraisable(self, lost: Any) -> None:
        """Raise the exception of a stop signal again, a moment later, if it could not reach the caller.

        From a destructor or a callback of a weak reference, of which imports call many, Python only passes it here.
        """
        if isinstance(lost.exc_value, KeyboardInterrupt | SystemExit):
            signal.signal(signal.SIGALRM, self._raise_again)
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        else:
            sys.__unraisablehook__(lost)

    def _raise_again(self, *_: object) -> None:
        if self.before_training:
            raise KeyboardInterrupt if self.exit_code == INTERRUPTED else SystemExit(STOPPED)


@contextmanager
def signals_postponed() -> Iterator[None]:
    """Within this context, stop signals are not handled: those that arrive are handled at its end.

    It is for C++ code that calls Python, such as the import of torch: the exception of a handler can abort the process.
    """
    owner, arrived = _installed(), []
    if owner is None or threading.current_thread() is not threading.main_thread():
        yield  # or another such context is active
        return
    for number in owner._before:
        signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        for number in owner._before:
            signal.signal(number, owner._handle)
        for number in arrived:
            signal.raise_signal(number)


def run_main(main: Callable[[], int]) -> int:
    """Install handlers for stop signals, call `main`, and return the exit code of this process.

    Once `main` has returned, a stop signal does not change the exit code: Python takes a second to exit, and waits for
    threads that a user's code has left.
    """
    command, code = CommandSignals().__enter__(), CRASHED  # never left
    try:
        code = main()
        # A library may have turned the exception that ends the command into another one, and that into an exit code.
        code = code if command.exit_code is None else command.exit_code
        return code
    except KeyboardInterrupt:
        _say("interrupted")
        code = INTERRUPTED
        return code
    finally:
        # After Ctrl-C inside an `exec`, which makes dataclasses, Python would end the process by SIGINT. Another `exec`
        # makes it forget this: run_eval_code_obj in https://github.com/python/cpython/blob/3.13/Python/pythonrun.c
        exec("")
        command.before_training = False
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: os._exit(code))


def is_of_signal(error: BaseException) -> bool:
    """Return whether the handler of a stop signal has raised `error`, and not the code that a signal interrupted."""
    owner = _installed()
    if isinstance(error, KeyboardInterrupt) and owner is None:
        return True  # of Python's own handler
    return isinstance(error, KeyboardInterrupt | SystemExit) and owner is not None and bool(owner.received)


def before_training() -> None:
    """Let stop signals end the command at once, until the training loop enters a `StopRequest`.

    Raises:
        SystemExit: if a stop signal arrived while this process trained an earlier run.
    """
    command = _installed()
    if isinstance(command, CommandSignals):
        command.before_training = True
        if command.received:
            _say(f"{command.received}: stopped before the first step")
            raise SystemExit(STOPPED)


def _installed() -> StopRequest | None:
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return owner if isinstance(owner, StopRequest) else None


def _is_main_process() -> bool:
    from multiprocessing import parent_process

    return parent_process() is None


def _say(line: str) -> None:
    with suppress(OSError):  # the signal may have interrupted `sys.stderr.write`, which is not reentrant
        os.write(2, f"\n{line}\n".encode())


def _forget_closed_terminal() -> None:
    """Redirect output to /dev/null if the terminal is closed, because every further write would raise an OSError."""
    for stream in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)
