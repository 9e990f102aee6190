"""`python -m runner runs [PATH]` lists the runs below PATH, the newest last; `--sweeps` lists sweeps instead.

Each is a line with its status, age, size on disk, steps, best evaluation and directory. `--paths` prints only the
directories, for other commands such as `rm -r`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.analysis.comparison import direction
from runner.analysis.output import one_line
from runner.analysis.saved_runs import STATES, MeasuredRun, find_runs, find_sweeps, is_locked
from runner.commands.arguments import Parser
from runner.config.errors import ConfigError, check, did_you_mean
from runner.storage.files import check_readable, walk
from runner.storage.ledger_file import LEDGER, num_jobs, read_ledger
from runner.system.tables import size
from runner.system.utf8 import printable

_SWEEP_STATES = ("done", "running", "unfinished")
_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "w": 7 * 86400.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 0, or 2 after printing an error message to standard error."""
    try:
        options = _parser().parsed(arguments)
        root = Path(os.path.expanduser(options.path))
        check_readable("PATH", root)
        check(root.is_dir(), "PATH", str(root), "there is no such directory", "name a directory with runs below it")
        known = _SWEEP_STATES if options.sweeps else STATES
        states = [name.strip() for name in options.status.split(",")] if options.status is not None else known
        for name in states:
            check(name in known, "--status", name, "there is no such status", did_you_mean(name, known))
        youngest = _seconds("--older", options.older)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    now, found = time.time(), []
    read, paths = (_sweep, find_sweeps([root])) if options.sweeps else (_run, (r.directory for r in find_runs([root])))
    for path in paths:
        with suppress(OSError):  # another process has just removed it
            entry = read(path)
            if entry and entry["status"] in states and max(0.0, now - entry["changed"]) >= youngest:
                found.append(entry)
    found.sort(key=lambda entry: (entry["changed"], str(entry["directory"])))
    if options.json:
        print(json.dumps([_as_dict(entry, now) for entry in found], indent=2))
    elif options.paths:
        print("".join(f"{_shown(entry['directory'])}\n" for entry in found), end="")
    else:
        print("\n".join(_lines(found, now)) or f"nothing of this kind is in {_shown(root)}")
    return 0


def _parser() -> Parser:
    parser = Parser("runs", "List runs and sweeps.")
    parser.add_argument("path", metavar="PATH", nargs="?", default="outputs", help="a directory (default: outputs)")
    parser.add_argument("--sweeps", action="store_true", help="list sweeps, and not runs")
    states = f"only these: {', '.join(STATES)}; with --sweeps: {', '.join(_SWEEP_STATES)}"
    parser.add_argument("--status", metavar="A,B", help=states)
    parser.add_argument(
        "--older", metavar="AGE", default="0s", help="only those last written to at least this long ago: 12h, 7d, 4w"
    )
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print JSON, not a table")
    forms.add_argument("--paths", action="store_true", help="print only the directories, one a line")
    return parser


def _seconds(flag: str, text: str) -> float:
    """Return the number of seconds in a duration such as `7d` or `1.5h`."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])", text)
    if not found:
        raise ConfigError(flag, text, "it is not a duration", "a number and s, m, h, d or w: 7d is a week")
    return float(found[1]) * _UNITS[found[2]]


# ---------------------------------------------------------------------------------------------------------------------
# Entries


def _run(path: Path) -> dict[str, Any]:
    run = MeasuredRun(path)
    metric, best = run.best or ("", None)
    entry = {"directory": path, "status": run.state, "changed": _changed(path), "size": _size(path)}
    return entry | {"steps": run.steps, "metric": metric, "best": best}


def _sweep(path: Path) -> dict[str, Any] | None:
    """Return the entry of the sweep at `path`; None if its ledger cannot be read."""
    ledger = read_ledger(path)
    if not ledger:
        return None
    state = "running" if is_locked(path) else "done" if ledger["complete"] else "unfinished"
    done = sum(job.get("state") == "done" for job in ledger["jobs"].values())
    runs = list(find_runs([path]))
    bests = [run.best for run in runs if run.best]
    metric = bests[0][0] if bests else ""
    pick = max if direction(metric, runs) == "max" else min
    best = pick((value for name, value in bests if name == metric), default=None)
    newest = max([os.lstat(path / LEDGER).st_mtime, *(_changed(run.directory) for run in runs)])
    entry = {"directory": path, "status": state, "changed": newest, "size": _size(path)}
    return entry | {"jobs_done": done, "jobs": num_jobs(ledger), "metric": metric, "best": best}


def _changed(path: Path) -> float:
    """Return the time of the last change to a file or folder directly in `path`, in seconds since the epoch."""
    times = []
    for name in os.listdir(path):
        with suppress(FileNotFoundError):  # a running run has removed or renamed it
            times.append(os.lstat(path / name).st_mtime)
    return max(times, default=os.lstat(path).st_mtime)


def _size(path: Path) -> int:
    """Return the size on disk of a directory with all of its content, in bytes. Links are not followed."""
    blocks = os.lstat(path).st_blocks
    for folder, subfolders, files in walk(path):
        for name in (*subfolders, *files):
            with suppress(OSError):  # a running run has removed it
                blocks += os.lstat(os.path.join(folder, name)).st_blocks
    return 512 * blocks


# ---------------------------------------------------------------------------------------------------------------------
# Output


def _lines(entries: list[dict[str, Any]], now: float) -> list[str]:
    """Return the lines of the table. The directory is the last column, because it may be long."""
    rows = [_row(entry, now) for entry in entries]
    if rows:
        rows.insert(0, ["status", "age", "size", "steps" if "steps" in entries[0] else "jobs done", "best"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    directories = ["directory", *(_shown(entry["directory"]) for entry in entries)]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join([*row, directory]) for row, directory in zip(cells, directories, strict=False)]


def _row(entry: dict[str, Any], now: float) -> list[str]:
    steps = f"{entry['jobs_done']} of {entry['jobs']}" if "jobs" in entry else str(entry["steps"] or "")
    best = "" if entry["best"] is None else f"{one_line(entry['metric'])} {entry['best']:.4g}"
    return [entry["status"], _age(now - entry["changed"]), size(entry["size"]), steps, best]


def _age(seconds: float) -> str:
    unit, name = next(((u, n) for u, n in ((86400, "d"), (3600, "h"), (60, "min")) if seconds >= u), (1, "s"))
    return f"{max(0.0, seconds / unit):.0f} {name}"


def _as_dict(entry: dict[str, Any], now: float) -> dict[str, Any]:
    texts = {"directory": printable(str(entry["directory"])), "metric": printable(entry["metric"])}
    return entry | texts | {"age_seconds": now - entry["changed"]}


def _shown(path: Path) -> str:
    return printable(str(path)).replace("\n", "\\n")
