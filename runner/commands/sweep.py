"""`python -m runner sweep PATH` shows a sweep, also while it runs.

It prints the number of jobs in each state, the last line that each running job has printed, and the errors of failed
jobs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.analysis.output import one_line
from runner.analysis.saved_runs import MeasuredRun, is_locked
from runner.commands.arguments import Parser, command
from runner.config.errors import check
from runner.storage.files import check_readable
from runner.storage.ledger_file import LEDGER, num_jobs, read_ledger
from runner.sweeps.display import last_line
from runner.sweeps.ledger import console_file
from runner.system.console import DONE
from runner.system.secrets import printable

_FAILED = ("crashed", "refused", "diverged")


@command
def main(arguments: Sequence[str] | None) -> int:
    parser = Parser("sweep", "Show what became of the jobs of a sweep.")
    parser.add_argument("path", metavar="PATH", help="the directory of the sweep: outputs/sweeps/NAME/DATE…")
    path = Path(os.path.expanduser(parser.parsed(arguments).path))
    check_readable("PATH", path / LEDGER)
    check((path / LEDGER).is_file(), "PATH", str(path), f"it has no {LEDGER}", "name the directory of a sweep")
    print("\n".join(lines(path, read_ledger(path))))
    return DONE


def lines(path: Path, ledger: dict[str, Any]) -> list[str]:
    """Return a description of the sweep at `path` with this ledger, as a list of lines without control characters."""
    jobs, is_running = ledger.get("jobs", {}), is_locked(path)
    states = {number: str(entry.get("state", "")) for number, entry in jobs.items()}
    if not is_running:  # if it was killed, its jobs went on
        began = {number: Path(jobs[number].get("directory", "")).name for number in jobs if states[number] == "running"}
        states |= {number: MeasuredRun(path / name).state for number, name in began.items()}
    counts = Counter(states.values())
    parts = [f"{count:,} {state}" for state, count in sorted(counts.items()) if state]
    waiting = num_jobs(ledger) - len(jobs)
    what = ", ".join([*parts, *([f"{waiting:,} not begun"] if waiting else [])]) or "no job has begun"
    is_complete = ledger.get("complete") or (jobs and not waiting and counts.keys() <= {"done", "refused"})
    stopped = "complete" if is_complete else "stopped; its command with resume=auto goes on"
    state = f"running, process {ledger.get('pid', 0)}" if is_running else stopped
    shown = [f"{path}: {state}", what]
    for number, entry in sorted(jobs.items(), key=lambda item: int(item[0])):
        name = one_line(entry.get("directory") or number)
        if states[number] in ("running", "killed"):
            shown.append(f"  {name} ({entry.get('slot', '')}): {last_line(console_file(path, int(number)))}")
        elif states[number] in _FAILED:
            error = str(entry.get("error", "")).strip().partition("\n")[0]
            shown.append(f"  {name}: {states[number]}{f': {error}' if error else ''}")
    return [printable(line) for line in shown]
