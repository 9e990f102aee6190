"""The jobs of one `-m` command: where they are written, and which of them are done."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runner import directory
from runner.config import check

LEDGER = "sweep.json"
_SETTLED = (0, 3)
"""Exit codes of jobs that are not done again: done, and diverged, which is a result too."""


class Sweep:
    """A sweep, or the one before with the same overrides, which is gone on with under `resume=auto`.

    `sweep.json` in its directory is the ledger: what was typed, and of every job how it ended.

    Args:
        typed: the overrides of the command line.
    """

    def __init__(self, typed: Iterable[str]):
        said_elsewhere = ("resume=", "output_root=")
        self.typed = sorted(text for text in typed if not text.startswith(said_elsewhere))
        self._name = directory.unique_name()
        self._ledgers: dict[Path, dict[str, Any]] = {}  # by directory: jobs of several names have several

    def directory(self, parent: Path, resume: str) -> Path:
        """Where the jobs under `parent` are written: a new directory, or the unfinished one to go on in.

        Raises:
            ConfigError: when `resume` names a run: a sweep has several.
        """
        remedy = "resume=auto goes on with the unfinished sweep of the same overrides"
        check(resume in ("auto", "never"), "resume", resume, "a sweep cannot go on in one run's directory", remedy)
        for path in self._ledgers:
            if path.parent == parent:
                return path
        path, ledger = self._unfinished(parent) if resume == "auto" else (None, {})
        path = path or parent / self._name
        self._ledgers[path] = ledger or {"typed": self.typed, "complete": False, "jobs": {}}
        return path

    def _unfinished(self, parent: Path) -> tuple[Path | None, dict[str, Any]]:
        """The newest sweep under `parent` with the same overrides that is not complete, and its ledger."""
        for path in sorted(parent.glob("*"), reverse=True):
            ledger = read_ledger(path)
            if ledger.get("typed") == self.typed and not ledger.get("complete"):
                return path, ledger
        return None, {}

    def settled(self, path: Path, number: int, config_hash: str) -> int | None:
        """The exit code of job `number`, where an earlier command has brought it to its end; None where it is to do."""
        entry = self._ledgers[path]["jobs"].get(str(number), {})
        same = entry.get("config_hash") == config_hash and entry.get("code") in _SETTLED
        return entry["code"] if same else None

    def note(self, path: Path, number: int, **entry: Any) -> None:
        """Keep in the ledger how job `number` ended; nothing is written while no job has left anything."""
        ledger = self._ledgers[path]
        ledger["jobs"][str(number)] = entry
        self._write(path)

    def end(self) -> None:
        """All jobs have had their turn: the sweep is complete if none is left to be done."""
        for path, ledger in self._ledgers.items():
            ledger["complete"] = all(entry["code"] in _SETTLED for entry in ledger["jobs"].values())
            self._write(path)

    def _write(self, path: Path) -> None:
        if path.is_dir():
            directory.write_json(path / LEDGER, self._ledgers[path])


def read_ledger(path: Path) -> dict[str, Any]:
    """The ledger of the sweep at `path`; empty where there is none."""
    try:
        return json.loads((path / LEDGER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
