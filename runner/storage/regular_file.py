"""Safe reading of files from untrusted sources: links, pipes, devices and files that are too large are refused."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from runner.config.errors import ConfigError

MOST_LEVELS = 50
"""The maximum depth of nested directories from an untrusted source."""


class UnsafeFileError(OSError):
    """Raised for a link, a path of an unexpected type, a file that is too large, or directories nested too deeply."""


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: path of the file.
        limit_bytes: maximum size of the file in bytes.

    Raises:
        UnsafeFileError: if `path` is a link, a pipe, a socket or a device, or the file is too large.
        OSError: if `path` cannot be read, for example because it is a directory.
    """
    with open_regular(path) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise _unsafe(path, f"it has more than {limit_bytes:,} bytes")
    return content


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    If `path` is a pipe, this function raises an error at once, instead of waiting until another process opens the pipe.

    Raises:
        UnsafeFileError: if `path` is a link, a pipe, a socket or a device.
        OSError: if `path` cannot be opened, for example because it is a directory.
    """
    _check_regular(path, os.lstat(path))  # before opening, because that alone may make the driver of a device act
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor))  # another process may have replaced it in between
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


@contextmanager
def utf8_path(path: Path) -> Iterator[Path]:
    """Yield a path that is valid UTF-8 and leads to the file `path`; some libraries accept no other paths."""
    try:
        str(path).encode()
    except UnicodeEncodeError:  # only Linux has such names
        with open_regular(path) as file:
            yield Path(f"/proc/self/fd/{file.fileno()}")
    else:
        yield path


def check_no_link(directory: Path) -> None:
    """Check that `directory`, if it exists, is a directory and not a symbolic link.

    Raises:
        UnsafeFileError: if `directory` is a link, or anything else that is not a directory.
    """
    try:
        mode = os.lstat(directory).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        raise _refusal(directory, mode, "a directory")


def check_readable(key: str, path: Path) -> None:
    """Check that this process has permission to look up `path` and, if it is a directory, to list its entries.

    Call this before `path.exists()`, `path.is_file()` or `path.is_dir()`, which raise an error if this process lacks
    the permission to search a directory above `path`.

    Args:
        key: the config key that the error names.
        path: a path that need not exist.

    Raises:
        ConfigError: with the key `key`, if this process lacks one of these permissions, or if `path` is too long.
    """
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            os.scandir(path).close()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a path with a null character
        return
    except OSError as error:
        remedy = "make it and the directories above it readable, or name another"
        raise ConfigError(key, str(path), f"it cannot be read ({error.strerror})", remedy) from None


def _check_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise _refusal(path, status.st_mode, "a regular file")


def _refusal(path: Path, mode: int, wanted: str) -> UnsafeFileError:
    return _unsafe(
        path, "it is a symbolic link, which is not followed" if stat.S_ISLNK(mode) else f"it is not {wanted}"
    )


def _unsafe(path: Path, why: str) -> UnsafeFileError:
    return UnsafeFileError(errno.EPERM, why, str(path))


def is_locked(path: Path) -> bool:
    """Return whether a process holds an exclusive lock on the file `path`.

    If `path` cannot be opened as a regular file, the result is False.
    """
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def walk(top: Path, onerror: Callable[[OSError], object] | None = None) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield what `os.walk` yields, except directories that are more than `MOST_LEVELS` levels below `top`.

    The limit is needed because `os.walk` is recursive before Python 3.12, and fails on a thousand nested directories.

    Args:
        top: the directory at which the walk begins.
        onerror: function that is called with the error if a directory cannot be listed; None to ignore the error. The
            directory is skipped unless `onerror` raises an exception.
    """
    levels = os.path.join(top, "").count(os.sep)
    for folder, folders, files in os.walk(top, onerror=onerror):
        if folder.count(os.sep) >= levels + MOST_LEVELS - 1:
            folders.clear()
        yield folder, folders, files
