"""What the processes of a crew do in the tests; imported in each of them, and so of little."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from runner.config.errors import ConfigError
from runner.parallel.launch.supervisor import Report, attend, report_of

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")


def does(pipe: Connection, what: Callable[[], Any]) -> None:
    """A rank that does one thing, and reports."""
    report = attend(pipe)
    try:
        report(Report(value=what()))
    except BaseException as error:
        report(report_of(error))
        os._exit(1)


def value(number: int, seconds: float = 0) -> int:
    time.sleep(seconds)
    return number


def fail(error: BaseException, seconds: float = 0) -> None:
    time.sleep(seconds)
    raise error


def refuse(seconds: float = 0) -> None:
    fail(ConfigError("model", "x", "it is no model", "take another"), seconds)


def signal_oneself(number: signal.Signals, seconds: float = 0) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), number)
    time.sleep(60)


def exit_with(code: int) -> None:
    os._exit(code)


def wait_for_signal() -> str:
    """The name of a signal of those that a crew's processes begin with blocked."""
    received = signal.sigwait({signal.SIGUSR1, signal.SIGTERM, signal.SIGINT})
    return signal.Signals(received).name


def say_nothing(pipe: Connection, _: Any) -> None:
    """No beat, no report."""
    threading.Event().wait(60)


def hang_and_lose(seconds: float = 60) -> None:
    time.sleep(seconds)
    raise LOST


WELL = partial(value, 1)
