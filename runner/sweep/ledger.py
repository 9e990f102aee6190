"""The jobs of one `-m` command: where they are written, and which of them are done."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runner.config.errors import check
from runner.storage import run_directory

LEDGER = "sweep.json"
_SETTLED = (0, 3)
"""Exit codes of jobs that are not done again: done, and diverged, which is a result too."""


class Sweep:
    """A sweep: a new one or, under `resume=auto`, the unfinished one with the same overrides.

    `sweep.json` in its directory is the ledger: what was typed, and how every job ended.

    Args:
        typed: the overrides of the command line.
    """

    def __init__(self, typed: Iterable[str]):
        not_of_the_sweep = ("resume=", "output_root=")
        self.typed = sorted(text for text in typed if not text.startswith(not_of_the_sweep))
        self._name = run_directory.unique_name()
        self._ledgers: dict[Path, dict[str, Any]] = {}  # by directory: jobs of several names have several

    def job_directory(self, config: dict[str, Any], number: int, overrides: list[str]) -> Path:
        """Where job `number`, whose resolved config is `config`, is written: `<sweep>/<job>-<overrides>`.

        Raises:
            ConfigError: when `resume` names a run: a sweep has several.
        """
        root, name, resume = (str(config[key]) for key in ("output_root", "name", "resume"))
        return self._directory(Path(root, "sweeps", name), resume) / run_directory.job_name(number, overrides)

    def _directory(self, parent: Path, resume: str) -> Path:
        """The directory of the jobs under `parent`: a new one, or that of the unfinished sweep.

        Raises:
            ConfigError: when `resume` names a run: a sweep has several.
        """
        remedy = "resume=auto continues the unfinished sweep of the same overrides"
        check(resume in ("auto", "never"), "resume", resume, "a sweep cannot be resumed in one run's directory", remedy)
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
        """The exit code of job `number`, where an earlier command has finished it; None where it is to be done."""
        entry = self._ledgers[path]["jobs"].get(str(number), {})
        same = entry.get("config_hash") == config_hash and entry.get("code") in _SETTLED
        return entry["code"] if same else None

    def record(self, path: Path, number: int, **entry: Any) -> None:
        """Record in the ledger how job `number` ended; nothing is written while no job has written anything."""
        ledger = self._ledgers[path]
        ledger["jobs"][str(number)] = entry
        self._write(path)

    def end(self) -> None:
        """All jobs were tried: the sweep is complete if none has to be tried again."""
        for path, ledger in self._ledgers.items():
            ledger["complete"] = all(entry["code"] in _SETTLED for entry in ledger["jobs"].values())
            self._write(path)

    def _write(self, path: Path) -> None:
        if path.is_dir():
            run_directory.write_json(path / LEDGER, self._ledgers[path])


def read_ledger(path: Path) -> dict[str, Any]:
    """The ledger of the sweep at `path`; empty where there is none."""
    try:
        return json.loads((path / LEDGER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
