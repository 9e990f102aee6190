"""Error messages of the command."""

from __future__ import annotations

import sys
import traceback

from runner.config.errors import ConfigError, wrapped
from runner.system.exit_codes import CRASHED, REFUSED
from runner.system.secrets import redacted
from runner.system.utf8 import printable


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
    if isinstance(error, HydraException | OmegaConfBaseException | ConfigError):
        print(wrapped(explain(error)), file=sys.stderr)
        return REFUSED
    from runner.parallel.launch.supervisor import RankError

    trace = [f"{error.trace}{error}\n"] if isinstance(error, RankError) else traceback.format_exception(error)
    print(printable(redacted("".join(trace))), end="", file=sys.stderr)
    return CRASHED
