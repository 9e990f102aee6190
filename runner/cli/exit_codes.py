"""The exit codes of the command, and its error messages."""

from __future__ import annotations

import sys
import textwrap
import traceback

from runner.config.errors import ConfigError, escaped
from runner.parallel.launch.cluster import external_rank_info
from runner.system.secrets import redacted

DONE, CRASHED, REFUSED, DIVERGED, STOPPED, INTERRUPTED = 0, 1, 2, 3, 75, 130
CODES = {"done": DONE, "crashed": CRASHED, "diverged": DIVERGED, "stopped": STOPPED}
"""The exit code for each status of a result."""

WIDTH = 200
"""The maximum length of a line of a message, in characters."""


def report_error(error: Exception) -> int:
    """Print `error`, and return the exit code. An error that is not about the config is printed with its traceback."""
    from hydra.errors import HydraException  # imported here: --help needs no Hydra
    from omegaconf.errors import OmegaConfBaseException

    from runner.cli.hydra_errors import explain

    if isinstance(error, HydraException | OmegaConfBaseException | ConfigError):
        print(wrapped(explain(error)), file=sys.stderr)
    else:
        print(redacted("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        return CRASHED
    return REFUSED


def wrapped(message: str) -> str:
    """Return `message` wrapped at `WIDTH` characters and cut to ten lines, without control characters or secrets."""
    lines = [
        part
        for line in escaped(redacted(message)).splitlines()
        for part in (textwrap.wrap(line, WIDTH, subsequent_indent="  ") if len(line) > WIDTH else [line])
    ]
    return "\n".join(lines[:10])


def is_first_process() -> bool:
    """Return whether this process prints messages: if torchrun or SLURM started several, only rank 0 does."""
    rank_info = external_rank_info()
    return rank_info is None or rank_info.rank == 0
