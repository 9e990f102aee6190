"""Crash-safe checkpoints, which do not depend on the parallel mode.

The directory of a checkpoint, for example `checkpoints/step_00000100/`, contains these files:

- `model.safetensors`: the full tensors of the model, by parameter or buffer name;
- `ema.safetensors`: the same with averaged weights, if the run averages them;
- `state.pt`: the state that all ranks share, such as the optimizer state, the loss scaling, the metric sums since the
  last log and the best evaluation;
- `rank_0.pt` and so on: the state that differs between ranks;
- `config.yaml`: the config of the run, so that a checkpoint can be resumed without the rest of the run directory;
- `model.json`, if the workload has a signature: the shape of the model's inputs, and the names of the classes or
  targets;
- `manifest.json`: the SHA-256 of the other files and of the manifest itself.

All files are written to a temporary directory and synced to disk; renaming the directory commits the checkpoint. After
that, `checkpoints/index.json` is written, and old checkpoints are deleted.

A thread of each rank writes the files while the training goes on. The threads use no collectives, because these would
get mixed up with the collectives of the training. Instead, rank 0 waits until the files of the other ranks are in the
temporary directory.

A checkpoint may come from somebody else, and then correct hashes do not make it safe. So links, pipes and devices are
not opened, a pickle cannot run code or claim more memory than its file takes, and `content_checks.py` checks what was
loaded.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError

from runner.config.errors import check
from runner.storage.content_checks import check_plain
from runner.storage.durable_write import sync
from runner.storage.index_json import INDEX, write_index
from runner.storage.manifest import CONFIG, SIGNATURE, DamagedError, manifest_of, untrusted, verified_manifest
from runner.storage.manifest import NAME as MANIFEST
from runner.storage.regular_file import UnsafeFileError, check_no_link, utf8_path
from runner.storage.retention import delete, delete_outdated, saved_steps
from runner.storage.run_directory import MovedError, StorageError, free_name, identity, step_name
from runner.storage.safe_torch_load import load_tensors
from runner.system.torch_errors import is_out_of_memory

log = logging.getLogger(__name__)

_MODEL, EMA, _STATE = "model.safetensors", "ema.safetensors", "state.pt"
_POLL_SECONDS = 0.005


@dataclass
class Checkpoint:
    """The content of one checkpoint.

    Args:
        step: number of optimizer steps done.
        tensors: the full tensors of the model, by parameter or buffer name.
        state: the state that is the same on all ranks.
        local: the state of this rank; empty if the checkpoint has no state for this rank.
        world_size: number of ranks that wrote the checkpoint.
        ema: as `tensors`, but with averaged weights; empty if the run does not average the weights.
    """

    step: int
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]
    local: dict[str, Any]
    world_size: int = 1
    ema: dict[str, torch.Tensor] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
        directory: the run directory.
        keep: number of newest checkpoints to keep. The checkpoint with the best evaluation is also kept. 0 is treated
            as 1 here; when a run with `keep=0` is done, the caller deletes all of its checkpoints.
        rank: the rank of this process.
        world_size: the number of ranks, all of which must call `save`.
        barrier: function that returns once all ranks have called it.
        timeout: seconds that rank 0 waits for the files of the other ranks, after it has written its own files.
        config_hash: hash of the config, for the manifest.
        config: the text of the config, which is written to each checkpoint; empty to write no config.
        signature: function that returns the text of `model.json`, which says what a program has to know to use the
            model; empty to write no such file. It is called by the thread that writes a checkpoint, on rank 0.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        rank: int = 0,
        world_size: int = 1,
        barrier: Callable[[], None] = lambda: None,
        timeout: float = math.inf,
        config_hash: str = "",
        config: str = "",
        signature: Callable[[], str] = str,
    ):
        self.root = directory / "checkpoints"
        self.keep, self.rank, self.world_size, self.barrier, self.timeout = keep, rank, world_size, barrier, timeout
        self.config_hash = config_hash
        self.texts: dict[str, Callable[[], str]] = {CONFIG: lambda: config, SIGNATURE: signature}
        self._writing: _Writing | None = None
        self._failed = threading.Event()
        self._identity = identity(directory)

    def save(self, checkpoint: Checkpoint, best_step: int | None = None) -> None:
        """Wait until the previous checkpoint is written, and begin to write `checkpoint` in a thread.

        Every rank must call this. `check`, `wait` or the next `save` raises the error of the thread.

        Args:
            checkpoint: the content, which must not change any more. Each rank writes its own `local`; rank 0 writes
                everything else, syncs the checkpoint to disk, and deletes old checkpoints.
            best_step: the step of the checkpoint with the best evaluation, which is not deleted; None if there is none.

        Raises:
            StorageError: as in `wait`, or if the directory of the new checkpoint cannot be made.
        """
        self.wait()
        part = self.root / f"tmp.{step_name(checkpoint.step)}"
        if self.rank == 0:
            with self._deleted_on_failure(part):
                self._make(part)
        self.barrier()
        self._writing = _in_thread(lambda: self._write(checkpoint, part, best_step))

    def check_directory(self) -> None:
        """Check on rank 0 that the run directory has been neither removed nor renamed.

        Otherwise, the run would go on in a new directory of the same name, or in that of another run.

        Raises:
            MovedError: if the check fails.
        """
        if self.rank == 0 and identity(self.root.parent) != self._identity:
            raise MovedError(self.root.parent)

    def check(self) -> None:
        """Raise the error of the last `save`, if its thread has already failed.

        Raises:
            StorageError: as in `wait`.
        """
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is written. On ranks other than 0, wait only for this rank's file.

        Raises:
            StorageError: if the disk is full or fails, or another rank's file does not appear before the timeout.
                Earlier checkpoints are not affected.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def finish_after_error(self) -> None:
        """After the training has failed, wait until the thread of the last `save` has ended, and ignore its errors.

        Other ranks may have failed too, so rank 0 does not wait for their files. If a file is missing, the checkpoint
        is not committed.
        """
        self._failed.set()
        if self._writing is not None:
            self._writing.wait()

    def _make(self, part: Path) -> None:
        self.check_directory()
        check_no_link(self.root)
        shutil.rmtree(part, ignore_errors=True)
        self.root.mkdir(exist_ok=True)
        part.mkdir()
        sync(self.root.parent)

    def _write(self, checkpoint: Checkpoint, part: Path, best_step: int | None) -> None:
        """Write this rank's files to the directory `part`; on rank 0, also commit the checkpoint."""
        since, own = time.perf_counter(), part / _rank_file(self.rank)
        unfinished = _unfinished(own)
        with self._deleted_on_failure(part):
            _write_synced(unfinished, lambda path: _save(checkpoint.local, path))
            os.replace(unfinished, own)  # tells rank 0 that it is complete
            if self.rank == 0:
                self._commit(checkpoint, part)
        if self.rank == 0:
            self._index(checkpoint)
            delete_outdated(self.root, self.keep, best_step)
        log.debug("the checkpoint of step %d took %.2f s to write", checkpoint.step, time.perf_counter() - since)

    @contextmanager
    def _deleted_on_failure(self, part: Path) -> Iterator[None]:
        """A context manager that deletes this rank's files in the directory `part` if they cannot be written.

        This frees space for the log and the result. Rank 0 also deletes the directory, if it is empty. The other ranks
        leave the directory: if it were missing, rank 0 might fail with an error that does not show the cause.

        Raises:
            StorageError: if an OSError was raised in the context.
        """
        try:
            yield
        except OSError as error:
            own = part / _rank_file(self.rank)
            names = (_MODEL, EMA, _STATE, *self.texts, MANIFEST)
            others = [part / name for name in names] if self.rank == 0 else []
            with suppress(OSError):
                for path in [_unfinished(own), own, *others]:
                    path.unlink(missing_ok=True)
                if self.rank == 0:
                    part.rmdir()
            self.check_directory()
            raise StorageError(part, error.strerror or str(error)) from error

    def _commit(self, checkpoint: Checkpoint, part: Path) -> None:
        weights = {_MODEL: checkpoint.tensors} | ({EMA: checkpoint.ema} if checkpoint.ema else {})
        for name, tensors in weights.items():
            _write_synced(part / name, partial(safetensors.torch.save_file, tensors))
        _write_synced(part / _STATE, lambda path: _save(checkpoint.state, path))
        # safetensors makes its files unreadable for other users; give them the mode of the other files, from the umask.
        for name in weights:
            (part / name).chmod(stat.S_IMODE((part / _STATE).stat().st_mode))
        for name, text_of in self.texts.items():
            if text := text_of():
                _write_synced(part / name, partial(Path.write_text, data=text, encoding="utf-8"))
        self._wait_for_other_ranks(part)
        manifest = manifest_of(part, step=checkpoint.step, world_size=self.world_size, config_hash=self.config_hash)
        _write_synced(part / MANIFEST, lambda path: path.write_text(manifest, encoding="utf-8"))
        sync(part)
        final = self.root / step_name(checkpoint.step)
        if final.exists():  # resumed from an earlier step: keep the other checkpoint under another name
            os.replace(final, free_name(final, "superseded"))
        os.replace(part, final)
        sync(self.root)

    def _wait_for_other_ranks(self, part: Path) -> None:
        """Wait until the files of all ranks are in the directory `part`.

        Raises:
            OSError: if a file does not appear before the timeout, or the training has failed.
        """
        waited = 0.0  # the time in which this process was suspended does not count
        for rank in range(1, self.world_size):
            while not (part / _rank_file(rank)).exists():
                if self._failed.is_set() or waited > self.timeout:
                    why = f"rank {rank} has not written its file after {waited:.0f} s (parallel.timeout)"
                    raise OSError(errno.ETIMEDOUT, why)
                time.sleep(_POLL_SECONDS)
                waited += _POLL_SECONDS

    def finish_interrupted(self, newest: Checkpoint) -> None:
        """On rank 0, write the index and delete the files that an interrupted save or deletion has left behind.

        If this fails, log a warning.

        Args:
            newest: the checkpoint that the run has been resumed from.
        """
        if self.rank > 0:
            return
        self._index(newest)
        try:
            delete(self.root, [])
        except OSError as error:
            log.warning("leftovers of checkpoints cannot be deleted: %s", error)

    def _index(self, checkpoint: Checkpoint) -> None:
        try:
            write_index(self.root, checkpoint.step, checkpoint.state.get("best", {}))
        except OSError as error:  # the new checkpoint is complete: go on, and try again after the next one
            log.warning("%s cannot be written: %s", self.root / INDEX, error)

    def steps(self) -> list[int]:
        """Return the steps of the existing checkpoints, including damaged ones, in increasing order.

        Raises:
            UnsafeFileError: if `checkpoints` is a link, or anything else that is not a directory.
        """
        return saved_steps(self.root)

    def latest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, with the state of this rank; None if the run has no checkpoint.

        Every rank must call this. Rank 0 renames the damaged checkpoints that are newer than the returned one. If no
        checkpoint is intact, nothing is renamed. Damaged checkpoints are never deleted.

        Raises:
            ConfigError: if the run has damaged checkpoints (including those that were renamed earlier), but no intact
                one; if the newest intact checkpoint was written by an incompatible version of this project or by
                something else; or if `checkpoints` is a link.
            OSError: if a file cannot be read for another reason, or a damaged checkpoint cannot be renamed.
        """
        try:
            steps = self.steps()
        except UnsafeFileError as error:
            raise untrusted(self.root, str(error.strerror)) from None
        damaged: dict[Path, DamagedError] = {}
        found = None
        for path in (self.root / step_name(step) for step in reversed(steps)):
            try:
                found = load(path, self.rank)
                break
            except DamagedError as error:
                damaged[path] = error
        if damaged:
            self.barrier()  # all ranks have read them before rank 0 renames them
        if found is not None and self.rank == 0:
            for path, error in damaged.items():
                aside = free_name(path, "corrupt")
                os.replace(path, aside)
                log.warning("%s; renamed to %s, trying the previous checkpoint", error, aside.name)
        names = sorted([path.name for path in damaged] + [path.name for path in self.root.glob("step_*.corrupt*")])
        why = f"none of its checkpoints is intact: {', '.join(names)}"
        remedy = "start a new run, without resume (overrides.yaml has what was typed)"
        check(found is not None or not names, "resume", str(self.root.parent), why, remedy)
        return found


def load(path: Path, rank: int = 0) -> Checkpoint:
    """Load the checkpoint at `path`, after verifying the hashes of all its files.

    Args:
        path: the directory of the checkpoint.
        rank: the rank whose local state is loaded.

    Raises:
        DamagedError: if a file is missing or its hash differs.
        ConfigError: if the checkpoint was written by an incompatible version of this project, or by something else.
        OSError: if a file cannot be read for another reason.
    """
    manifest = verified_manifest(path)
    local = _rank_file(rank)
    for name in (_MODEL, _STATE):
        if name not in manifest["files"]:
            raise untrusted(path, f"{MANIFEST} does not list {name}")
    return Checkpoint(
        step=manifest["step"],
        tensors=_loaded(path / _MODEL, _tensors),
        state=_loaded(path / _STATE, _plain),
        local=_loaded(path / local, _plain) if local in manifest["files"] else {},
        world_size=manifest["world_size"],
        ema=_loaded(path / EMA, _tensors) if EMA in manifest["files"] else {},
    )


def _loaded(file: Path, read: Callable[[Path], Any]) -> dict[str, Any]:
    try:
        content = read(file)
    except Exception as error:  # content that no run wrote raises anything from EOFError to UnicodeDecodeError
        if is_out_of_memory(error):
            raise
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise untrusted(file.parent, f"the hashes are correct, but the content of {file.name} is not: {why}") from None
    if not isinstance(content, dict):
        raise untrusted(file.parent, f"{file.name} contains {type(content).__name__} instead of a dict")
    return content


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    with utf8_path(path) as file:
        return safetensors.torch.load_file(file)


def _plain(path: Path) -> Any:
    content = load_tensors(path)
    check_plain(content, path.name)
    return content


def _save(value: object, path: Path) -> None:
    with path.open("wb") as file:  # given a path, torch would hide the OSError of a full disk
        torch.save(value, file)


def _rank_file(rank: int) -> str:
    return f"rank_{rank}.pt"


def _unfinished(path: Path) -> Path:
    """Return the path at which the file `path` is written, before it is renamed to `path`."""
    return path.with_name(f"{path.name}.part")


def _write_synced(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` to write the file `path`, and sync the file to disk.

    Raises:
        OSError: if this fails. Errors of torch and safetensors, for example on a full disk, are converted to OSErrors.
    """
    try:
        write(path)
    except (RuntimeError, SafetensorError) as error:  # how torch and safetensors report a full disk
        raise OSError(errno.EIO, str(error.__context__ or error).splitlines()[0]) from error
    sync(path)


class _Writing(NamedTuple):
    """A checkpoint that is being written by a thread."""

    thread: threading.Thread
    future: Future[None]

    def done(self) -> bool:
        return self.future.done()

    def result(self) -> None:
        """Wait for the end of the thread, and raise its error."""
        self.wait()
        self.future.result()

    def wait(self) -> None:
        """Wait until the thread has ended, not only until its result is there.

        After setting the result, the thread still has to free the tensors. An interpreter that exits meanwhile stops
        this daemon thread in the middle of torch's C++ code, which aborts the process.
        """
        self.thread.join()


def _in_thread(function: Callable[[], None]) -> _Writing:
    """Call `function` in a thread that does not keep the process from exiting."""
    future: Future[None] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=call, name="checkpoint", daemon=True)
    thread.start()
    return _Writing(thread, future)
