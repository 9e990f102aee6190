"""The fastest ways to train that were measured on this machine, kept in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runner.config.overrides import override_key
from runner.storage.durable_write import write_text
from runner.system.cpu import cpu_model, usable_core_numbers
from runner.system.memory import host_memory
from runner.system.secrets import redacted_values
from runner.system.user_cache import cache_directory
from runner.system.version import __version__

_NOT_HOW_FAST = (
    *("name", "output_root", "resume", "tracking", "seed", "steps", "epochs", "log_every", "eval_every"),
    *("save_every", "keep", "how", "schedule", "profiler"),
)
"""Keys of a config that do not change which way to train is the fastest."""

_CHOSEN = re.compile(r"(parallel|accumulation|compile|channels_last|device\.threads|data\.workers)\b[\w.]*=[\w.-]+")
"""A pattern for the overrides that a choice may contain."""

_LONGEST = 100_000


class Choice(NamedTuple):
    """The fastest of the measured ways to train a run.

    Args:
        overrides: the chosen overrides; empty if nothing was faster than the run as it is.
        speedup: the speed of the run with these overrides, divided by its speed without them.
        measured: the date of the measurement, such as 2026-01-31.
    """

    overrides: list[str]
    speedup: float
    measured: str


class ChoiceCache:
    """The cached choice for one config.

    Args:
        config: the composed config, to which no choice has been applied.
        typed: the overrides that the user has typed. A choice does not change the options that they set.
        config_dir: a directory with the user's own options, or None. A choice may use the parallel modes that are
            defined in this directory.
        root: the directory of the cache; None for the one in the user's cache directory.
    """

    def __init__(
        self, config: Mapping[str, Any], typed: Sequence[str], config_dir: str | None = None, root: Path | None = None
    ):
        root = root or cache_directory("choices")
        files = [] if config_dir is None else sorted(Path(config_dir).expanduser().glob("parallel/*.yaml"))
        modes = {file.name: _text(file) for file in files}
        values = redacted_values({key: value for key, value in config.items() if key not in _NOT_HOW_FAST})
        keys = sorted({override_key(text) for text in typed} - set(_NOT_HOW_FAST))
        text = json.dumps([values, keys, modes], sort_keys=True, default=str)
        self.path = root / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def read(self) -> tuple[Choice | None, str]:
        """Return the cached choice, or the reason why it cannot be used.

        Returns:
            (choice, ""), or (None, reason) if the choice cannot be used, or (None, "") if nothing is cached.
        """
        try:
            if self.path.stat().st_size > _LONGEST:
                return None, "the cached file contains no valid choice"
            found = json.loads(self.path.read_text(encoding="utf-8"))
            choice = Choice(list(found["overrides"]), float(found["speedup"]), str(found["measured"]))
            known = all(map(may_be_chosen, choice.overrides))
            machine = found["machine"]
        except FileNotFoundError:
            return None, ""
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None, "the cached choice cannot be read"
        if not known:
            return None, "the cached file contains no valid choice"
        here = fingerprint()
        if machine != here:
            other = [key for key in here if not isinstance(machine, dict) or machine.get(key) != here[key]]
            return None, f"the cached choice is that of another machine or version ({', '.join(other)})"
        return choice, ""

    def write(self, choice: Choice) -> None:
        """Write `choice` to the cache; do nothing if the cache cannot be written to."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps({**choice._asdict(), "machine": fingerprint()}, indent=2) + "\n")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """A context manager that holds the lock of this choice, so that two runs do not measure at the same time.

        The context manager waits for the lock. If the cache cannot be written to, or the file system has no locks, it
        does nothing.
        """
        import fcntl

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # a directory that cannot be written to
            yield
            return
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _text(file: Path) -> str:
    """Return the content of an option file; an empty string if the file cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def may_be_chosen(text: object) -> bool:
    """Return whether `text` is an override of an option that `how=auto` or `accumulation=auto` may choose.

    Overrides that are read from a file are checked with this function, so that a forged file cannot set other options.
    """
    return isinstance(text, str) and _CHOSEN.fullmatch(text) is not None


def today() -> str:
    """Return the date, such as 2026-01-31."""
    return time.strftime("%Y-%m-%d")


def fingerprint() -> dict[str, Any]:
    """Return what a choice depends on besides the config.

    Returns:
        A dict: `cpu`, the name of the processor; `cores`, the number of usable cores; `memory`, the memory of the
        machine in GiB; `gpus`, their names; and the versions of `python`, `torch` and this project (`runner`).
    """
    return {
        "cpu": cpu_model(),
        "cores": len(usable_core_numbers()),
        "memory": round((host_memory()["total_bytes"] or 0) / 2**30),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "runner": __version__,
    }
