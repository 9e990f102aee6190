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


@dataclass(frozen=True)
class DiskFault:
    """A disk fault: a file operation fails at one call, or at all calls from some call on.

    Args:
        call: the operation: `open` (for writing), `write`, `fsync`, `rename` or `mkdir`.
        file: pattern that the end of the path must match. For `rename`, the new path must match.
        errno_code: the errno of the error.
        first_failing_call: number of the first call that fails. Only calls of this operation on paths that match `file`
            are counted, starting at 1.
        fails_once: whether the calls after the first failing call succeed.
    """

    call: str
    file: str
    errno_code: int
    first_failing_call: int = 1
    fails_once: bool = False

    def __str__(self) -> str:
        return f"{errno.errorcode[self.errno_code]} at {self.call} {self.first_failing_call} of {self.file}"


class _FailingFile:
    """A wrapper of a file that calls `fail`, which may raise an error, before each write."""

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


class _FaultyCalls:
    def __init__(self, fault: DiskFault):
        self.fault, self.calls = fault, 0

    def matches(self, path: object) -> bool:
        try:
            text = os.fspath(path)  # pyright: ignore[reportArgumentType, reportCallIssue]
        except TypeError:
            return False
        text = text if isinstance(text, str) else os.fsdecode(text)
        return fnmatchcase(text, f"*{self.fault.file}") or fnmatchcase(text, f"*{self.fault.file}.part")

    def fail(self, path: object) -> None:
        self.calls += 1
        if self.calls == self.fault.first_failing_call or (
            self.calls > self.fault.first_failing_call and not self.fault.fails_once
        ):
            raise OSError(self.fault.errno_code, os.strerror(self.fault.errno_code), str(path))

    def open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, mode: Any = "r", *rest: Any, **options: Any) -> Any:
            writes = bool(set(str(mode)) & set("wxa+")) if isinstance(mode, str) else bool(mode & 3)
            if not writes or not self.matches(path):
                return original(path, mode, *rest, **options)
            if self.fault.call == "open":
                self.fail(path)
            file = original(path, mode, *rest, **options)
            is_file = self.fault.call == "write" and not isinstance(file, int)
            return _FailingFile(file, lambda: self.fail(path)) if is_file else file

        return opened

    def fsync(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def synced(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if self.fault.call == "fsync" and self.matches(path):
                self.fail(path)
            original(descriptor)

        return synced

    def replace(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(source: Any, target: Any, **options: Any) -> None:
            if self.fault.call == "rename" and self.matches(target):
                self.fail(target)
            original(source, target, **options)

        return replaced

    def mkdir(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def made(path: Any, *rest: Any, **options: Any) -> None:
            if self.fault.call == "mkdir" and self.matches(path):
                self.fail(path)
            original(path, *rest, **options)

        return made

    def save_file(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def saved(tensors: Any, path: Any, *rest: Any, **options: Any) -> None:
            if self.fault.call in ("open", "write") and self.matches(path):
                try:
                    self.fail(path)
                except OSError as error:
                    Path(path).write_bytes(b"half")
                    why = f"I/O error: {error.strerror} (os error {error.errno})"
                    raise SafetensorError(f"Error while serializing: {why}") from None
            original(tensors, path, *rest, **options)

        return saved


@contextmanager
def inject_disk_fault(fault: DiskFault) -> Iterator[Callable[[], bool]]:
    """A context in which file operations fail as `fault` describes.

    Yields a function that returns whether a file operation has failed so far.
    """
    faulty = _FaultyCalls(fault)
    patches = [
        (io, "open", faulty.open),
        (builtins, "open", faulty.open),
        (os, "open", faulty.open),
        (os, "fsync", faulty.fsync),
        (os, "replace", faulty.replace),
        (os, "mkdir", faulty.mkdir),
        (safetensors.torch, "save_file", faulty.save_file),
    ]
    with ExitStack() as stack:
        for owner, name, wrapped in patches:
            stack.enter_context(mock.patch.object(owner, name, wrapped(getattr(owner, name))))
        yield lambda: faulty.calls >= fault.first_failing_call
