"""Record every change below a directory, and construct what a power loss at any moment may leave of it."""

from __future__ import annotations

import copy
import itertools
import os
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

NameChange = tuple[tuple[int, str, int | None], ...]
"""Names that change atomically, as (number of the directory, name, number of the entry or None if it is deleted)."""

DirectoryEntries = dict[int, dict[str, int]]
"""The entries of each directory: {number of the directory: {name: number of the entry}}."""

ROOT = 0
CALLS = ("fsync", "replace", "rename", "mkdir", "unlink", "remove", "rmdir")
UNSYNCED_OUTCOMES = ("kept", "lost", "torn", "zeros")
"""What may happen to file content that is not synced."""


@dataclass(frozen=True)
class DiskState:
    """The disk before or after `call`, such as `before fsync`: what survives a power loss, and what may survive."""

    call: str
    mark: Any
    durable_names: DirectoryEntries
    pending_changes: tuple[NameChange, ...]
    synced: dict[int, bytes]  # the content of files at their last fsync
    written: dict[int, bytes]  # their current content


class DiskRecorder:
    """A context that records the disk below `root` before and after each call in `CALLS`, as `instants`."""

    def __init__(self, root: Path):
        self.root = root
        self.mark: Any = None
        self.instants: list[DiskState] = []
        self._numbers: dict[int, int] = {}  # of inodes
        self._new_number = itertools.count(1)
        self._names: DirectoryEntries = {ROOT: {}}
        self._certain: DirectoryEntries = {ROOT: {}}
        self._pending: list[NameChange] = []
        self._synced: dict[int, bytes] = {}
        self._written: dict[int, bytes] = {}
        self._read: dict[int, tuple[int, int]] = {}

    def __enter__(self) -> DiskRecorder:
        self._patches = ExitStack()
        for name in CALLS:
            self._patches.enter_context(mock.patch.object(os, name, self._watched(name, getattr(os, name))))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        self._observe("the end")

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            self._observe(f"before {name}")
            result = call(*arguments, **options)
            if name == "fsync":
                self._sync(os.fstat(arguments[0]).st_ino)
            self._observe(f"after {name}")
            return result

        return wrapped

    def _observe(self, call: str) -> None:
        self._scan()
        certain, pending = copy.deepcopy(self._certain), tuple(self._pending)
        self.instants.append(DiskState(call, self.mark, certain, pending, dict(self._synced), dict(self._written)))

    def _sync(self, inode: int) -> None:
        number = self._numbers.get(inode)
        if number in self._written:
            self._synced[number] = self._written[number]
        elif number is not None:
            done = [change for change in self._pending if any(directory == number for directory, _, _ in change)]
            for change in done:
                apply_change(change, self._certain)
            self._pending = [change for change in self._pending if change not in done]

    def _scan(self) -> None:
        """Detect changes since the last scan, including those by libraries that do not call functions of `os`."""
        numbers, names = {os.stat(self.root).st_ino: ROOT}, {}
        written = dict(self._written)  # with deleted files, because a deletion may be lost
        folders = [(self.root, ROOT)]
        while folders:
            folder, number = folders.pop()
            names[number] = {}
            for entry in os.scandir(folder):
                about = entry.stat(follow_symlinks=False)
                each = self._numbers.get(about.st_ino)
                each = next(self._new_number) if each is None else each
                numbers[about.st_ino] = names[number][entry.name] = each
                version = about.st_mtime_ns, about.st_size
                if entry.is_dir(follow_symlinks=False):
                    folders.append((Path(entry.path), each))
                elif self._read.get(each) != version:
                    self._read[each], written[each] = version, Path(entry.path).read_bytes()
        self._pending += name_changes(self._names, names)
        self._numbers, self._names, self._written = numbers, names, written


def name_changes(before: DirectoryEntries, after: DirectoryEntries) -> Iterator[NameChange]:
    """Yield the changes of names from `before` to `after`; the old and the new name of an entry change together."""
    single: list[tuple[int, str, int | None]] = []
    for directory in {*before, *after}:
        old, new = before.get(directory, {}), after.get(directory, {})
        if directory in after:  # the entries of a deleted directory have no names anymore
            single += [(directory, name, new.get(name)) for name in {*old, *new} if old.get(name) != new.get(name)]
    was = {number: (directory, name) for directory, names in before.items() for name, number in names.items()}
    moved: set[tuple[int, str]] = set()
    for directory, name, number in single:
        if number is not None and was.get(number, (directory, name)) != (directory, name):
            source = was[number]
            moved |= {source, (directory, name)}
            yield (*source, after.get(source[0], {}).get(source[1])), (directory, name, number)
    for change in single:
        if change[:2] not in moved:
            yield (change,)


def apply_change(change: NameChange, names: DirectoryEntries) -> None:
    for directory, name, number in change:
        if number is None:
            names.get(directory, {}).pop(name, None)
        else:
            names.setdefault(directory, {})[name] = number


def state_after_power_loss(instant: DiskState, applied: Collection[int], content: str) -> dict[str, bytes | None]:
    """Return what a power loss leaves, by path: the content of each file, and None for each directory."""
    names = copy.deepcopy(instant.durable_names)
    for index, change in enumerate(instant.pending_changes):
        if index in applied:
            apply_change(change, names)
    found: dict[str, bytes | None] = {}
    folders = [(ROOT, "")]
    while folders:
        folder, prefix = folders.pop()
        for name, number in names.get(folder, {}).items():
            path = f"{prefix}{name}"
            if number in instant.written or number in instant.synced:
                synced = instant.synced.get(number, b"")
                found[path] = content_after_power_loss(synced, instant.written.get(number, synced), content)
            else:
                found[path] = None
                folders.append((number, f"{path}/"))
    return found


def content_after_power_loss(synced: bytes, written: bytes, content: str) -> bytes:
    """Return the content of a file after a power loss; what is synced survives, unless it was overwritten since."""
    if content == "kept" or synced == written:
        return written
    if content == "lost":
        return synced
    whole = len(synced) if written.startswith(synced) else 0
    half = whole + (len(written) - whole) // 2
    return written[:half] if content == "torn" else written[:half] + bytes(len(written) - half)


def possible_states(instants: list[DiskState], seed: int = 0) -> Iterator[tuple[DiskState, dict[str, bytes | None]]]:
    """Yield distinct states that a power loss may leave at the `instants`, for several subsets of pending changes."""
    draw, seen = random.Random(seed), set()
    for instant in instants:
        count = len(instant.pending_changes)
        subsets = [range(0), range(count), range(count // 2), range(count - 1)]
        subsets += [draw.sample(range(count), draw.randint(0, count)) for _ in range(3)]
        for applied, content in itertools.product(subsets, UNSYNCED_OUTCOMES):
            state = state_after_power_loss(instant, applied, content)
            key = hash((repr(instant.mark), *sorted((path, hash(data)) for path, data in state.items())))
            if key not in seen:
                seen.add(key)
                yield instant, state


def minimal_states(instants: list[DiskState]) -> Iterator[tuple[DiskState, dict[str, bytes | None]]]:
    """Yield what is synced at each of the `instants`, the least that a power loss leaves."""
    before: dict[str, bytes | None] = {}
    for instant in instants:
        state = state_after_power_loss(instant, (), "lost")
        if state != before:
            yield instant, state
        before = state


def write_state(state: dict[str, bytes | None], root: Path) -> None:
    for path, content in state.items():
        file = root / path
        if content is None:
            file.mkdir(parents=True, exist_ok=True)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
