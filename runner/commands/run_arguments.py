"""The command line of tools that use a checkpoint of a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from runner.config.errors import ABSENT, check
from runner.config.other_names import type_instead


def run_parser(tool: str, description: str | None, run_help: str = "a run directory") -> argparse.ArgumentParser:
    """Return the parser of `python -m runner TOOL`, with the arguments RUN and --checkpoint.

    Args:
        tool: the name of the tool.
        description: the description of the tool.
        run_help: the description of the argument RUN.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        f"python -m runner {tool}", description=description, formatter_class=form, allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", help=run_help)
    parser.add_argument("--checkpoint", metavar="best|last|STEP", default="best", help="which one (default: best)")
    return parser


def check_no_flags(words: Sequence[str], remedy: str = "--help lists them") -> None:
    """Check that none of `words` is a flag.

    Args:
        words: the words of the command line that the parser of the tool did not recognize.
        remedy: the last part of the error message, which says what to do.

    Raises:
        ConfigError: if one of the words is a flag.
    """
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    flag = "".join(flags[:1])
    check(not flags, flag, ABSENT, "there is no such flag of this tool;", type_instead(flag.lstrip("-")) or remedy)
