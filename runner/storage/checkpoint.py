"""Crash-safe checkpoints, which do not depend on the parallel mode.

`checkpoints/step_00000100/` contains `model.safetensors` (full tensors by parameter name), `state.pt` (the optimizer
state, the loss scaling, the metric sums since the last log, the best evaluation), `rank_0.pt` and so on (the state that
differs between ranks), and `manifest.json` with the SHA-256 of these files and of itself. All files are written and
synced under a temporary directory name; renaming it commits the checkpoint, after which old ones are deleted.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
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
    """The content of one checkpoint.

    Args:
        step: number of optimizer steps done.
        tensors: the full tensors of the model, by parameter or buffer name.
        state: the state that is the same on all ranks.
        local: the state of this rank; empty if the checkpoint has none for it.
        world_size: number of ranks that wrote it.
    """

    step: int
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]
    local: dict[str, Any]
    world_size: int = 1


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
        directory: the run directory.
        keep: how many of the newest to keep, besides the best one; 0: one until the run is done, then none.
        rank: the rank of this process.
        world_size: the number of ranks, which all call `save`.
        barrier: waits for all ranks.
        config_hash: hash of the config, for the manifest.
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
        """Write `checkpoint`, and return its path once it is synced to disk.

        Args:
            checkpoint: the content; only `local` has to differ between ranks.
            best_step: a step whose checkpoint must not be deleted.

        Raises:
            StorageError: if the disk is full or fails; earlier checkpoints are not affected.
        """
        final = self.root / step_name(checkpoint.step)
        part = self.root / f"tmp.{final.name}"
        own = part / f"rank_{self.rank}.pt"
        written = part if self.world_size == 1 else own
        try:
            if self.rank == 0:
                self._make(part)
            self.barrier()
            _write(own, lambda path: _save(checkpoint.local, path))
            self.barrier()
            written = part
            if self.rank == 0:
                self._commit(checkpoint, part, final)
                self._prune(best_step)
        except OSError as error:
            # Frees space for the log and the result. While other ranks still write, only this rank's file: one whose
            # directory is gone would be the first to fail, for a reason that explains nothing.
            with suppress(OSError):
                written.unlink() if written is own else shutil.rmtree(written)
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
        if final.exists():  # resumed from an earlier step: keep the other checkpoint under another name
            os.replace(final, free_name(final, "superseded"))
        os.replace(part, final)
        _sync(self.root)

    def _prune(self, best_step: int | None) -> None:
        self._remove(step for step in self.steps()[: -max(1, self.keep)] if step != best_step)

    def finish(self) -> None:
        """Delete the last checkpoint if `keep` is 0; called when the run is done."""
        if self.keep == 0 and self.rank == 0:
            self._remove(self.steps())

    def _remove(self, steps: Iterable[int]) -> None:
        for step in steps:  # renamed first, so that an interrupted deletion leaves no partial checkpoint
            path = self.root / step_name(step)
            os.replace(path, free_name(path, "pruned"))
        for leftover in [*self.root.glob("tmp.*"), *self.root.glob("*.pruned*")]:
            shutil.rmtree(leftover, ignore_errors=True)

    def steps(self) -> list[int]:
        """Return the steps of the existing checkpoints in increasing order."""
        if not self.root.is_dir():
            return []
        return sorted(step for path in self.root.iterdir() if (step := step_of(path)) is not None)

    def latest(self) -> Checkpoint | None:
        """Load the newest intact checkpoint; None if there is none. Damaged checkpoints are renamed, never deleted.

        Raises:
            ConfigError: if the newest was written by an incompatible version of this project, or has invalid content.
        """
        steps = self.steps()
        for step in reversed(steps):
            path = self.root / step_name(step)
            try:
                return load(path, self.rank)
            except DamagedError as error:
                self.barrier()  # all ranks have read it before rank 0 renames it
                if self.rank == 0:
                    aside = free_name(path, "corrupt")
                    os.replace(path, aside)
                    log.warning("%s; renamed to %s, trying the previous checkpoint", error, aside.name)
        if steps and self.rank == 0:
            log.warning("there is no intact checkpoint in %s: the run starts at step 1", self.root)
        return None


def load(path: Path, rank: int = 0) -> Checkpoint:
    """Load the checkpoint at `path`, after verifying the hashes of all its files.

    Args:
        path: the directory of the checkpoint.
        rank: the rank whose local state is loaded.

    Raises:
        DamagedError: if a file is missing or its hash differs.
        ConfigError: if it was written by an incompatible version of this project, or has invalid content.
    """
    manifest = verified_manifest(path)
    local = path / f"rank_{rank}.pt"
    try:
        return Checkpoint(
            step=manifest["step"],
            tensors=safetensors.torch.load_file(path / "model.safetensors"),
            state=_load_plain(path / "state.pt"),
            local=_load_plain(local) if local.name in manifest["files"] else {},
            world_size=manifest["world_size"],
        )
    except (pickle.UnpicklingError, SafetensorError, RuntimeError, OSError, KeyError) as error:
        why = f"its hashes are correct, but its content is not: {str(error).splitlines()[0]}"
        remedy = "no run writes such a file: do not trust it, and resume another checkpoint"
        raise ConfigError("resume", str(path), why, remedy) from None


def _load_plain(path: Path) -> Any:
    """Load tensors and plain values; with `weights_only` a pickle cannot run code."""
    return torch.load(path, weights_only=True, map_location="cpu")


def _save(value: object, path: Path) -> None:
    with path.open("wb") as file:  # given a path, torch would hide the OSError of a full disk
        torch.save(value, file)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except (RuntimeError, SafetensorError) as error:  # how torch and safetensors report a full disk
        raise OSError(errno.EIO, str(error.__context__ or error).splitlines()[0]) from error
    _sync(path)


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
