"""A cache of the listings of a data set's directories, so that not every run has to list tens of thousands of files.

A cached listing is used only if it is certain that the directories have not changed. Adding, removing or renaming an
entry changes the modification time and the change time of its directory. Programs can set the modification time, but
not the change time (`st_ctime`).

A listing is cached only under these conditions:

- No directory changed in the `_QUIET` seconds before it was listed. If a directory changed twice within one tick of the
  file system's clock, the second change would not be visible in the times.
- There are no symbolic links, except links to image files. The target of a link can be changed or replaced without
  changing the times of the directory that contains the link.

A cached listing contains:

- The times, inode and device of every directory, taken before the directory was listed. If a directory changes later,
  even while it is being listed, the cached listing becomes invalid.
- A checksum, by which a damaged cache file is recognized.

The content of image files is not cached. If a file is deleted during a run, the run treats it as unreadable.
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
"""The minimum number of files for a listing to be cached. Listing fewer is faster than checking a cached listing."""

_FORMAT = 2
"""The version of the listings, to be increased when the code lists other files, or returns them in another form."""

Stamp = list[int]


class Listing(NamedTuple):
    """What the directories of a data set contain.

    Args:
        values: the listing, as plain values for JSON.
        directories: a dict from the path of each directory to its `stamp`, taken before the directory was listed; None
            if the listing must not be cached.
        num_files: number of files in the directories.
    """

    values: Any
    directories: dict[str, Stamp] | None
    num_files: int


def stamp(directory: str) -> Stamp:
    """Return the times of modification and change in nanoseconds, the inode and the device of `directory`.

    At least one of them changes whenever an entry is added, removed or renamed.

    Raises:
        OSError: if `directory` does not exist or cannot be accessed.
    """
    found = os.stat(directory)
    return [found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def cached(key: Iterable[Any], listed: Callable[[], Listing]) -> Any:
    """Return the values of the cached listing if it is still valid; otherwise, return the values of a new listing.

    The new listing is cached if it has at least `_LEAST_FILES` files and meets the conditions in the docstring of this
    module.

    Args:
        key: the path of the data set, the options, and anything else that affects the listing, apart from the content
            of the directories. The values must be of types that JSON supports.
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
    """Return the values of the cached listing in the file `path`.

    Args:
        path: the cache file.
        key: the expected key of the listing, as JSON.

    Raises:
        OSError, ValueError, KeyError, TypeError: if there is no listing, or it is damaged, has another key, or is no
            longer valid.
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
