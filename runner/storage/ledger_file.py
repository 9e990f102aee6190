"""Reads and checks the ledger of a sweep, the file `sweep.json`, which may be damaged or come from somebody else."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from runner.config.errors import ConfigError
from runner.storage.files import read_regular
from runner.storage.value_checks import UnexpectedContentError, check_known
from runner.system.secrets import printable

log = logging.getLogger(__name__)

LEDGER = "sweep.json"
MAX_BYTES = 24_000_000
"""The maximum size of a ledger file in bytes: four times that of 10,000 jobs. Memory takes up to 20 times as much."""
_HEAD = {"typed": [str], "complete": bool, "jobs": {str: dict}, "num_jobs": int, "pid": int, "metrics": {str: str}}
_ENTRY: dict[str, Any] = {
    **dict.fromkeys(("state", "config_hash", "directory", "error", "slot"), str),
    **dict.fromkeys(("started", "seconds"), float),
    "code": int,
    "tries": range(10**9),
    "overrides": list,
}
"""The keys of a job's entry, and the forms of their values; only `config_hash` is required.

`started` is in seconds since the epoch. `seconds` is the time from the last start of the job to its end.
"""


def read_ledger(path: Path, typed: list[str] | None = None) -> dict[str, Any]:
    """Return the ledger of the sweep in the directory `path`; empty if there is none, or, with a warning, if damaged.

    It has the keys `typed`, `complete` (whether the sweep is complete) and `jobs` (the entry of each job, by its number
    as a string), and usually `num_jobs` and `pid` (of the scheduler); `metrics`, if some were named, has the `min` or
    `max` of each by its TensorBoard tag.

    Raises:
        ConfigError: if the ledger is damaged, and its overrides are `typed`, those of a sweep to resume.
    """
    ledger = None
    try:
        ledger = json.loads(read_regular(path / LEDGER, MAX_BYTES))
        check_known(ledger, _HEAD, ("typed", "complete", "jobs"), "the sweep")
        for number, entry in ledger["jobs"].items():
            if not re.fullmatch("[0-9]{1,9}", number):
                raise UnexpectedContentError(f"job {number[:20]} has no number")
            check_known(entry, _ENTRY, ("config_hash",), f"job {number}")
        return ledger
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except RecursionError:
        why = "it is nested too deeply"
    except (OSError, ValueError, UnexpectedContentError) as error:
        why = printable(getattr(error, "strerror", None) or str(error))
    if typed is not None and isinstance(ledger, dict) and ledger.get("typed") == typed:
        remedy = "repair or remove the file, or start another sweep with resume=never"
        raise ConfigError("resume", "auto", f"{printable(str(path / LEDGER))} is damaged: {why}", remedy)
    log.warning("%s is ignored: %s", printable(str(path / LEDGER)), why)
    return {}


def num_jobs(ledger: dict[str, Any]) -> int:
    """Return the number of jobs of a sweep, including jobs that have not begun."""
    return max(ledger.get("num_jobs", 0), len(ledger.get("jobs", {})))
