"""`python -m runner runs [PATH]` lists the runs below PATH, and can remove them.

Each run is a line with its status, age, size on disk, steps, best evaluation and directory; the newest run comes last.
`--sweeps` lists sweeps instead of runs. `--clean` asks for confirmation, and then removes what is listed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from runner.analysis.output import one_line
from runner.analysis.run_states import STATES
from runner.analysis.runs_clean import KeptError, remove_run, remove_sweep
from runner.analysis.runs_list import (
    REMAINS,
    SWEEP_STATES,
    Entry,
    Filter,
    age,
    changed,
    comparison,
    duration,
    listed_runs,
    listed_sweeps,
    states,
)
from runner.commands.arguments import Parser
from runner.config.errors import ABSENT, ConfigError, check, escaped
from runner.storage.regular_file import check_readable
from runner.system.utf8 import printable

_UNITS = ("B", "kB", "MB", "GB", "TB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code.

    The exit code is 0; 1 if something could not be removed; or 2 if the command line is invalid, after an error message
    has been printed to standard error.
    """
    try:
        options = _parser().parsed(arguments)
        root = Path(os.path.expanduser(options.path))
        check_readable("PATH", root)
        check(root.is_dir(), "PATH", str(root), "there is no such directory", "name a directory with runs below it")
        wanted = _filter(options)
        answered = options.yes or sys.stdin.isatty()
        why = "there is no terminal on which to ask whether to remove what is listed"
        check(not options.clean or answered, "--clean", ABSENT, why, "--clean --yes removes them without a question")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    now = time.time()
    found = listed_sweeps(root) if options.sweeps else listed_runs(root)
    entries = [entry for entry in found if wanted.accepts(entry, now)]
    if options.json:
        print(json.dumps([_as_dict(entry, now) for entry in entries], indent=2))
    else:
        print("\n".join(_lines(entries, now)) or f"nothing of this kind is in {_shown(root)}")
    return clean(root, entries, options.yes) if options.clean and entries else 0


def _parser() -> Parser:
    parser = Parser("runs", "List runs and sweeps, and remove them.")
    parser.add_argument("path", metavar="PATH", nargs="?", default="outputs", help="a directory (default: outputs)")
    parser.add_argument("--sweeps", action="store_true", help="list sweeps, and not runs")
    parser.add_argument(
        "--status",
        metavar="A,B",
        help=f"only these: {', '.join((*STATES, REMAINS))}; with --sweeps: {', '.join(SWEEP_STATES)}",
    )
    parser.add_argument("--older", metavar="AGE", help="only those last written to at least this long ago: 12h, 7d, 4w")
    parser.add_argument("--newer", metavar="AGE", help="only those last written to at most this long ago")
    parser.add_argument("--name", metavar="TEXT", default="", help="only those whose path contains TEXT")
    parser.add_argument("--best", metavar="'>X'", help="only those whose best evaluation is >, >=, < or <= X")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--clean", action="store_true", help="remove what is listed, after a question")
    parser.add_argument("--yes", action="store_true", help="with --clean: do not ask")
    return parser


def _filter(options: argparse.Namespace) -> Filter:
    """Return the filter that the options describe.

    Raises:
        ConfigError: if an option has an invalid value.
    """
    known = SWEEP_STATES if options.sweeps else (*STATES, REMAINS)
    if options.best is not None:
        comparison("--best", options.best)
    check(options.clean or not options.yes, "--yes", ABSENT, "it answers the question of --clean", "add --clean")
    return Filter(
        states("--status", options.status, known) if options.status is not None else (),
        None if options.older is None else duration("--older", options.older),
        None if options.newer is None else duration("--newer", options.newer),
        options.name,
        options.best or "",
    )


def clean(root: Path, entries: list[Entry], yes: bool) -> int:
    """Remove the directories of `entries`, and then their parent directories that have become empty.

    Args:
        root: the directory in which the entries were found. It is removed only if it is itself one of the entries.
        entries: the runs or sweeps to remove. Entries that are running are kept.
        yes: whether to remove the entries without asking the user.

    Returns:
        The exit code: 0, or 1 if something could not be removed.
    """
    chosen = [entry for entry in entries if entry.state != "running"]
    if len(chosen) < len(entries):
        print(f"{_count(len(entries) - len(chosen), entries[0])} kept, because still running", file=sys.stderr)
    if not chosen:
        return 0
    if not yes and not _confirmed(f"remove {_count(len(chosen), chosen[0])}, {_total(chosen)}? [y/N] "):
        print("nothing was removed", file=sys.stderr)
        return 0
    removed: list[Entry] = []
    for entry in chosen:
        path = entry.path.absolute()
        end = path.parent if entry.path == root else root.absolute()
        try:
            if entry.jobs is None and changed(entry.path) != entry.changed:  # while the question was asked
                raise KeptError("it has changed since it was listed")
            (remove_run if entry.jobs is None else remove_sweep)(path, end)
            removed.append(entry)
        except (KeptError, OSError) as error:
            why = error if isinstance(error, KeptError) else error.strerror
            print(f"{_shown(entry.path)} was not removed: {why}", file=sys.stderr)
    print(f"{_count(len(removed), chosen[0])} removed, {_total(removed)}", file=sys.stderr)
    return 0 if len(removed) == len(chosen) else 1


def _confirmed(question: str) -> bool:
    """Return whether the user answers `question` with yes."""
    print(question, end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return False


def _count(number: int, entry: Entry) -> str:
    return f"{number} {'run' if entry.jobs is None else 'sweep'}{'' if number == 1 else 's'}"


def _total(entries: list[Entry]) -> str:
    return file_size(sum(entry.size for entry in entries))


def file_size(number: float) -> str:
    """Return a number of bytes with three digits and its unit, such as `1.23 MB`."""
    power = 0
    while number >= 999.5 and power + 1 < len(_UNITS):
        number, power = number / 1000, power + 1
    return f"{number:.3g} {_UNITS[power]}"


def _lines(entries: list[Entry], now: float) -> list[str]:
    """Return the lines of the table. The directory is the last column, because it may be long."""
    if not entries:
        return []
    steps = "steps" if entries[0].jobs is None else "jobs done"
    rows = [("status", "age", "size", steps, "best", "directory"), *(_row(entry, now) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[5]]) for row in rows]


def _row(entry: Entry, now: float) -> tuple[str, ...]:
    steps = "" if entry.steps is None else f"{entry.steps}"
    steps += "" if entry.jobs is None else f" of {entry.jobs}"
    best = "" if entry.best is None else f"{one_line(entry.metric)} {entry.best:.4g}"
    return entry.state, age(now - entry.changed), file_size(entry.size), steps, best, _shown(entry.path)


def _as_dict(entry: Entry, now: float) -> dict[str, object]:
    steps = {"steps": entry.steps} if entry.jobs is None else {"jobs_done": entry.steps, "jobs": entry.jobs}
    best = {"metric": printable(entry.metric), "best": entry.best}
    times = {"changed": entry.changed, "age_seconds": now - entry.changed}
    return {
        "directory": printable(str(entry.path)),
        "status": entry.state,
        **times,
        "size": entry.size,
        **steps,
        **best,
    }


def _shown(path: Path) -> str:
    return escaped(printable(str(path))).replace("\n", "\\n")
