"""Reads the console file of a job, to which the job prints, and checks whether the job is still running."""

from __future__ import annotations

import os
from pathlib import Path

from runner.storage.files import check_no_link, is_locked, open_regular
from runner.system.utf8 import printable


def is_running(console: Path) -> bool:
    """Return whether the job that prints to the file `console` is still running.

    The process of a running job holds a lock on this file. The result is also False if the file cannot be opened, or
    its file system does not support locks.
    """
    return is_locked(console)


def is_open_in(pid: int, path: Path) -> bool:
    """Return whether the process `pid` has opened the file `path`; False on systems without /proc.

    The result is also False if the process has opened the same file only under another name. Somebody may have made
    `path` a hard link to a console file of another sweep, and a job of the other sweep must not be taken for a job of
    this sweep.
    """
    name = os.path.realpath(path)
    try:
        files = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    return any(_leads_to(file, name, path) for file in files)


def _leads_to(file: Path, name: str, path: Path) -> bool:
    """Return whether the symbolic link `file` has the target `name` and leads to the same file as `path`."""
    try:
        return os.readlink(file) == name and os.path.samefile(file, path)
    except OSError:  # the process has closed the file in the meantime
        return False


def message(console: Path, start: int = 0) -> str:
    """Return the last ten non-empty lines that a job printed, in which control characters are escaped.

    Args:
        console: the file to which the job printed. If it cannot be read, the result is an empty string.
        start: the size of the file in bytes when the job was started; earlier attempts printed what is before.
    """
    try:
        check_no_link(console.parent)
        with open_regular(console) as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - 20_000))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return printable("\n".join([line for line in lines if line.strip()][-10:]))


def last_line(console: Path) -> str:
    """Return the last non-empty line that a job printed; an empty string if there is none."""
    return message(console).rpartition("\n")[2]
