"""The ledger of a sweep (`-m`): the file `sweep.json`, which records the state and the exit code of each job."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from runner.config.errors import ConfigError, check
from runner.config.overrides import canonical_override, override_key
from runner.config.references import with_variables
from runner.storage import run_directory
from runner.storage.files import UnsafeFileError, write_text
from runner.storage.ledger_file import LEDGER, read_ledger
from runner.storage.run_directory import StorageError, storage_errors
from runner.system.console import CRASHED, REFUSED
from runner.system.secrets import printable, redacted, redacted_values

CONSOLE = "console"
"""The folder in a sweep's directory that holds the output of the jobs, one file per job."""

SLURM = "slurm"
"""The folder in a sweep's directory for the files of submitit."""

OPTIONS = "conf"
"""The folder in a sweep's directory to which a search writes its best trial, as an option of the group `experiment`."""

STUDY = "study.log"
"""The file in a sweep's directory in which Optuna stores the trials of a search."""

SHARED_KEYS = ("output_root", "resume", "sweep")
"""Keys and groups that say where and how a sweep runs, and not what its jobs compute. They may differ in a resume."""

SETTLED = (0, 3)
"""Exit codes of jobs that are not run again when a sweep is resumed: 0 (done) and 3 (diverged)."""


def console_file(path: Path, number: int) -> Path:
    """Return the file for what job `number` of the sweep in the directory `path` prints."""
    return path / CONSOLE / f"{number:03d}.txt"


