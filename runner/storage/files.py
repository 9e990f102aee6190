"""Durable writing of small files, and safe reading of files from untrusted sources: no links, pipes or devices."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from runner.config.errors import ConfigError

MAX_LEVELS = 50
"""The maximum depth of nested directories from an untrusted source."""


class UnsafeFileError(OSError):
    """Raised for a link, a path of an unexpected type, a file that is too large, or directories nested too deeply."""


def json_text(value: object) -> str:
    """Return `value` as indented JSON with a line break at its end."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, in the same way as `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path`, which has its old or its new content even after a crash or a power loss.

    Raises:
        OSError: if the file cannot be written, or its directory cannot be flushed to disk.
    """
    with renamed_together({path: content}):
        pass


@contextmanager
def renamed_together(contents: Mapping[Path, bytes]) -> Iterator[None]:
    """A context manager that writes temporary files, and renames them when the block ends without an exception.

    Raises:
        OSError: before the block, if the files cannot be written, for example because the disk is full.
    """
    parts = {path: path.with_name(f".{path.name}.part") for path in contents}
    try:
        for path, part in parts.items():
            part.unlink(missing_ok=True)
            with part.open("xb") as file:  # never through a link that has that name
                file.write(contents[path])
                file.flush()
                os.fsync(file.fileno())
        yield
    except BaseException:
        with suppress(OSError):
            for part in parts.values():
                part.unlink(missing_ok=True)
        raise
    for path, part in parts.items():
        os.replace(part, path)
    for directory in {path.parent for path in contents}:
        sync(directory)


def sync(path: Path) -> None:
    """Flush the file `path` to disk. If `path` is a directory, flush only its list of entries, not the files in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a regular file of at most `limit_bytes`.

    Raises:
        UnsafeFileError: if `path` is a link, a pipe, a socket or a device, or the file is too large.
        OSError: if `path` cannot be read, for example because it is a directory.
    """
    with open_regular(path) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise UnsafeFileError(errno.EPERM, f"it has more than {limit_bytes:,} bytes", str(path))
    return content


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; raise the errors of `read_regular`, for a pipe without waiting for a writer."""
    _check_regular(path, os.lstat(path))  # before opening, because that alone may make the driver of a device act
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor))  # another process may have replaced it in between
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise _refusal(path, status.st_mode, "a regular file")


def _refusal(path: Path, mode: int, wanted: str) -> UnsafeFileError:
    why = "a symbolic link, which is not followed" if stat.S_ISLNK(mode) else f"not {wanted}"
    return UnsafeFileError(errno.EPERM, f"it is {why}", str(path))


def check_no_link(directory: Path) -> None:
    """Raise an `UnsafeFileError` if `directory` exists, and is a link or anything else that is not a directory."""
    with suppress(FileNotFoundError):
        mode = os.lstat(directory).st_mode
        if not stat.S_ISDIR(mode):
            raise _refusal(directory, mode, "a directory")


def check_readable(key: str, path: Path) -> None:
    """Check that this process may look up `path`, which need not exist, and list its entries if it is a directory.

    Raises:
        ConfigError: with the key `key`, if a permission is missing, or `path` is too long.
    """
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            os.scandir(path).close()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a path with a null character
        return
    except OSError as error:
        remedy = "make it and the directories above it readable, or name another"
        raise ConfigError(key, str(path), f"it cannot be read ({error.strerror})", remedy) from None


def is_locked(path: Path) -> bool:
    """Return whether a process holds an exclusive lock on the file `path`; False if it is no regular file."""
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def walk(top: Path, onerror: Callable[[OSError], object] | None = None) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield what `os.walk` yields, up to `MAX_LEVELS` below `top`: it fails on a thousand levels before Python 3.12."""
    levels = os.path.join(top, "").count(os.sep)
    for folder, folders, files in os.walk(top, onerror=onerror):
        if folder.count(os.sep) >= levels + MAX_LEVELS - 1:
            folders.clear()
        yield folder, folders, files
