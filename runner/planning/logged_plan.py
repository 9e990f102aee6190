"""Logs the plan of a run, together with the measurements of the run, as a text in TensorBoard."""

from __future__ import annotations

import logging
from io import StringIO
from pathlib import Path

from runner.planning.fake_step import trace
from runner.planning.report import measured, report_of
from runner.planning.report_tables import render
from runner.result import Result
from runner.run import Run
from runner.session import Session
from runner.system.secrets import redacted
from runner.system.utf8 import printable
from runner.tracking.tensorboard import TensorBoard

log = logging.getLogger(__name__)

TAG = "plan"
_WIDTH = 160


def log_plan(run: Run, session: Session, result: Result, directory: Path) -> None:
    """Log the plan of a run that has just ended, as the last text of its event files.

    An error in this function does not make the run fail; it is only written to `log.txt`.

    Args:
        run: the run.
        session: its session in this process.
        result: the result of the run.
        directory: the run directory.
    """
    from rich.console import Console

    try:
        report = report_of(run, session, trace(run, session))
        report["measured"] = measured(session, result.as_dict(), directory)
        console = Console(file=StringIO(), width=_WIDTH)
        with console.capture() as text:
            console.print(render(report))
        tracker = TensorBoard()
        tracker.open(directory, result.steps + 1)
        try:
            tracker.texts({TAG: printable(redacted(text.get()))}, result.steps + 1)
        finally:
            tracker.close(done=False)
    except (Exception, KeyboardInterrupt):  # Ctrl-C: the run is complete, and its result is written
        log.debug("no plan is logged", exc_info=True)
