"""`python -m runner plot PATH…` draws the runs of a sweep.

It reads the runs below each PATH as `runner compare` does, whose `--csv` prints their numbers. Runs that differ only in
their seed are repeats of one measurement; error bars show the standard deviation over the repeats.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.analysis.comparison import Comparison
from runner.commands.arguments import command
from runner.commands.compare import existing, parser_of_runs
from runner.config.errors import ABSENT, ConfigError, check
from runner.storage.files import check_no_link
from runner.storage.run_directory import StorageError
from runner.system.console import DONE
from runner.system.import_path import is_installed
from runner.system.secrets import printable

_SOFTWARE = {"Software": "runner plot"}
"""Metadata of the pictures, by which a later call knows that it may replace them."""


@command
def main(arguments: Sequence[str] | None) -> int:
    """Draw the figures of a sweep, and print their paths. Figures of an earlier call are removed first."""
    parser = parser_of_runs("plot", "Figures of a sweep.")
    parser.add_argument("--out", metavar="DIR", help="default: the directory plots in the common parent of all PATHs")
    options = parser.parsed(arguments)
    paths = existing(options.paths)
    common = paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.absolute() for path in paths]))
    out = Path(os.path.expanduser(options.out)) if options.out else common / "plots"
    why = "it is not installed, and draws the figures"
    check(is_installed("seaborn"), "seaborn", ABSENT, why, "pip install seaborn")
    compared, typed = Comparison(paths, options.metric, goal=options.goal), " ".join(map(str, paths))
    check(bool(compared.rows), "PATH", typed, "none of its runs is done", "see the log.txt of each run")
    try:
        written = _write(compared, out)
    except (OSError, StorageError) as error:
        why = error.why if isinstance(error, StorageError) else error.strerror
        raise ConfigError("--out", str(out), f"nothing can be written there ({why})", "--out=DIR") from None
    if compared.meant:
        print(compared.meant, file=sys.stderr)
    nothing = "nothing is drawn: the runs differ in no key, and have no curves"
    print("\n".join(printable(str(path)) for path in written) or nothing)
    return DONE


def _write(compared: Comparison, out: Path) -> list[Path]:
    from runner.analysis.figures import NAMES, pictures

    check_no_link(out)
    figures = {out / f"{name}.png": figure for name, figure in pictures(compared).items()}
    if not figures and not out.exists():
        return []
    out.mkdir(parents=True, exist_ok=True)
    old = [path for name in NAMES if os.path.lexists(path := out / f"{name}.png")]
    for path in old:
        why = f"{path.name} in it would be replaced, and this command did not write it"
        check(_is_ours(path), "--out", str(out), why, "choose an empty directory")
    for path in old:
        path.unlink()
    for path, figure in figures.items():
        figure.savefig(path, metadata=_SOFTWARE)
    return list(figures)


def _is_ours(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return _SOFTWARE["Software"].encode() in file.read(1000)
