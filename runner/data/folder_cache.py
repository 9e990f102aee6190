"""A cache of what the directories of a data set contain, so that a run does not list ten thousands of files each time.

A cached listing is used only while it is sure to be that of the directories. Adding, removing or renaming an entry
changes the times of its directory, of which nobody can set the second one (`st_ctime`). A listing is kept

- with the times, device and inode of every directory, taken before the directory was listed: a change since then,
  even while it was being listed, makes the listing invalid;
- only if no directory has changed in the last `_QUIET` seconds: two changes within one tick of a file system's clock
  could not be told apart;
- only if no directory is a symbolic link, whose target could change without a trace in the directory that has the link;
- with a checksum: a damaged file is no listing.

What is in a file of an image is not cached, and a file that is gone cannot be read, which ends the run or is reported.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from runner.storage.durable_write import write_text
from runner.system.user_cache import cache_directory

_QUIET = 10.0
_LEAST_FILES = 2_000
"""Fewer files are listed faster than a cached listing is checked."""

_FORMAT = 1
"""Changed whenever other files would be listed, or listed in another form."""

Stamp = list[int]


class Listing(NamedTuple):
    """What the directories of a data set contain.

    Args:
        values: the listing, of plain values.
        directories: the path of every directory that was listed, with its `stamp` before it was; None if the listing
            must not be cached.
        num_files: number of files in it.
    """

    values: Any
    directories: dict[str, Stamp] | None
    num_files: int


def stamp(directory: str) -> Stamp:
    """Return the times of modification and change in nanoseconds, the inode and the device of `directory`.

    At least one of them changes whenever an entry is added, removed or renamed.
    """
    found = os.stat(directory)
    return [found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def cached(key: Iterable[Any], listed: Callable[[], Listing]) -> Any:
    """Return the values of a listing: of the cached one if it is still valid, otherwise of `listed()`, which is cached.

    Args:
        key: on what the listing depends besides the directories, as JSON.
        listed: function that lists the directories.
    """
    text = json.dumps([_FORMAT, *key])
    path = cache_directory("folders") / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return _read(path, text)
    now = time.time()
    listing = listed()
    stamps = listing.directories
    if stamps and listing.num_files >= _LEAST_FILES and _latest(stamps) < now - _QUIET:
        body = json.dumps({"key": text, "directories": stamps, "values": listing.values})
        with suppress(OSError):  # a directory that cannot be written to, or is full
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, f"{_checksum(body)}\n{body}")
    return listing.values


def _latest(stamps: dict[str, Stamp]) -> float:
    return max(max(modified, changed) for modified, changed, *_ in stamps.values()) / 1e9


def _read(path: Path, key: str) -> Any:
    """Return the values in the file `path`.

    Raises:
        OSError, ValueError, KeyError, TypeError: if there is no listing, or it is not that of the directories.
    """
    checksum, _, body = path.read_text(encoding="utf-8").partition("\n")
    if checksum != _checksum(body):
        raise ValueError("damaged")
    found = json.loads(body)
    if found["key"] != key or any(stamp(each) != before for each, before in found["directories"].items()):
        raise ValueError("another listing")
    return found["values"]


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
