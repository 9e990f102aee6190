"""Functions that the processes of a supervisor run in tests."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from runner.config.errors import ConfigError
from runner.parallel.launch.supervisor import Report, report_of, start_heartbeat

CONNECTION_CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
SLEEP_SECONDS = 600.0
"""Seconds for which a rank sleeps; it is killed before that."""


def report_result_of(pipe: Connection, what: Callable[[], Any], reported: Path | None = None) -> None:
    report = start_heartbeat(pipe)
    try:
        report(Report(value=what()))
    except BaseException as error:
        report(report_of(error))
        if reported is not None:
            reported.touch()
        os._exit(1)


def return_number(number: int, after: Path | None = None) -> int:
    wait_for_file(after)
    return number


def sleep_until_killed() -> None:
    time.sleep(SLEEP_SECONDS)


def fail(error: BaseException, after: Path | None = None) -> None:
    wait_for_file(after)
    raise error


def raise_config_error() -> None:
    fail(ConfigError("model", "x", "it is no model", "take another"))


def signal_own_process(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    sleep_until_killed()


def exit_with(code: int) -> None:
    os._exit(code)


def wait_for_signal() -> str:
    """Wait for one of the signals that a supervisor's processes block from their start, and return its name."""
    received = signal.sigwait({signal.SIGUSR1, signal.SIGTERM, signal.SIGINT})
    return signal.Signals(received).name


def send_nothing(pipe: Connection, _: Any) -> None:
    """Send neither heartbeats nor a report."""
    threading.Event().wait(SLEEP_SECONDS)


def send_progress(pipe: Connection, number: int) -> None:
    """Send heartbeats with `number` as the progress, and nothing else."""
    start_heartbeat(pipe, lambda: number)
    sleep_until_killed()


def wait_for_file(path: Path | None) -> None:
    while path is not None and not path.exists():
        time.sleep(0.01)


RETURN_ONE = partial(return_number, 1)
