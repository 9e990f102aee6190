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
from runner.storage.files import check_no_link, open_regular
from runner.sweep.engines.base import Job
from runner.system.secrets import printable, redacted_values

_REFRESH_SECONDS = 0.5
_MAX_ROWS = 16


class Display:
    """A display on standard error. Without a terminal, it prints a line when a job starts or ends.

    The title of a job shows its values of the config keys `swept`, which have several values.
    """

    def __init__(self, num_jobs: int, swept: Collection[str], console: Console | None = None):
        self.num_jobs, self.swept = num_jobs, swept
        self._console = console or Console(stderr=True, force_terminal=sys.stderr.isatty())
        self._refreshed, self._begun = 0.0, time.monotonic()
        self._rows: dict[int, tuple[str, Path]] = {}
        self._states: dict[int, str] = {}
        self._num_before = 0
        self._refusals: dict[str, list[int]] = {}
        self._failures: list[str] = []
        self._live = Live(console=self._console, auto_refresh=False, transient=True, get_renderable=self._table)

    def title(self, job: Job) -> str:
        """Return the title of a job: its number and its overrides, of `swept` keys if there are any."""
        overrides = [text for text in job.overrides if override_key(text) in self.swept]
        words = printable(" ".join(redacted_values(overrides or list(job.overrides))))
        line = f"job {job.number}{': ' * bool(words)}{words}".replace("\n", "\\n")
        return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"

    def settled_before(self, states: Mapping[int, str]) -> None:
        """Count the jobs that an earlier command has settled; `states` maps their numbers to their states."""
        self._states.update(states)
        self._num_before = len(states)

    def line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, emoji=False, highlight=False)

    def started(self, job: Job, slot: str) -> None:
        """Show that a job has been started on `slot`, for example `GPU 0`."""
        self._states.pop(job.number, None)  # of a paused job that continues
        self._rows[job.number] = f"{self.title(job)} ({slot})", job.console
        if not self._console.is_terminal:
            self.line(f"{self.title(job)}: started on {slot}")

    def ended(self, job: Job, state: str, error: str, result: Mapping[str, Any]) -> None:
        """Show how a job ended. If several jobs are refused for the same reason, show only the first."""
        self._rows.pop(job.number, None)
        self._states[job.number] = state
        if state == "refused":
            jobs = self._refusals.setdefault(re.sub(r": got .*?: ", ": ", error.partition("\n")[0]), [])
            jobs.append(job.number)
            if len(jobs) == 1:
                self.line(f"{self.title(job)}: refused\n{error}")
            return
        parts = [f"{self.title(job)}: {state}"]
        if seconds := result.get("seconds"):
            parts.append(f"{result['steps']} step{'s' * (result['steps'] != 1)} in {seconds:.1f} s")
        if best := result.get("best"):
            parts.append(f"best {best['metric']} {best['value']:.4f}")
        self.line(", ".join(parts))
        if state == "crashed":
            failure = f"{error}\n  everything it printed: {os.path.relpath(job.console)}"
            self.line(failure)
            self._failures.append(f"{self.title(job)}: crashed\n{failure}")

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
        """Print a summary at the end of the sweep: the failures again, and the number of jobs that are done."""
        for reason, (first, *others) in self._refusals.items():
            if others:
                key, count = reason.partition(":")[0], f"{len(others):,} more job{'s' * (len(others) > 1)}"
                self.line(f"{key}: {count} refused for the same reason as job {first}")
        if len(self._states) > len(self._failures) + 1:  # otherwise, they are still on the screen
            for failure in self._failures:
                self.line(failure)
        if self.counts.get("stopped"):
            self.line("type the same command with resume=auto to continue")
        pruned = f", {self.counts['pruned']} pruned" if self.counts["pruned"] else ""
        print(f"\n{self.counts['done']} of {self.num_jobs} job{'s' * (self.num_jobs != 1)} done{pruned}", flush=True)

    @property
    def counts(self) -> Counter[str]:
        """The number of jobs in each state."""
        return Counter(self._states.values())

    def _table(self) -> Text:
        """Return the number of jobs in each state, the estimated time until all have ended, and the running jobs."""
        ended = len(self._states)
        counts = {"running": len(self._rows), **self.counts, "waiting": self.num_jobs - ended - len(self._rows)}
        text = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
        if ended > self._num_before:
            seconds = round((time.monotonic() - self._begun) / (ended - self._num_before) * (self.num_jobs - ended))
            text += f"; about {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"
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
