"""The checkpoints of a run: the latest one that is intact, and crash-safe writing in the background.

A thread of each rank writes its files to a temporary directory, and syncs them to disk, while the training goes on.
Rank 0 waits for the files of the other ranks, without collectives, which would get mixed up with those of the training,
and renames the directory, which commits the checkpoint.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from runner.config.errors import check
from runner.storage.checkpoint import EMA, MODEL, STATE, Checkpoint, Part, beside_tensors, load, part_file, rank_file
from runner.storage.files import check_no_link, sync
from runner.storage.manifest import MANIFEST, DamagedError, hashes_of_shared, manifest_of
from runner.storage.run_directory import StorageError, entries, free_name, identity, saved_steps, step_name, step_of
from runner.storage.saved_run import checkpoints
from runner.storage.state_dict import header

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.005
_LEFTOVER = re.compile(r"tmp\.step_[0-9]{8,}|step_[0-9]{8,}\.pruned[0-9]*")
"""The names of checkpoints whose saving or deletion was interrupted."""


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
        directory: the run directory.
        keep: number of newest checkpoints to keep in addition to the best one; 0 is treated as 1.
        rank: the rank of this process.
        world_size: the number of ranks, all of which must call `save`.
        barrier: function that returns once all ranks have called it.
        timeout: seconds that rank 0 waits for the files of the other ranks.
        texts: functions that return the texts of further files, by name; a file without text is not written. They are
            called by a thread.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        rank: int = 0,
        world_size: int = 1,
        barrier: Callable[[], None] = lambda: None,
        timeout: float = math.inf,
        texts: Mapping[str, Callable[[], str]] = {},
    ):
        self.root = directory / "checkpoints"
        self.keep, self.rank, self.world_size, self.barrier, self.timeout = keep, rank, world_size, barrier, timeout
        self.texts = texts
        self._writing: Writing | None = None
        self._failed = threading.Event()
        self._identity = identity(directory)
        self._newest: Path | None = None
        """The checkpoint that this process has loaded or saved last, whose parts the next one shares."""

    def save(self, checkpoint: Checkpoint, best_step: int | None = None) -> None:
        """On every rank, wait until the previous checkpoint is written, and begin to write `checkpoint` in a thread.

        Args:
            checkpoint: the content, which must not change any more. Each rank writes its `local`, and rank 0 the rest.
            best_step: the step of the checkpoint with the best evaluation, which is not deleted; None if there is none.

        Raises:
            StorageError: if the directory cannot be made, or as in `wait`, of the previous checkpoint.
        """
        self.wait()
        part = self.root / f"tmp.{step_name(checkpoint.step)}"
        if self.rank == 0:
            with self._deleted_on_failure(part):
                self.check_directory()
                check_no_link(self.root)
                shutil.rmtree(part, ignore_errors=True)
                self.root.mkdir(exist_ok=True)
                part.mkdir()
                sync(self.root.parent)
        self.barrier()
        self._writing = Writing(partial(self._write, checkpoint, part, best_step, self._newest))
        self._newest = self.root / step_name(checkpoint.step)

    def check_directory(self) -> None:
        """On rank 0, raise a `StorageError` if the run directory has been removed or renamed, or another is there."""
        if self.rank == 0 and identity(self.root.parent) != self._identity:
            remedy = "if it is elsewhere now, resume it there, from its last checkpoint"
            raise StorageError(self.root.parent, "it has been removed or renamed while the run was running", remedy)

    def check(self) -> None:
        """Raise the error of the last `save`, as `wait` does, if its thread has already failed."""
        if self._writing is not None and not self._writing.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is written; on ranks other than 0, only their file of it.

        Raises:
            StorageError: if the disk is full or fails, or another rank's file does not appear before the timeout.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.join()
            if writing.error is not None:
                raise writing.error

    def finish_after_error(self) -> None:
        """After the training has failed, wait for the thread, but not for files of ranks that may have failed, too."""
        self._failed.set()
        if self._writing is not None:
            self._writing.join()

    def _write(self, checkpoint: Checkpoint, part: Path, best_step: int | None, before: Path | None) -> None:
        state_file = part / rank_file(self.rank)
        unfinished = part / f"{state_file.name}.part"
        parts = {part_file(self.rank, name): each for name, each in checkpoint.parts.items()}
        with self._deleted_on_failure(part, *parts):
            _write_parts(parts, part, before)
            _write_synced(unfinished, lambda path: _save(checkpoint.local, path))
            os.replace(unfinished, state_file)  # tells rank 0 that it is complete
            if self.rank == 0:
                self._commit(checkpoint, part, before)
        if self.rank == 0:
            prune(self.root, max(1, self.keep), best_step)

    @contextmanager
    def _deleted_on_failure(self, part: Path, *parts: str) -> Iterator[None]:
        """Convert an OSError to a `StorageError`, and delete this rank's files in `part`: the log needs the space."""
        try:
            yield
        except OSError as error:
            names = [rank_file(self.rank), f"{rank_file(self.rank)}.part", *parts]
            names += [MODEL, EMA, STATE, *self.texts, MANIFEST] if self.rank == 0 else []
            with suppress(OSError):
                for name in names:
                    (part / name).unlink(missing_ok=True)
                if self.world_size == 1:  # without it, other ranks would fail, too, with an error that hides the cause
                    part.rmdir()
            self.check_directory()
            raise StorageError(part, error.strerror or str(error)) from error

    def _commit(self, checkpoint: Checkpoint, part: Path, before: Path | None) -> None:
        weights = {MODEL: checkpoint.tensors} | ({EMA: checkpoint.ema} if checkpoint.ema else {})
        state = dict(checkpoint.state)
        for name, tensors in weights.items():
            beside = beside_tensors(tensors)
            state |= {name: beside} if beside else {}
            known = {key: each for key, each in tensors.items() if key not in beside}
            _write_synced(part / name, partial(safetensors.torch.save_file, known, metadata=header(tensors) or None))
        _write_synced(part / STATE, lambda path: _save(state, path))
        # safetensors makes its files unreadable for other users; give them the mode of the other files, from the umask.
        for name in weights:
            (part / name).chmod(stat.S_IMODE((part / STATE).stat().st_mode))
        for name, text_of in self.texts.items():
            if text := text_of():
                _write_synced(part / name, partial(Path.write_text, data=text, encoding="utf-8"))
        self._wait_for_other_ranks(part)
        known = {} if before is None else hashes_of_shared(part, before)
        facts = {"step": checkpoint.step, "world_size": self.world_size, "best": checkpoint.state.get("best")}
        manifest = manifest_of(part, known, **facts)
        _write_synced(part / MANIFEST, lambda path: path.write_text(manifest, encoding="utf-8"))
        sync(part)
        final = self.root / step_name(checkpoint.step)
        if final.exists():  # resumed from an earlier step: keep the other checkpoint under another name
            os.replace(final, free_name(final, "superseded"))
        os.replace(part, final)
        sync(self.root)

    def _wait_for_other_ranks(self, part: Path) -> None:
        waited = 0.0  # the time in which this process was suspended does not count
        for rank in range(1, self.world_size):
            while not (part / rank_file(rank)).exists():
                if self._failed.is_set() or waited > self.timeout:
                    why = f"rank {rank} has not written its file after {waited:.0f} s (parallel.timeout)"
                    raise OSError(errno.ETIMEDOUT, why)
                time.sleep(_POLL_SECONDS)
                waited += _POLL_SECONDS

    def latest(self, last_step: float = math.inf) -> Checkpoint | None:
        """Return on every rank the newest intact checkpoint up to `last_step`, with its state; None if there is none.

        Rank 0 renames newer checkpoints, which are damaged, unless there is no intact one.

        Raises:
            ConfigError: if there are damaged checkpoints, but no intact one; if the newest intact one was not written
                by this version; or if `checkpoints` is a link.
            OSError: if a file cannot be read for another reason, or a damaged checkpoint cannot be renamed.
        """
        damaged: dict[Path, DamagedError] = {}
        found = None
        for path in reversed(checkpoints(self.root.parent)):
            if (step_of(path) or 0) > last_step:
                continue
            try:
                found, self._newest = load(path, self.rank), path
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


