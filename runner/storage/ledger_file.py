"""Reads and checks the ledger of a sweep, the file `sweep.json`, which may be damaged or come from somebody else."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from runner.config.errors import ConfigError
from runner.storage.files import read_regular
from runner.system.utf8 import printable

log = logging.getLogger(__name__)

LEDGER = "sweep.json"
_LIMIT_BYTES = 24_000_000
"""The maximum size of a ledger file in bytes: four times the size of a ledger with 10,000 jobs.

In memory, a ledger takes at most 20 times as much.
"""
_ENTRY = {
    "state": str,
    "code": int,
    "config_hash": str,
    "overrides": list,
    "directory": str,
    "error": str,
    "slot": str,
    "pid": int,
    "tries": int,
    "started": float,
    "seconds": float,
}
"""The keys of a job's entry, and the types of their values; only `config_hash` is required.

`started` is in seconds since the epoch. `seconds` is the time from the last start of the job to its end.
"""


def read_ledger(path: Path, typed: list[str] | None = None) -> dict[str, Any]:
    """Return the ledger of the sweep at `path`.

    If the file does not exist, return an empty dictionary. If the file is damaged, log a warning and return an empty
    dictionary. But if the damaged file belongs to the sweep that the user wants to resume, raise an error.

    Args:
        path: the directory of the sweep.
        typed: the overrides of the sweep that the user wants to resume, as in `Ledger.typed`; None if the ledger is
            only read.

    Returns:
        A dictionary with the keys `typed`, `complete` (whether the sweep is complete) and `jobs` (the entry of each
        job, by its number as a string), and usually `command`, `num_jobs` and `pid` (of the scheduler).

    Raises:
        ConfigError: if the ledger is damaged, but it can be parsed as JSON and its overrides are `typed`.
    """
    ledger = None
    try:
        ledger = json.loads(read_regular(path / LEDGER, _LIMIT_BYTES), object_pairs_hook=_unique)
        _check(ledger)
        return ledger
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except RecursionError:
        why = "it is nested too deeply"
    except (OSError, ValueError) as error:
        why = printable(getattr(error, "strerror", None) or str(error))
    if typed is not None and isinstance(ledger, dict) and ledger.get("typed") == typed:
        remedy = "repair or remove the file, or start another sweep with resume=never"
        raise ConfigError("resume", "auto", f"{printable(str(path / LEDGER))} is damaged: {why}", remedy)
    log.warning("%s is ignored: %s", printable(str(path / LEDGER)), why)
    return {}


def num_jobs(ledger: dict[str, Any]) -> int:
    """Return the number of jobs of a sweep, including jobs that have not begun."""
    return max(ledger.get("num_jobs", 0), len(ledger.get("jobs", {})))


def is_plain_name(directory: str) -> bool:
    """Return whether `directory` is a plain name, not a path.

    The name of a run directory in a ledger must be checked before it is used, because anybody may have written the
    ledger.
    """
    return directory not in ("", ".", "..") and "/" not in directory and "\0" not in directory


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build the dictionary of a JSON object from its items. Raise ValueError if a key occurs twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key occurs twice")
    return value


def _check(ledger: Any) -> None:
    """Raise ValueError unless `ledger` is a valid ledger."""
    if not isinstance(ledger, dict):
        raise ValueError("it is not a JSON object")
    typed, jobs = ledger.get("typed"), ledger.get("jobs")
    if not isinstance(typed, list) or not all(isinstance(text, str) for text in typed):
        raise ValueError("its overrides are not a list of strings")
    command = ledger.get("command", [])
    if not isinstance(command, list) or not all(isinstance(text, str) for text in command):
        raise ValueError("its command is not a list of strings")
    if not isinstance(ledger.get("complete"), bool):
        raise ValueError("it does not say whether the sweep is complete")
    if type(ledger.get("pid", 0)) is not int:
        raise ValueError("its process is not a number")
    total = ledger.get("num_jobs", 0)
    if type(total) is not int or not 0 <= total < 10**9:
        raise ValueError("its number of jobs is not possible")
    if not isinstance(jobs, dict):
        raise ValueError("its jobs are not a JSON object")
    for number, entry in jobs.items():
        if not isinstance(entry, dict) or "config_hash" not in entry or not re.fullmatch("[0-9]{1,9}", number):
            raise ValueError(f"job {number[:20]} has no number or no hash of its config")
        for key, expected in _ENTRY.items():
            if key in entry and type(entry[key]) is not expected:
                raise ValueError(f"{key} of job {number[:20]} is not of type {expected.__name__}")
        if not 0 <= entry.get("tries", 0) < 10**6:
            raise ValueError(f"tries of job {number[:20]} is not a possible number")
