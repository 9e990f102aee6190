"""The command lines of the user's own unfinished sweeps, in the user's cache directory.

`runner sweep --resume` runs them again. The directory of a sweep may come from somebody else, so a command line
that is found in it is never run.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from runner.storage.files import read_regular, write_text
from runner.system.user_cache import cache_directory

_LIMIT_BYTES = 1_000_000


def remember_command(sweep: Path, words: list[str]) -> None:
    """Store `words`, the command line of the sweep at `sweep`, in the cache. Errors of the file system are ignored."""
    path = _file(sweep)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(words))


def remembered_command(sweep: Path) -> list[str]:
    """Return the command line that `remember_command` stored for the sweep at `sweep`; empty if there is none."""
    try:
        return json.loads(read_regular(_file(sweep), _LIMIT_BYTES))
    except (OSError, ValueError):
        return []


def forget_command(sweep: Path) -> None:
    """Remove the command line that `remember_command` stored for the sweep at `sweep`, if any."""
    with suppress(OSError):
        _file(sweep).unlink()


def _file(sweep: Path) -> Path:
    where = os.fsencode(os.path.realpath(sweep))
    return cache_directory("sweeps") / f"{hashlib.sha256(where).hexdigest()[:32]}.json"
