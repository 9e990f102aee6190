"""The display of a running sweep: a line for each event and, on a terminal, a table of the running jobs."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol
from unicodedata import east_asian_width

from runner.config.errors import escaped
from runner.config.overrides import override_key
from runner.system.secrets import redacted_values

_REFRESH_SECONDS = 0.5
_MOST_ROWS = 16


class Shown(Protocol):
    """The attributes of a job that a display uses."""

    @property
    def number(self) -> int: ...
    @property
    def overrides(self) -> list[str]: ...
    @property
    def directory(self) -> Path: ...


class Display:
    """A display that prints a line to standard error when a job starts or ends.

    Args:
        num_jobs: the number of jobs in the sweep.
        swept: the config keys that have several values; the title of a job shows its values of these keys.
        width: the maximum length of a job's title in characters.
    """

    def __init__(self, num_jobs: int, swept: Collection[str], width: int = 200):
        self.num_jobs, self.swept, self.width = num_jobs, swept, width
        self._states: dict[int, str] = {}
        self._num_before = 0
        self._refusals: dict[str, list[int]] = {}
        self._failures: list[str] = []

    def title(self, job: Shown) -> str:
        """Return the title of a job: its number and its overrides of `swept` keys.

        If the job overrides no `swept` key, the title contains all of its overrides.
        """
        overrides = [text for text in job.overrides if override_key(text) in self.swept]
        words = escaped(" ".join(redacted_values(overrides or job.overrides)))
        line = f"job {job.number}: {words}".replace("\n", "\\n")
        return line if len(line) <= self.width else line[: self.width - 1] + "…"

    def settled_before(self, states: Mapping[int, str]) -> None:
        """Count the jobs that an earlier command has settled; `states` maps their numbers to their states."""
        self._states.update(states)
        self._num_before = len(states)

    def line(self, text: str) -> None:
        """Print `text` to standard error."""
        print(text, file=sys.stderr, flush=True)

    def started(self, job: Shown, slot: str, console: Path) -> None:
        """Show that a job has been started.

        Args:
            job: the job.
            slot: the devices or the queue entry of the job, for example `GPU 0`.
            console: the file with everything that the job prints.
        """
        self._states.pop(job.number, None)  # of a paused job that continues
        self.line(f"{self.title(job)}: started on {slot}")

    def known(self, job: Shown, state: str) -> None:
        """Show that an earlier command has completed a job."""
        self._states[job.number] = state
        self.line(f"{self.title(job)}: already {state}, {os.path.relpath(job.directory)}")

    def ended(self, job: Shown, state: str, error: str, result: Mapping[str, Any], console: Path) -> None:
        """Show how a job ended. If several jobs are refused for the same reason, show only the first.

        Args:
            job: the job.
            state: `done`, `crashed`, `refused`, `diverged`, `stopped` or `pruned`.
            error: the error message, if the job failed.
            result: the result of the job; empty if the job has no result.
            console: the file with everything that the job printed.
        """
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
            failure = f"{error}\n  everything it printed: {os.path.relpath(console)}"
            self.line(failure)
            self._failures.append(f"{self.title(job)}: crashed\n{failure}")

    def refresh(self) -> None:
        """Update the display of the running jobs. The scheduler calls this method several times per second."""

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


class Table(Display):
    """A display for a terminal, with a table of the running jobs and the last line that each job printed.

    Args:
        num_jobs: the number of jobs in the sweep.
        swept: the config keys that have several values; the title of a job shows its values of these keys.
        last_line: a function that returns the last line of a file.
    """

    def __init__(self, num_jobs: int, swept: Collection[str], last_line: Callable[[Path], str]):
        super().__init__(num_jobs, swept)
        self._last_line = last_line
        self._rows: dict[int, tuple[str, Path]] = {}
        self._num_shown, self._drawn = 0, 0.0
        self._begun, self._most_at_once = time.monotonic(), 1

    def line(self, text: str) -> None:
        self._erase()
        super().line(text)

    def started(self, job: Shown, slot: str, console: Path) -> None:
        self._states.pop(job.number, None)
        self._rows[job.number] = f"{self.title(job)} ({slot})", console
        self._most_at_once = max(self._most_at_once, len(self._rows))

    def ended(self, job: Shown, state: str, error: str, result: Mapping[str, Any], console: Path) -> None:
        self._rows.pop(job.number, None)
        super().ended(job, state, error, result, console)

    def refresh(self) -> None:
        if time.monotonic() < self._drawn + _REFRESH_SECONDS:
            return
        self._erase()
        self._drawn = time.monotonic()
        columns, height = shutil.get_terminal_size()
        shown = list(self._rows.values())[
            : max(0, min(_MOST_ROWS, height - 2))
        ]  # a line that has scrolled is not erased
        lines = [self._status(), *(f"  {title}  {self._last_line(console)}" for title, console in shown)]
        print("\n".join(_cut(line, columns - 1) for line in lines), file=sys.stderr, flush=True)
        self._num_shown = len(lines)

    def summary(self) -> None:
        self._erase()
        super().summary()

    def _erase(self) -> None:
        if self._num_shown:
            print(f"\x1b[{self._num_shown}A\x1b[J", end="", file=sys.stderr, flush=True)
            self._num_shown = 0

    def _status(self) -> str:
        """Return one line with the number of jobs in each state, and the estimated time until all jobs have ended."""
        ended = len(self._states)
        counts = {"running": len(self._rows), **self.counts, "waiting": self.num_jobs - ended - len(self._rows)}
        text = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
        if ended <= self._num_before:
            return text
        seconds = round((time.monotonic() - self._begun) / (ended - self._num_before) * (self.num_jobs - ended))
        return f"{text}; about {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"


def _cut(line: str, width: int) -> str:
    """Return the beginning of `line` that takes at most `width` columns of a terminal, where CJK and emoji take two."""
    columns = accumulate(1 + (east_asian_width(char) in "FW") for char in line)
    return line[: bisect_right([*columns], width)].replace("\t", " ")
