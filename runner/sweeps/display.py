"""The display of a running sweep: a line for each event and, on a terminal, a table of the running jobs."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from runner.config.errors import WIDTH
from runner.config.overrides import override_key
from runner.config.user_code import is_generated
from runner.storage.files import check_no_link, open_regular
from runner.sweeps.engines.base import Job
from runner.system.secrets import printable, redacted_values

_REFRESH_SECONDS = 0.5
_MAX_ROWS = 16


class Display:
    """A display on standard error. Without a terminal, it prints a line when a job starts or ends.

    The title of a job shows its values of the config keys `swept`, which have several values. The attribute `states`
    has the state of each job that has ended, by number.
    """

    def __init__(self, num_jobs: int, swept: Collection[str], console: Console | None = None):
        self.num_jobs, self.swept = num_jobs, swept
        self._console = console or Console(stderr=True, force_terminal=sys.stderr.isatty())
        self._refreshed = 0.0
        self._rows: dict[int, tuple[str, Path]] = {}
        self.states: dict[int, str] = {}
        self._refusals: set[str] = set()
        self._live = Live(console=self._console, auto_refresh=False, transient=True, get_renderable=self._table)

    def title(self, job: Job) -> str:
        """Return the title of a job: its number and its overrides, of `swept` keys if there are any."""
        overrides = [text for text in job.overrides if override_key(text) in self.swept]
        words = printable(
            " ".join(redacted_values(overrides or [text for text in job.overrides if not is_generated(text)]))
        )
        line = f"job {job.number}{': ' * bool(words)}{words}".replace("\n", "\\n")
        return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"

    def line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, emoji=False, highlight=False)

    def started(self, job: Job, slot: str) -> None:
        """Show that a job has been started on `slot`, for example `GPU 0`."""
        self.states.pop(job.number, None)  # of a paused job that continues
        self._rows[job.number] = f"{self.title(job)} ({slot})", job.console
        if not self._console.is_terminal:
            self.line(f"{self.title(job)}: started on {slot}")

    def ended(self, job: Job, state: str, error: str, result: Mapping[str, Any]) -> None:
        """Show how a job ended. If several jobs are refused for the same reason, show it only once."""
        self._rows.pop(job.number, None)
        self.states[job.number] = state
        parts = [f"{self.title(job)}: {state}"]
        if seconds := result.get("seconds"):
            parts.append(f"{result['steps']} step{'s' * (result['steps'] != 1)} in {seconds:.1f} s")
        if best := result.get("best"):
            parts.append(f"best {best['metric']} {best['value']:.4f}")
        self.line(", ".join(parts))
        reason = re.sub(r": got .*?: ", ": ", error.partition("\n")[0])
        if state == "crashed":
            self.line(f"{error}\n  everything it printed: {os.path.relpath(job.console)}")
        elif state == "refused" and reason not in self._refusals:
            self._refusals.add(reason)
            self.line(error)

    def refresh(self) -> None:
        """Update the table of the running jobs. The scheduler calls this method several times per second."""
        if self._console.is_terminal and time.monotonic() >= self._refreshed + _REFRESH_SECONDS:
            self._live.start()
            self._live.refresh()
            self._refreshed = time.monotonic()

    def close(self) -> None:
        """Remove the table of the running jobs."""
        self._live.stop()

    def summary(self) -> None:
        """Print the number of jobs in each state at the end of the sweep."""
        counts = Counter(self.states.values())
        if counts["stopped"]:
            self.line("type the same command with resume=auto to continue")
        others = "".join(f", {count} {state}" for state, count in counts.items() if count and state != "done")
        print(f"\n{counts['done']} of {self.num_jobs} job{'s' * (self.num_jobs != 1)} done{others}", flush=True)

    def _table(self) -> Text:
        """Return the number of jobs in each state, and the running jobs with the last lines that they have printed."""
        waiting = self.num_jobs - len(self.states) - len(self._rows)
        counts = {"running": len(self._rows), **Counter(self.states.values()), "waiting": waiting}
        text = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
        rows = list(self._rows.values())[:_MAX_ROWS]
        lines = [text, *(f"  {title}  {last_line(console)}" for title, console in rows)]
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


def message(console: Path, start: int = 0) -> str:
    """Return the last ten non-empty lines that a job printed, in which control characters are escaped.

    Args:
        console: the file to which the job printed. If it cannot be read, the result is an empty string.
        start: the size of the file in bytes when the job was started; earlier attempts printed what is before.
    """
    try:
        check_no_link(console.parent)
        with open_regular(console) as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - 20_000))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return printable("\n".join([line for line in lines if line.strip()][-10:]))


def last_line(console: Path) -> str:
    """Return the last non-empty line that a job printed; an empty string if there is none."""
    return message(console).rpartition("\n")[2]
