"""Make file operations fail as on a full, broken or read-only disk."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
from safetensors import SafetensorError


@dataclass
class DiskFault:
    """The operation `call` fails with `errno_code`, from its `first_failing_call` on.

    Args:
        call: `open` (for writing), `write`, `fsync`, `rename` (to a path that matches) or `mkdir`.
        file: pattern that the end of the path must match; calls on other paths are not counted.
    """

    call: str
    file: str
    errno_code: int
    first_failing_call: int = 1
    count: int = 0

    def __str__(self) -> str:
        return f"{errno.errorcode[self.errno_code]} at {self.call} {self.first_failing_call} of {self.file}"

    def reach(self, path: Any, *calls: str) -> None:
        """Count one of `calls` on `path`, and raise an error if it is to fail."""
        if self.call in calls and self.matches(path):
            self.count += 1
            if self.count >= self.first_failing_call:
                raise OSError(self.errno_code, os.strerror(self.errno_code), str(path))

    def matches(self, path: Any) -> bool:
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        return fnmatchcase(text, f"*{self.file}") or fnmatchcase(text, f"*{self.file}.part")


class _FailingFile:
    def __init__(self, file: Any, fail: Callable[[], None]):
        self._file, self._fail = file, fail

    def write(self, data: Any) -> int:
        self._fail()
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _FailingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)


@contextmanager
def inject_disk_fault(fault: DiskFault) -> Iterator[Callable[[], bool]]:
    """A context in which file operations fail as `fault` describes; yields whether one has failed so far."""
    fault.count = 0
    open_file, fsync, replace, mkdir = open, os.fsync, os.replace, os.mkdir
    open_descriptor, save_file = os.open, safetensors.torch.save_file

    def opened(path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if not set(mode) & set("wxa+") or not fault.matches(path):
            return open_file(path, mode, *rest, **options)
        fault.reach(path, "open")
        file = open_file(path, mode, *rest, **options)
        return _FailingFile(file, lambda: fault.reach(path, "write")) if fault.call == "write" else file

    def opened_descriptor(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & 3:
            fault.reach(path, "open")
        return open_descriptor(path, flags, *rest, **options)

    def synced(descriptor: int) -> None:
        fault.reach(os.readlink(f"/proc/self/fd/{descriptor}"), "fsync")
        fsync(descriptor)

    def replaced(source: Any, target: Any, **options: Any) -> None:
        fault.reach(target, "rename")
        replace(source, target, **options)

    def made(path: Any, *rest: Any, **options: Any) -> None:
        fault.reach(path, "mkdir")
        mkdir(path, *rest, **options)

    def saved(tensors: Any, path: Any, *rest: Any, **options: Any) -> None:
        try:
            fault.reach(path, "open", "write")
        except OSError as error:
            Path(path).write_bytes(b"half")
            why = f"I/O error: {error.strerror} (os error {error.errno})"
            raise SafetensorError(f"Error while serializing: {why}") from None
        save_file(tensors, path, *rest, **options)

    with ExitStack() as stack:
        for owner, name, faulty in (
            *((io, "open", opened), (builtins, "open", opened), (os, "open", opened_descriptor)),
            *((os, "fsync", synced), (os, "replace", replaced), (os, "mkdir", made)),
            (safetensors.torch, "save_file", saved),
        ):
            stack.enter_context(mock.patch.object(owner, name, faulty))
        yield lambda: fault.count >= fault.first_failing_call
