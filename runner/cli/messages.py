"""Error messages of the command."""

from __future__ import annotations

import sys
import textwrap
import traceback

from runner.config.errors import ConfigError, escaped
from runner.system.exit_codes import CRASHED, REFUSED
from runner.system.secrets import redacted
from runner.system.utf8 import printable

WIDTH = 200
"""The maximum length of a line of a message, in characters."""


def report_error(error: Exception) -> int:
    """Print `error` to standard error, and return the exit code: 2 for an error of the config, and 1 for any other.

    An error that is not about the config or a file of the data is printed with its traceback.
    """
    from hydra.errors import HydraException  # imported here: --help needs no Hydra
    from omegaconf.errors import OmegaConfBaseException

    from runner.cli.hydra_errors import explain
    from runner.data.base import DataError

    if isinstance(error, DataError):
        print(wrapped(str(error)), file=sys.stderr)
        return CRASHED
    if isinstance(error, HydraException | OmegaConfBaseException | ConfigError):
        print(wrapped(explain(error)), file=sys.stderr)
    else:
        print(printable(redacted("".join(traceback.format_exception(error)))), end="", file=sys.stderr)
        return CRASHED
    return REFUSED


def wrapped(message: str) -> str:
    """Return `message` wrapped at `WIDTH` characters and cut to ten lines, without control characters or secrets."""
    # Paths are not cut.
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    lines = [
        part
        for line in escaped(redacted(message)).splitlines()
        for part in (wrapper.wrap(line) if len(line) > WIDTH else [line])
    ]
    return "\n".join(lines[:10])
