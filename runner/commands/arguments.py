"""The command lines of the command and its subcommands, which are all parsed, and refused, in one way."""

from __future__ import annotations

import argparse
import functools
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from runner.config import user_code
from runner.config.errors import ABSENT, ConfigError, check, did_you_mean, wrapped
from runner.config.options import root_keys
from runner.config.other_names import type_instead
from runner.config.overrides import checked_override, override_value
from runner.parallel.launch.cluster import external_world_size
from runner.system.console import CRASHED, INTERRUPTED, REFUSED
from runner.system.secrets import printable, redacted


class Parser(argparse.ArgumentParser):
    """A parser of a subcommand, or of the command if its name is empty; it raises a `ConfigError` instead of exiting.

    With `overrides`, it takes overrides of a config and, unless `config_dir` is false, the flag `--config-dir`; with
    `paths` also directories among them, such as `a/lr=0.1`.
    """

    def __init__(
        self,
        subcommand: str,
        description: str | None,
        *,
        overrides: bool = False,
        config_dir: bool = True,
        paths: bool = False,
        **options: Any,
    ):
        form = argparse.RawDescriptionHelpFormatter
        name = f"python -m runner {subcommand}".rstrip()
        super().__init__(name, description=description, formatter_class=form, allow_abbrev=False, **options)
        self._subcommand, self._takes_overrides, self._takes_paths = subcommand, overrides, paths
        if overrides and config_dir:
            self.add_argument("--config-dir", "-cd", metavar="DIR", help="a directory of options of your own")

    def add_run(self, help: str = "a run directory") -> None:
        """Add the arguments RUN and `--checkpoint`."""
        self.add_argument("run", metavar="RUN", help=help)
        self.add_checkpoint()

    def add_forms(self, **helps: str) -> None:
        """Add flags, of which one may be typed, for the forms in which the command prints its result."""
        forms = self.add_mutually_exclusive_group()
        for name, text in helps.items():
            forms.add_argument(f"--{name}", action="store_true", help=text)

    def add_checkpoint(self, default: str | None = "best") -> None:
        """Add `--checkpoint`, which chooses a checkpoint of a run."""
        self.add_argument("--checkpoint", metavar="best|last|STEP", default=default, help="which one (default: best)")

    def parsed(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the flags and, if the subcommand takes them, the lists `overrides` and `paths`.

        Args:
            arguments: the words of the command line; None: those of `sys.argv`.

        Raises:
            ConfigError: for an unknown flag, a flag with an invalid value, or a word that is not a valid override.
        """
        if self._takes_overrides:
            more = ", or a directory with runs" * self._takes_paths
            self.add_argument(
                "overrides", metavar="OVERRIDE", nargs="*", default=[], help=f"KEY=VALUE or GROUP=OPTION{more}"
            )
        several = "torchrun or SLURM has started several processes of it"
        check(external_world_size() == 1 or not self._subcommand, self._subcommand, ABSENT, several, "start one alone")
        words = sys.argv[1:] if arguments is None else list(arguments)
        for word in words:  # before argparse misses another argument
            flag, bare, known = word.partition("=")[0], word.lstrip("-"), self._option_string_actions
            if not re.match(r"-(?![\d.]|$)", word) or flag in known:
                continue
            remedy, is_key = type_instead(flag.lstrip("-")), re.split(r"[=.]", bare)[0] in root_keys()
            remedy = f"without dashes: {shlex.quote(bare) if '=' in bare else f'{bare}=…'}" if is_key else remedy
            remedy = remedy if self._takes_overrides else ""
            shown = [name for name, each in known.items() if name.startswith("--") and each.help != argparse.SUPPRESS]
            raise ConfigError(flag, ABSENT, "there is no such flag;", remedy or did_you_mean(flag, shown))
        options, surplus = self.parse_known_intermixed_args(words)
        for word in surplus:
            raise ConfigError(word, ABSENT, "it is one word too many;", f"{self.prog} --help explains all words")
        if self._takes_overrides:
            paths = [w for w in options.overrides if os.path.isdir(w) or ("/" in w and "=" not in w)]
            options.paths = paths if self._takes_paths else []
            options.overrides = [checked_override(w) for w in options.overrides if w not in options.paths]
            user_code.give(replace(user_code.given(), files=user_code.typed_files(options.overrides)))
        return options

    def error(self, message: str) -> NoReturn:
        """Raise a `ConfigError` for an error message of argparse, which has the form `argument --flag/-f: reason`."""
        flag, _, why = message.removeprefix("argument ").partition(": ")
        names = [name for name in flag.split("/") if name.startswith("--")] or [flag]
        raise ConfigError(names[0], ABSENT, why or "it is not complete", f"{self.prog} --help explains it")


def check_not_resumed(overrides: Sequence[str]) -> None:
    """Check that `overrides` do not continue a run, for a subcommand that composes a config."""
    value = override_value(overrides, "resume")
    why = "this subcommand composes a config, and does not resume a run"
    remedy = "leave it out, and repeat the run's overrides"
    check(value in (None, "auto", "never"), "resume", value, why, remedy)


def command(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """Decorate the function of a subcommand so that it prints its errors, and returns their exit code."""

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
        except Exception as error:
            return report_error(error)

    return run


def report_error(error: Exception) -> int:
    """Print `error` to standard error, and return the exit code: 2 for an error of the config, and 1 for any other.

    An error that is not about the config or a file of the data is printed with its traceback.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from runner.config.hydra_errors import explain
    from runner.data.base import DataError

    if isinstance(error, DataError):
        print(wrapped(str(error)), file=sys.stderr)
        return CRASHED
    if isinstance(error, ConfigError):  # it may name an argument of the Python API
        error.key = {"directory": "RUN", "checkpoint": "--checkpoint"}.get(error.key, error.key)
    if isinstance(error, HydraException | OmegaConfBaseException | ConfigError):
        print(wrapped(explain(error)), file=sys.stderr)
        return REFUSED
    from runner.parallel.launch.supervisor import RankError

    trace = [f"{error.trace}{error}\n"] if isinstance(error, RankError) else traceback.format_exception(error)
    print(printable(redacted("".join(trace))), end="", file=sys.stderr)
    return CRASHED
