"""Removal of temporary directories that killed processes have left behind.

Each process holds a lock on a file in its temporary directory. The kernel releases the lock when the process ends, so
the next run removes the directories whose file is not locked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_LOCK = "runner.lock"


def claim_directory(path: str) -> bool:
    """Lock the temporary directory `path` until this process ends.

    Returns:
        True if this call has locked the directory; False if the directory was already locked, or cannot be locked.
    """
    lock = Path(path) / _LOCK
    with suppress(OSError):  # without a lock, the directory is left behind after a kill, and nothing else
        if lock.exists():
            return False
        file = os.open(lock.with_suffix(".new"), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        lock.with_suffix(".new").rename(lock)  # only now can others find it
        return True
    return False


def remove_abandoned(prefix: str) -> None:
    """Remove this user's temporary directories named `prefix*` that belonged to processes that have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # it has no lock file, is in use or another user's, or is already removed
            if path.lstat().st_uid != os.getuid() or path.is_symlink():
                continue
            file = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(file)
