"""Reads the console file of a job, to which the job prints."""

from __future__ import annotations

import os
from pathlib import Path

from runner.storage.files import check_no_link, open_regular
from runner.system.utf8 import printable


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