def _write_parts(parts: Mapping[str, Part], directory: Path, before: Path | None) -> None:
    """Write each part to `directory`, or link the file of the same name in the checkpoint `before`, if it has one."""
    new: list[Path] = []
    try:
        for name, part in parts.items():
            try:
                if before is None:
                    raise FileNotFoundError
                os.link(before / name, directory / name)
            except OSError:  # it is new, or the file system has no hard links
                new.append(directory / name)
                with new[-1].open("wb") as file:
                    part.write(file)
            part.written.set()
    finally:  # the training must not wait for what will never be written
        for part in parts.values():
            part.written.set()
    for path in new:  # after all are written, as a disk writes many files at once faster than one after another
        sync(path)


def _save(value: object, path: Path) -> None:
    with path.open("wb") as file:  # given a path, torch would hide the OSError of a full disk
        torch.save(value, file)


def _write_synced(path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except (RuntimeError, SafetensorError) as error:  # how torch and safetensors report a full disk
        raise OSError(errno.EIO, str(error.__context__ or error).splitlines()[0]) from error
    sync(path)


class Writing(threading.Thread):
    """A thread that writes a checkpoint. A second Ctrl-C ends the process at once, also if the disk hangs.

    Otherwise, callers wait for the end of the thread, which frees the tensors: at the exit of the interpreter, it would
    be stopped in the middle of torch's C++ code, which aborts the process.
    """

    def __init__(self, write: Callable[[], None]):
        super().__init__(target=write, name="checkpoint", daemon=True)
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            super().run()  # it frees the target, and with it the tensors
        except BaseException as error:
            self.error = error


def prune(root: Path, keep: int | None, best_step: int | None = None) -> None:
    """Delete old checkpoints, and what interrupted saves and deletions have left; if this fails, log a warning.

    Args:
        root: the directory of the checkpoints.
        keep: the number of newest checkpoints that are not deleted; None to delete only leftovers.
        best_step: the step of a checkpoint that is not deleted either; None if there is none.
    """
    try:
        steps = saved_steps(root)
        for step in steps[: max(0, len(steps) - keep)] if keep is not None else []:
            if step != best_step:  # renamed first, so that an interrupted deletion leaves no partial checkpoint
                os.replace(root / step_name(step), free_name(root / step_name(step), "pruned"))
        for path in entries(root):
            if _LEFTOVER.fullmatch(path.name):
                path.unlink() if path.is_symlink() else shutil.rmtree(path)
    except OSError as error:  # the newest checkpoint is complete: go on, and try again after the next one
        log.warning("old checkpoints cannot be deleted: %s", error)
