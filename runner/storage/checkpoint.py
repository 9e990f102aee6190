"""Checkpoints that survive a crash at any instant, and that know no mode.

`checkpoints/step_00000100/` holds `model.safetensors` (plain names, whole tensors), `state.pt` (optimizer, precision,
window, best), `rank_0.pt` (what differs by rank) and `manifest.json` with the SHA-256 of each and of itself. Everything
is written and synced under another name first; the rename makes the checkpoint, and only then are old ones deleted.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from runner.config.errors import ConfigError
from runner.storage.manifest import NAME as MANIFEST
from runner.storage.manifest import DamagedError, manifest_of, verified_manifest
from runner.storage.run_directory import StorageError, free_name, step_name, step_of

log = logging.getLogger(__name__)


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
        keep: how many of the latest to keep; the best one is kept beside them. 0: one, until the run is done.
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
            StorageError: when the disk is full or gone; the checkpoints before are whole.
        """
        final = self.root / step_name(checkpoint.step)
        part = self.root / f"tmp.{final.name}"
        try:
            if self.rank == 0:
                self._make(part)
            self.barrier()
            _write(part / f"rank_{self.rank}.pt", lambda path: _save(checkpoint.local, path))
            self.barrier()
            if self.rank == 0:
                self._commit(checkpoint, part, final)
                self._prune(best_step)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)  # room for what else the run still writes
            raise StorageError(part, error.strerror or str(error)) from error
        self.barrier()
        return final

    def _make(self, part: Path) -> None:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _sync(self.root.parent)

    def _commit(self, checkpoint: Checkpoint, part: Path, final: Path) -> None:
        _write(part / "model.safetensors", lambda path: safetensors.torch.save_file(checkpoint.tensors, path))
        _write(part / "state.pt", lambda path: _save(checkpoint.state, path))
        manifest = manifest_of(part, step=checkpoint.step, world_size=self.world_size, config_hash=self.config_hash)
        _write(part / MANIFEST, lambda path: path.write_text(manifest, encoding="utf-8"))
        _sync(part)
        if final.exists():  # another past of this run: not to be mixed, nor lost
            os.replace(final, free_name(final, "superseded"))
        os.replace(part, final)
        _sync(self.root)

    def _prune(self, best_step: int | None) -> None:
        self._remove(step for step in self.steps()[: -max(1, self.keep)] if step != best_step)

    def finish(self) -> None:
        """The run is done: what was kept only to go on from goes."""
        if self.keep == 0 and self.rank == 0:
            self._remove(self.steps())

    def _remove(self, steps: Iterable[int]) -> None:
        for step in steps:  # renamed first: half a checkpoint must not look like one
            path = self.root / step_name(step)
            os.replace(path, free_name(path, "pruned"))
        for left_over in [*self.root.glob("tmp.*"), *self.root.glob("*.pruned*")]:
            shutil.rmtree(left_over, ignore_errors=True)

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, rising."""
        if not self.root.is_dir():
            return []
        return sorted(step for path in self.root.iterdir() if (step := step_of(path)) is not None)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; damaged ones are set aside, never deleted. None without any.

        Raises:
            ConfigError: when the newest was written by another version of this project, or cannot be trusted.
        """
        steps = self.steps()
        for step in reversed(steps):
            path = self.root / step_name(step)
            try:
                return load(path, self.rank)
            except DamagedError as error:
                self.barrier()  # every rank has looked at it
                if self.rank == 0:
                    aside = free_name(path, "corrupt")
                    os.replace(path, aside)
                    log.warning("%s; set aside as %s, going back to the one before", error, aside.name)
        if steps and self.rank == 0:
            log.warning("no whole checkpoint is left in %s: the run begins anew", self.root)
        return None


def load(path: Path, rank: int = 0) -> Checkpoint:
    """The checkpoint at `path`, every byte of it checked before anything is deserialised.

    Raises:
        DamagedError: when a file is missing or its hash differs.
        ConfigError: when it was written by another version of this project, or holds what no version writes.
    """
    manifest = verified_manifest(path)
    local = path / f"rank_{rank}.pt"
    try:
        return Checkpoint(
            step=manifest["step"],
            tensors=safetensors.torch.load_file(path / "model.safetensors"),
            state=_plain(path / "state.pt"),
            local=_plain(local) if local.name in manifest["files"] else {},
            world_size=manifest["world_size"],
        )
    except (pickle.UnpicklingError, SafetensorError, RuntimeError, OSError, KeyError) as error:
        why = f"its hashes are right, its content is not: {str(error).splitlines()[0]}"
        raise ConfigError("resume", str(path), why, "no run writes this: do not trust it, resume another") from None


def _plain(path: Path) -> Any:
    """Tensors and plain values: `weights_only` runs no code."""
    return torch.load(path, weights_only=True, map_location="cpu")


def _save(value: object, path: Path) -> None:
    with path.open("wb") as file:  # not by its name: a Python file tells what is wrong with the disk
        torch.save(value, file)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except (RuntimeError, SafetensorError) as error:  # torch's and safetensors' words for a full disk
        raise OSError(errno.EIO, str(error.__context__ or error).splitlines()[0]) from error
    _sync(path)


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
