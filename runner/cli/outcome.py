"""How the command ends: its exit code, and the message of an error."""

from __future__ import annotations

import sys
import traceback

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from runner.cli.hydra_errors import explain
from runner.config.errors import ConfigError
from runner.parallel.launch.cluster import external_rank_info

DONE, CRASHED, REFUSED, DIVERGED, STOPPED, INTERRUPTED = 0, 1, 2, 3, 75, 130
CODES = {"done": DONE, "crashed": CRASHED, "diverged": DIVERGED, "stopped": STOPPED}
"""The exit code for each status of a result."""


def report_error(error: Exception) -> int:
    """Print an error, with its traceback if it is unexpected; returns the exit code."""
    if isinstance(error, HydraException | OmegaConfBaseException):
        print(explain(error), file=sys.stderr)
    elif isinstance(error, ConfigError):
        print(error, file=sys.stderr)
    else:
        traceback.print_exception(error)
        return CRASHED
    return REFUSED


def is_first_process() -> bool:
    """Return whether this process prints: of those that torchrun or SLURM started, only rank 0 does."""
    rank_info = external_rank_info()
    return rank_info is None or rank_info.rank == 0
