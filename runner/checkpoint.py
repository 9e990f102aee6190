"""Checkpoints that survive a crash at any instant, and that know no mode.

`checkpoints/step_00000100/` holds `model.safetensors` (plain names, whole tensors), `state.pt` (optimizer, precision,
window, best), `rank_0.pt` (what differs by rank) and `manifest.json` with the SHA-256 of each. Everything is written and
synced under another name first; the rename makes the checkpoint, and only then are old ones deleted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from runner.config import ConfigError
from runner.directory import free_name

log = logging.getLogger(__name__)

SCHEMA = 1
_NAME = re.compile(r"step_(\d+)$")


@dataclass
class Checkpoint:
    """What one checkpoint holds.

    Args:
        step: optimizer steps done.
        tensors: the model's, by plain name.
        state: what all ranks share.
        local: what is this rank's own; empty when the checkpoint has none for it.
        world_size: how many ranks wrote it.
    """

    step: int
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]
    local: dict[str, Any]
    world_size: int = 1


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
        directory: the run's.
        keep: how many of the latest to keep; the best one is kept beside them.
        rank, world_size: this process among those that save together.
        barrier: waits for all of them.
        config_hash: goes into the manifest.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        rank: int = 0,
        world_size: int = 1,
        barrier: Callable[[], None] = lambda: None,
        config_hash: str = "",
    ):
        self.root = directory / "checkpoints"
        self.keep, self.rank, self.world_size, self.barrier = keep, rank, world_size, barrier
        self.config_hash = config_hash

    def save(self, checkpoint: Checkpoint, best_step: int | None = None) -> Path:
        """Write `checkpoint`; returns when it is safe on disk.

        Args:
            best_step: the step whose checkpoint is not to be pruned.

        Raises:
            OSError: when the disk is full or gone; the checkpoints before are whole.
        """
        final = self.root / f"step_{checkpoint.step:08d}"
        part = self.root / f"tmp.{final.name}"
        if self.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        self.barrier()
        try:
            _write(part / f"rank_{self.rank}.pt", lambda path: torch.save(checkpoint.local, path))
            self.barrier()
            if self.rank == 0:
                self._commit(checkpoint, part, final)
                self._prune(best_step)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)  # room for what else the run still writes
            raise
        self.barrier()
        return final

    def _commit(self, checkpoint: Checkpoint, part: Path, final: Path) -> None:
        _write(part / "model.safetensors", lambda path: safetensors.torch.save_file(checkpoint.tensors, path))
        _write(part / "state.pt", lambda path: torch.save(checkpoint.state, path))
        manifest = {
            "schema": SCHEMA,
            "step": checkpoint.step,
            "world_size": self.world_size,
            "config_hash": self.config_hash,
            "files": {path.name: {"sha256": _sha256(path)} for path in sorted(part.iterdir())},
        }
        _write(part / "manifest.json", lambda path: path.write_text(json.dumps(manifest, indent=2) + "\n"))
        _sync(part)
        if final.exists():  # saved before at this step, by a run that was then resumed from an earlier one
            os.replace(final, free_name(final, "old"))
        os.replace(part, final)
        _sync(self.root)

    def _prune(self, best_step: int | None) -> None:
        for step in self.steps()[: -self.keep]:
            if step != best_step:
                shutil.rmtree(self.root / f"step_{step:08d}")
        for left_over in [*self.root.glob("tmp.*"), *self.root.glob("*.old*")]:
            shutil.rmtree(left_over, ignore_errors=True)

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, rising."""
        if not self.root.is_dir():
            return []
        return sorted(int(match[1]) for path in self.root.iterdir() if (match := _NAME.match(path.name)))

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; damaged ones are set aside, never deleted. None without any."""
        for step in reversed(self.steps()):
            path = self.root / f"step_{step:08d}"
            try:
                return load(path, self.rank)
            except DamagedError as error:
                self.barrier()  # every rank has looked at it
                if self.rank == 0:
                    aside = free_name(path, "corrupt")
                    os.replace(path, aside)
                    log.warning("%s; set aside as %s, going back to the one before", error, aside.name)
        return None


class DamagedError(Exception):
    """A checkpoint is not what was written: which file, and how."""


def load(path: Path, rank: int = 0) -> Checkpoint:
    """The checkpoint at `path`, every byte of it checked before anything is deserialised.

    Raises:
        DamagedError: when a file is missing or its hash differs.
        ConfigError: when it was written by another version of this project.
    """
    manifest = _verified_manifest(path)
    if manifest["schema"] != SCHEMA:
        why = f"it has schema {manifest['schema']}, this version reads {SCHEMA}"
        raise ConfigError("resume", str(path), why, "resume with the version that wrote it")
    local = path / f"rank_{rank}.pt"
    return Checkpoint(
        step=manifest["step"],
        tensors=safetensors.torch.load_file(path / "model.safetensors"),
        state=torch.load(path / "state.pt", weights_only=True, map_location="cpu"),
        local=torch.load(local, weights_only=True, map_location="cpu") if local.exists() else {},
        world_size=manifest["world_size"],
    )


def _verified_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        for name, entry in manifest["files"].items():
            if _sha256(path / name) != entry["sha256"]:
                raise DamagedError(f"{path / name} is damaged: its SHA-256 is not the manifest's")
        return {"schema": manifest["schema"], "step": manifest["step"], "world_size": manifest["world_size"]}
    except OSError as error:
        raise DamagedError(f"{path} is incomplete: {error.strerror}: {error.filename}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path / 'manifest.json'} is damaged: {error!r}") from None


def _write(path: Path, write: Callable[[Path], object]) -> None:
    write(path)
    _sync(path)


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
