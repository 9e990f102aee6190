"""The run directory: made exclusively, never shared, holding all that a run leaves."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from runner.config.errors import ConfigError

RESULT = "result.json"
_LONGEST = 120
"""Bytes of a job's name: file systems take 255, and a terminal shows fewer."""


class StorageError(Exception):
    """A file of a run cannot be written: the disk is full, or gone."""

    def __init__(self, path: Path, why: str):
        super().__init__(path, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        return (
            f"{self.path} cannot be written: {self.why}\n"
            "  the checkpoints before are whole: make room on the disk, then resume (keep=1 needs the least room)"
        )


def unique_name() -> str:
    """`<date>_<time>-<id>`: sorts by time; the id tells apart what starts in the same second."""
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(3)}"


def create(parent: Path, name: str | None = None) -> Path:
    """A new directory under `parent`.

    Raises:
        ConfigError: when it cannot be made (a read-only or full disk, a file in the way).
    """
    why = None
    for _ in range(10):
        directory = parent / (name or unique_name())
        try:
            directory.mkdir(parents=True)
            return directory.resolve()
        except (FileExistsError, FileNotFoundError) as error:  # taken; or another process removed an empty parent
            why = error.strerror
        except OSError as error:
            why = error.strerror
            break
    why = f"no run directory can be made there ({why})"
    raise ConfigError("output_root", str(parent), why, "choose another with output_root=DIR")


def nearest_existing(path: Path) -> Path:
    """`path`, or the first directory above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def remove_empty(path: Path, end: Path) -> None:
    """Remove the empty directory at `path`, and those above it that are empty then, up to but not `end`."""
    with suppress(OSError):  # not empty: another run is there, or has just come
        for place in (path.absolute(), *path.absolute().parents):
            if place == end:
                return
            place.rmdir()


def job_name(number: int, overrides: list[str]) -> str:
    """`<job>-<overrides>` of a sweep's job, as a directory name."""
    labels = [re.sub(r"[^\w.=,+-]", "_", text.replace("'", "").replace('"', "")) for text in overrides]
    while len(labels) > 1 and len(f"{number:03d}-{','.join(labels)}".encode()) > _LONGEST:
        labels.pop()
    return f"{number:03d}-{','.join(labels)}".encode()[:_LONGEST].decode(errors="ignore").rstrip(".-")


def write_config(directory: Path, config: dict[str, Any], overrides: list[str]) -> None:
    """Leave the resolved config, and what the user typed of it."""
    _write_whole(directory / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(overrides)))
    _write_whole(directory / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(config)))  # last: it makes it a run's


def write_json(path: Path, value: object) -> None:
    """Write all or nothing: a reader never sees half a file."""
    _write_whole(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_whole(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def read_result(directory: Path) -> dict[str, Any]:
    """What the run left as its result; empty while there is none."""
    try:
        return json.loads((directory / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def step_name(step: int) -> str:
    """The name of the checkpoint after `step`."""
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int | None:
    """The step that the name of a checkpoint tells; None for what is none, or was set aside."""
    digits = checkpoint.name.removeprefix("step_")
    return int(digits) if digits.isdecimal() and checkpoint.name == step_name(int(digits)) else None


def newest_step(directory: Path) -> int:
    """The step of the newest checkpoint of the run at `directory`; 0 without any."""
    return max((step_of(path) or 0 for path in (directory / "checkpoints").glob("step_*")), default=0)


def lock(directory: Path) -> IO[str] | None:
    """Take the directory for this process, until the returned file is closed or the process ends, however it ends.

    Returns:
        None when another process is at work in it.
    """
    file = (directory / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def free_name(path: Path, suffix: str) -> Path:
    """`path` with `.suffix` behind it, numbered where that is taken."""
    number, name = 2, path.with_name(f"{path.name}.{suffix}")
    while name.exists():
        number, name = number + 1, path.with_name(f"{path.name}.{suffix}{number}")
    return name