class Ledger:
    """The ledger of a sweep, which is stored in the file `sweep.json`. Credentials are not stored.

    With `resume=auto`, the newest unfinished sweep with the overrides `typed` is resumed, if there is one. Otherwise, a
    new sweep is created. This class is a context manager, which locks the sweep's directory: only one process at a time
    can run the sweep. If the sweep is new and none of its jobs has run, its directory is removed at the end.

    Args:
        typed: the overrides on the command line; the attribute has those that identify the sweep, canonical and sorted.
        root: the directory that contains all sweeps with the same value of the config key `name`.
        resume: `auto` or `never`.
        is_search: whether it is a search, which is resumed also if it is complete, as it may have more trials now.

    Attributes:
        path: the directory of the sweep.
        jobs: the entry of each job that was started or refused, by number; `runner.storage.ledger_file` has its keys.
        num_jobs: the number of all jobs; 0 until the caller sets it.
        metrics: the `min` or `max` of the metrics by which the jobs are compared, as far as the caller sets them.
        complete: whether no job has to be run again; the caller resets it when a search continues.

    Raises:
        ConfigError: if `resume` is neither `auto` nor `never`, another process runs this sweep, the ledger is damaged,
            or the sweep's directory contains a link or cannot be created, locked or written to.
    """

    def __init__(self, typed: Iterable[str], root: Path, resume: str, is_search: bool = False):
        last = {override_key(text): canonical_override(with_variables(text)) for text in typed}
        shown = redacted_values([text for key, text in last.items() if key.partition(".")[0] not in SHARED_KEYS])
        self._is_search = is_search
        self.typed = sorted(printable(text) for text in shown)
        self.jobs: dict[int, dict[str, Any]] = {}
        self.num_jobs, self.complete = 0, False
        self.metrics: dict[str, str] = {}
        remedy = "resume=auto resumes the unfinished sweep with the same overrides"
        check(resume in ("auto", "never"), "resume", resume, "a sweep cannot be resumed in one run's directory", remedy)
        with ExitStack() as undo:
            path = self._resumable(root) if resume == "auto" else None
            if path is None:
                path, existing = root / run_directory.unique_name(), run_directory.nearest_existing(root)
                run_directory.create(root, path.name)
                undo.callback(_remove_if_unused, path, existing)
            self.path = path
            undo.enter_context(_locked(path))
            try:
                self._write()
            except StorageError as error:
                why = f"{LEDGER} cannot be written there ({error.why})"
                raise ConfigError("output_root", str(root), why, "make room, or output_root=DIR elsewhere") from None
            self._undo = undo.pop_all()

    def _resumable(self, root: Path) -> Path | None:
        """Load the newest sweep in `root` with the same overrides; return its directory, or None if there is none."""
        for path in reversed(run_directory.readable_entries(root)):
            found = read_ledger(path, self.typed)
            is_complete = found.get("complete") and not (self._is_search and (path / STUDY).is_file())
            if found.get("typed") == self.typed and not is_complete:
                self.jobs = {int(number): entry for number, entry in found["jobs"].items()}
                self.complete, self.num_jobs = found["complete"], found.get("num_jobs", 0)
                return path
        return None

    def update(self, number: int, **changes: Any) -> None:
        """Change the entry of job `number`, and write the ledger to its file; the value None removes a key.

        Raises:
            StorageError: if the ledger cannot be written. The entry in `jobs` has changed nevertheless.
        """
        if changes.get("overrides") is not None:
            changes["overrides"] = [printable(text) for text in redacted_values(changes["overrides"])]
        if changes.get("error") is not None:
            changes["error"] = printable(redacted(changes["error"]))
        entry = {**self.jobs.get(number, {}), **changes}
        self.jobs[number] = {key: value for key, value in entry.items() if value is not None}
        self._write()

    @property
    def settled_states(self) -> dict[int, str]:
        """The states of the jobs that need not run again, by number; in a search, also of those that failed."""
        codes = {*SETTLED, CRASHED, REFUSED} if self._is_search else {*SETTLED}
        settled = {n: job for n, job in self.jobs.items() if job.get("code") in codes or job.get("state") == "pruned"}
        return {number: str(job.get("state", "")) for number, job in settled.items()}

    def end(self, complete: bool) -> None:
        """Record that the sweep has ended; if it is not `complete`, it can be resumed."""
        self.complete = complete
        self._write()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _write(self) -> None:
        head = {"typed": self.typed, "complete": self.complete, "pid": os.getpid(), "num_jobs": self.num_jobs}
        head |= {"metrics": self.metrics} if self.metrics else {}
        jobs = ",\n".join(f'"{number}": {json.dumps(job, ensure_ascii=False)}' for number, job in self.jobs.items())
        with storage_errors(self.path / LEDGER):
            write_text(self.path / LEDGER, f'{json.dumps(head, ensure_ascii=False)[:-1]}, "jobs": {{\n{jobs}\n}}}}\n')


def _locked(path: Path) -> IO[str]:
    """Lock the sweep at `path`, and return the lock file. Links, through which it would write, are refused."""
    try:
        for folder in (path / CONSOLE, path / OPTIONS):
            if os.path.lexists(folder):
                run_directory.check_regular(folder)  # through a link, files elsewhere would be written
        lock = run_directory.lock(path)
    except UnsafeFileError as error:
        remedy = "resume=never starts another sweep"
        raise ConfigError("resume", str(error.filename), str(error.strerror), remedy) from None
    except OSError as error:
        why = f"a file in it cannot be locked ({error.strerror})"
        raise ConfigError("output_root", str(path), why, "choose another with output_root=DIR") from None
    if lock is None:
        remedy = "wait for it, or stop it; resume=never starts another sweep"
        why = f"another process (pid {read_ledger(path).get('pid', 'unknown')}) runs this sweep, {path}"
        raise ConfigError("resume", "auto", why, remedy)
    return lock


def _remove_if_unused(path: Path, existing: Path) -> None:
    """Remove the sweep's directory `path` and its empty parents below `existing`, unless `path` has a run directory."""
    with suppress(OSError):  # on a disk that fails, the few files stay
        if not any(entry.is_dir() and entry.name not in (CONSOLE, SLURM) for entry in path.iterdir()):
            shutil.rmtree(path)
            run_directory.remove_empty(path.parent, existing)
