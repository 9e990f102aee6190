"""`python -m runner compare PATH…` prints a table of runs: the options in which they differ, and their results.

It reads `config.yaml` and `result.json` of every run directory below each PATH, and the ledgers of sweeps. Runs that
differ only in their seed share one row, which shows mean ± standard deviation. The best row comes first. With several
seeds, the table says which rows cannot be told from the best. Runs that are not done follow in a second table, which
says why.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from runner.analysis.comparison import Comparison
from runner.analysis.tables import as_csv, as_json, markdown, terminal
from runner.commands.arguments import Parser, command
from runner.config.errors import check
from runner.storage.files import check_readable


@command
def main(arguments: Sequence[str] | None) -> int:
    parser = parser_of_runs("compare", "Compare runs: the options that differ, and what came of them.")
    against = "compare with this row, by options in which it differs or one of its runs (default: the best)"
    parser.add_argument("--against", metavar="KEY=VALUE|RUN", help=against)
    formats = parser.add_mutually_exclusive_group()
    for name, write in (("CSV", as_csv), ("Markdown", markdown), ("JSON", as_json)):
        flag = f"--{name.lower()}"
        formats.add_argument(flag, dest="format", action="store_const", const=write, help=f"print {name}, not a table")
    options = parser.parsed(arguments)
    comparison = Comparison(existing(options.paths), options.metric, options.against, options.goal)
    if options.format is None:
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(terminal(comparison, console.width))
    else:
        sys.stdout.write(options.format(comparison))
    return 0


def existing(texts: Iterable[str]) -> list[Path]:
    """Return the paths of directories that were typed; refuse what is not a directory that can be read."""
    paths = [Path(os.path.expanduser(text)) for text in texts]
    for path in paths:
        check_readable("PATH", path)
        remedy = "name a run directory, a sweep, or a directory with some below it"
        check(path.is_dir(), "PATH", str(path), "there is no such directory", remedy)
    return paths


def parser_of_runs(name: str, description: str) -> Parser:
    """Return the parser of a subcommand that takes directories with runs, and the metrics to compare them by."""
    parser = Parser(name, description)
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a directory with runs at any depth below it")
    metric = "metrics by their TensorBoard tags (default: those of the sweep, or the one that selects the best)"
    parser.add_argument("--metric", metavar="NAME,…", help=metric)
    parser.add_argument("--goal", metavar="min|max,…", help="which values of each metric are better")
    return parser
