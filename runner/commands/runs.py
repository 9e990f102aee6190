"""`python -m runner runs [PATH]` lists the runs below PATH, the newest last.

Each is a line with its status, age, steps, best evaluation and directory. `--paths` prints only the
directories, for other commands such as `rm -r`.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from runner.analysis.output import one_line
from runner.analysis.saved_runs import STATES, MeasuredRun, find_runs
from runner.commands.arguments import Parser, command
from runner.commands.compare import existing
from runner.config.errors import check, did_you_mean
from runner.system.console import DONE
from runner.system.secrets import printable

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "w": 7 * 86400.0}


@command
def main(arguments: Sequence[str] | None) -> int:
    parser = Parser("runs", __doc__)
    parser.add_argument("path", metavar="PATH", nargs="?", default="outputs", help="a directory (default: outputs)")
    parser.add_argument("--status", metavar="A,B", default=",".join(STATES), help=f"only these: {', '.join(STATES)}")
    older = "only those last written to at least this long ago: 12h, 7d, 4w"
    parser.add_argument("--older", metavar="AGE", default="0s", help=older)
    parser.add_forms(json="print JSON, not a table", paths="print only the directories, one a line")
    options = parser.parsed(arguments)
    [root] = existing([options.path])
    states = [name.strip() for name in options.status.split(",")]
    for name in states:
        check(name in STATES, "--status", name, "there is no such status", did_you_mean(name, STATES))
    age = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])", options.older)
    remedy = "a number and s, m, h, d or w: 7d is a week"
    check(age is not None, "--older", options.older, "it is not a duration", remedy)
    youngest = float(age[1]) * _UNITS[age[2]] if age else 0.0

    now, found = time.time(), []
    for run in find_runs([root]):
        with suppress(OSError):  # another process has just removed it
            entry = _entry(run, now)
            if run.state in states and max(0.0, entry["age_seconds"]) >= youngest:
                found.append(entry)
    found.sort(key=lambda entry: (-entry["age_seconds"], entry["directory"]))
    if options.json:
        print(json.dumps(found, indent=2))
    elif options.paths:
        print("".join(f"{entry['directory']}\n" for entry in found), end="")
    elif found:
        print("\n".join(_lines(found)))
    else:
        print(f"nothing of this kind is in {printable(str(root))}")
    return DONE


def _entry(run: MeasuredRun, now: float) -> dict[str, Any]:
    path, times = run.directory, []
    for entry in list(os.scandir(path)):
        with suppress(FileNotFoundError):  # a running run has removed or renamed it
            times.append(entry.stat(follow_symlinks=False).st_mtime)
    metric, best = run.best or ("", None)
    return {
        "directory": printable(str(path)).replace("\n", "\\n"),
        "status": run.state,
        "age_seconds": now - max(times, default=os.lstat(path).st_mtime),
        "steps": run.steps,
        "metric": printable(metric),
        "best": best,
    }


def _lines(entries: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table. The directory is the last column, because it may be long."""
    rows = [["status", "age", "steps", "best"]]
    for entry in entries:
        best = "" if entry["best"] is None else f"{one_line(entry['metric'])} {entry['best']:.4g}"
        age = max(0.0, entry["age_seconds"])
        unit, name = next(((u, n) for u, n in ((86400, "d"), (3600, "h"), (60, "min")) if age >= u), (1, "s"))
        steps = str(entry["steps"] or "")
        rows.append([entry["status"], f"{age / unit:.0f} {name}", steps, best])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    directories = ["directory", *(entry["directory"] for entry in entries)]
    return [
        "  ".join([*map(str.ljust, row, widths), directory]) for row, directory in zip(rows, directories, strict=True)
    ]
