"""Functions that the processes of a supervisor run in tests."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from runner.parallel.launch.supervisor import Report, report_of, start_heartbeat

CONNECTION_CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
SLEEP_SECONDS = 600.0
"""Seconds for which a rank sleeps; it is killed before that."""


def report_result_of(pipe: Connection, what: Callable[[], Any]) -> None:
    report = start_heartbeat(pipe)
    try:
        report(Report(value=what()))
    except BaseException as error:
        report(report_of(error))
        os._exit(1)


def sleep_until_killed() -> None:
    time.sleep(SLEEP_SECONDS)


def fail(error: BaseException, after_seconds: float = 0.0) -> None:
    time.sleep(after_seconds)
    raise error


def wait_for_signal() -> str:
    """Wait for one of the signals that a supervisor's processes block from their start, and return its name."""
    received = signal.sigwait({signal.SIGUSR1, signal.SIGTERM, signal.SIGINT})
    return signal.Signals(received).name


def send_nothing(pipe: Connection, _: Any) -> None:
    """Send neither heartbeats nor a report."""
    threading.Event().wait(SLEEP_SECONDS)


RETURN_ONE = partial(int, 1)
