"""The ledger of a sweep (`-m`): the directory of each job, and how it ended."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from runner.config.errors import ConfigError, check
from runner.parallel.launch.cluster import external_rank_info
from runner.storage import run_directory
from runner.storage.durable_write import write_json
from runner.storage.run_directory import StorageError
from runner.storage.safe_read import read_regular
from runner.sweep.ledger_file import LEDGER, read_ledger
from runner.system.secrets import redacted, redacted_values
from runner.system.utf8 import printable

_SETTLED = (0, 3)
"""Exit codes of jobs that are not repeated: done and diverged."""


@dataclass
class _Opened:
    """The ledger of a sweep that this process runs.

    Args:
        content: the overrides of the command (`typed`), whether the sweep is `complete`, and its `jobs`.
        lock: the open lock file; None in a process that does not write the ledger, such as rank 1 under torchrun.
        existing: the deepest directory that existed before the sweep; None if the sweep is resumed.
    """

    content: dict[str, Any]
    lock: IO[str] | None = None
    existing: Path | None = None


class Sweep:
    """A new sweep or, with `resume=auto`, the unfinished sweep with the same overrides.

    The ledger is the file `sweep.json` in the directory of the sweep. It contains the overrides of the command, and how
    each job ended. Only one process at a time can run a sweep: it holds a lock on the directory until it leaves the
    context manager.

    Args:
        typed: the overrides on the command line.
        swept: the keys that have several values. They come first in the names of the jobs' directories.
    """

    def __init__(self, typed: Iterable[str], swept: Iterable[str] = ()):
        ignored = ("resume=", "output_root=")  # may differ when the sweep is resumed
        shown = redacted_values([text for text in typed if not text.startswith(ignored)])
        self.typed = sorted(printable(text) for text in shown)
        self._swept = frozenset(swept)
        self._name = run_directory.unique_name()
        self._ledgers: dict[Path, _Opened] = {}  # by directory, because a sweep over `name` has several

    def job_directory(self, config: dict[str, Any], number: int, overrides: list[str]) -> Path:
        """Return the path of a job's run directory, `<sweep>/<job>-<overrides>`; create `<sweep>` if it is new.

        Args:
            config: the resolved config of the job.
            number: the number of the job, from 0.
            overrides: the overrides of the job.

        Raises:
            ConfigError: if `resume` names the directory of a single run, another process runs this sweep, or the ledger
                is damaged or cannot be written.
        """
        root, name, resume = (str(config[key]) for key in ("output_root", "name", "resume"))
        return self._directory(Path(root, "sweeps", name), resume) / run_directory.job_name(
            number, overrides, self._swept
        )

    def _directory(self, parent: Path, resume: str) -> Path:
        """Return the directory, under `parent`, of the unfinished sweep to resume or else of a new sweep."""
        remedy = "resume=auto resumes the unfinished sweep with the same overrides"
        check(resume in ("auto", "never"), "resume", resume, "a sweep cannot be resumed in one run's directory", remedy)
        for path in self._ledgers:
            if path.parent == parent:
                return path
        process = external_rank_info()
        if process is not None and process.rank != 0:  # rank 0 creates the directory
            path, content = self._unfinished(parent) if resume == "auto" else (None, {})
            path = path or parent / self._name
            self._ledgers[path] = _Opened(content or self._new())
            return path
        existing = run_directory.nearest_existing(parent)
        with _one_at_a_time(parent):
            path, content = self._unfinished(parent) if resume == "auto" else (None, {})
            if path is None:
                path, content = parent / self._name, self._new()
                run_directory.create(parent, self._name)
            else:
                existing = None
            self._ledgers[path] = _Opened(content, _locked(path), existing)
            try:
                self._write(path)
            except StorageError as error:
                why = f"{LEDGER} cannot be written there ({error.why})"
                raise ConfigError("output_root", str(parent), why, "make room, or output_root=DIR elsewhere") from None
        return path

    def _new(self) -> dict[str, Any]:
        return {"typed": self.typed, "complete": False, "jobs": {}}

    def _unfinished(self, parent: Path) -> tuple[Path | None, dict[str, Any]]:
        """Return the newest incomplete sweep under `parent` with the same overrides, and its ledger.

        Return (None, {}) if there is no such sweep.
        """
        for path in sorted(parent.glob("*"), reverse=True):
            ledger = read_ledger(path, self.typed)
            if ledger.get("typed") == self.typed and not ledger.get("complete"):
                return path, ledger
        return None, {}

    def settled(self, path: Path, number: int, config_hash: str) -> int | None:
        """Return the exit code of job `number` if an earlier command finished it; None if the job has to be run."""
        entry = self._ledgers[path].content["jobs"].get(str(number), {})
        same = entry.get("config_hash") == config_hash and entry.get("code") in _SETTLED
        return entry["code"] if same else None

    def record(self, path: Path, number: int, **entry: Any) -> None:
        """Write how job `number` ended to the ledger of the sweep at `path`.

        Raises:
            StorageError: if the ledger cannot be written.
        """
        for key, show in (("overrides", redacted_values), ("error", redacted)):
            if key in entry:
                entry[key] = _printable(show(entry[key]))
        self._ledgers[path].content["jobs"][str(number)] = entry
        self._write(path)

    def end(self) -> None:
        """Mark the sweep as complete if no job has to be repeated. This must be called after the last job.

        Raises:
            StorageError: if the ledger cannot be written.
        """
        for path, ledger in self._ledgers.items():
            jobs = ledger.content["jobs"].values()
            ledger.content["complete"] = all(entry["code"] in _SETTLED for entry in jobs)
            self._write(path)

    def close(self) -> None:
        """Unlock the sweep. If the sweep is new and none of its jobs has run, remove its files and directories."""
        existing = [ledger.existing for ledger in self._ledgers.values() if ledger.existing is not None]
        for path, ledger in self._ledgers.items():
            if ledger.existing is not None:  # an earlier sweep, over another `name`, may have made some of the parents
                above = [folder for folder in existing if folder in path.absolute().parents]
                _remove_if_unused(path, min(above, key=lambda folder: len(folder.parts)))
            if ledger.lock is not None:
                ledger.lock.close()
        self._ledgers.clear()

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, path: Path) -> None:
        if self._ledgers[path].lock is None:
            return
        try:
            write_json(path / LEDGER, self._ledgers[path].content)
        except OSError as error:
            raise StorageError(path / LEDGER, error.strerror or str(error)) from error


@contextmanager
def _one_at_a_time(parent: Path) -> Iterator[None]:
    """Make other processes wait before they look for a sweep under `parent`, so that no two create the same sweep."""
    with ExitStack() as stack:
        with suppress(OSError):  # not every file system locks directories; an error is reported by `create`
            parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _locked(path: Path) -> IO[str]:
    """Lock the sweep at `path`, write the id of this process to the lock file, and return the open file.

    Raises:
        ConfigError: if another process holds the lock, or the file cannot be locked.
    """
    try:
        lock = run_directory.lock(path)
    except OSError as error:
        why = f"a file in it cannot be locked ({error.strerror})"
        raise ConfigError("output_root", str(path), why, "choose another with output_root=DIR") from None
    if lock is None:
        remedy = "wait for it, or stop it; resume=never starts another sweep"
        raise ConfigError("resume", "auto", f"{_holder(path)} runs this sweep, {path}", remedy)
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def _holder(path: Path) -> str:
    try:
        return f"another process (pid {int(read_regular(path / '.lock', 100))})"
    except (OSError, ValueError):
        return "another process"


def _printable(value: Any) -> Any:
    return [printable(text) for text in value] if isinstance(value, list) else printable(value)


def _remove_if_unused(path: Path, existing: Path) -> None:
    """Remove the sweep at `path` unless it has a job's directory, and then its empty parents below `existing`."""
    with suppress(OSError):  # on a disk that fails, the few files stay
        if not any(entry.is_dir() for entry in path.iterdir()):
            for file in (LEDGER, ".lock"):
                (path / file).unlink(missing_ok=True)
            run_directory.remove_empty(path, existing)
