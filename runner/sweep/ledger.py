"""The ledger of a sweep (`-m`): the directory of each job, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runner.config.errors import check
from runner.storage import run_directory

LEDGER = "sweep.json"
_SETTLED = (0, 3)
"""Exit codes of jobs that are not repeated: done and diverged."""


class Sweep:
    """A new sweep or, with `resume=auto`, the unfinished sweep with the same overrides.

    The ledger is the file `sweep.json` in its directory: the overrides of the command, and how each job ended.

    Args:
        typed: the overrides on the command line.
    """

    def __init__(self, typed: Iterable[str]):
        ignored = ("resume=", "output_root=")  # may differ when the sweep is resumed
        self.typed = sorted(text for text in typed if not text.startswith(ignored))
        self._name = run_directory.unique_name()
        self._ledgers: dict[Path, dict[str, Any]] = {}  # by directory, as a sweep over `name` has several

    def job_directory(self, config: dict[str, Any], number: int, overrides: list[str]) -> Path:
        """Return the run directory of a job, `<sweep>/<job>-<overrides>`.

        Args:
            config: the resolved config of the job.
            number: its number, from 0.
            overrides: its overrides.

        Raises:
            ConfigError: if `resume` is the directory of a run, as a sweep has several runs.
        """
        root, name, resume = (str(config[key]) for key in ("output_root", "name", "resume"))
        return self._directory(Path(root, "sweeps", name), resume) / run_directory.job_name(number, overrides)

    def _directory(self, parent: Path, resume: str) -> Path:
        """Return the directory of the sweep under `parent`, which is new unless an unfinished sweep is resumed."""
        remedy = "resume=auto resumes the unfinished sweep with the same overrides"
        check(resume in ("auto", "never"), "resume", resume, "a sweep cannot be resumed in one run's directory", remedy)
        for path in self._ledgers:
            if path.parent == parent:
                return path
        path, ledger = self._unfinished(parent) if resume == "auto" else (None, {})
        path = path or parent / self._name
        self._ledgers[path] = ledger or {"typed": self.typed, "complete": False, "jobs": {}}
        return path

    def _unfinished(self, parent: Path) -> tuple[Path | None, dict[str, Any]]:
        """Return the newest incomplete sweep under `parent` with the same overrides, and its ledger."""
        for path in sorted(parent.glob("*"), reverse=True):
            ledger = read_ledger(path)
            if ledger.get("typed") == self.typed and not ledger.get("complete"):
                return path, ledger
        return None, {}

    def settled(self, path: Path, number: int, config_hash: str) -> int | None:
        """Return the exit code of a job that an earlier command has finished; None if the job has to be run."""
        entry = self._ledgers[path]["jobs"].get(str(number), {})
        same = entry.get("config_hash") == config_hash and entry.get("code") in _SETTLED
        return entry["code"] if same else None

    def record(self, path: Path, number: int, **entry: Any) -> None:
        """Record how job `number` ended. The ledger is not written before the first job has made the directory."""
        ledger = self._ledgers[path]
        ledger["jobs"][str(number)] = entry
        self._write(path)

    def end(self) -> None:
        """Mark the sweep as complete if no job has to be repeated; called after the last job."""
        for path, ledger in self._ledgers.items():
            ledger["complete"] = all(entry["code"] in _SETTLED for entry in ledger["jobs"].values())
            self._write(path)

    def _write(self, path: Path) -> None:
        if path.is_dir():
            run_directory.write_json(path / LEDGER, self._ledgers[path])


def read_ledger(path: Path) -> dict[str, Any]:
    """Return the ledger of the sweep at `path`; empty if there is none."""
    try:
        return json.loads((path / LEDGER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
