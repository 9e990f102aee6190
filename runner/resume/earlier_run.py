"""Finds the run that a session resumes, checks that it can be resumed, and locks its directory."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import IO, NamedTuple

from runner.config.errors import ConfigError, check
from runner.config.overrides import text_override
from runner.resume.changed_options import Difference, check_resumable, differences
from runner.run import Run
from runner.session import Session
from runner.storage import run_directory
from runner.storage.manifest import CONFIG, DamagedError, saved_text
from runner.storage.regular_file import UnsafeFileError, check_readable, is_locked
from runner.storage.saved_config import UnreadableConfigError, parse_config
from runner.storage.saved_run import checkpoints, directory_of, is_of_a_run, saved_config
from runner.storage.signature import saved_signature

log = logging.getLogger(__name__)

_BEFORE_CONFIG = {".lock", run_directory.OVERRIDES, f".{run_directory.OVERRIDES}.part", f".{run_directory.CONFIG}.part"}
"""The files that a run which is killed before it has written its config may leave behind, the lock always."""

_NEAR = 5
"""The number of differences up to which another run is near enough to be mentioned."""


class Claim(NamedTuple):
    """An existing directory in which a session continues a run, or begins one.

    Args:
        path: the absolute path.
        lock: the open lock file.
        has_run: whether there is a run in it; otherwise, it is empty, or a run was killed before it wrote its config.
    """

    path: Path
    lock: IO[str]
    has_run: bool = True


def to_resume(run: Run, session: Session, parent: Path, name: str | None) -> Claim | None:
    """Claim the directory of the run to resume; return None if a new run begins in a new directory.

    With `resume=auto`, the run is the one in the directory `name`; if `name` is None, the run is found by its config.

    Raises:
        ConfigError: if the run to resume does not exist, is running, or cannot be continued with this config.
    """
    source = run.resume
    if source == "never":
        return None
    if source == "auto":
        return _unfinished(run, parent) if name is None else _started(run, parent / name)
    path = directory_of(Path(source)).resolve()
    lock = _locked_for_us(path)
    try:
        _check_named(run, session, path, source)
    except ConfigError:
        lock.close()
        raise
    return Claim(path, lock)


def named_checkpoint(run: Run) -> Path | None:
    """Return the checkpoint that `resume` names; None if `resume` is a run directory, `auto` or `never`."""
    source = Path(run.resume)
    return source.resolve() if source.parent.name == "checkpoints" else None


def later_checkpoints(checkpoint: Path | None) -> list[Path]:
    """Return the checkpoints of all steps after the step of `checkpoint`; an empty list if `checkpoint` is None."""
    if checkpoint is None:
        return []
    step = run_directory.step_of(checkpoint) or 0
    return [path for path in checkpoint.parent.iterdir() if (run_directory.step_of(path) or 0) > step]


def _locked(path: Path) -> IO[str] | None:
    """Lock the run directory `path`, and return the open lock file; None if another process holds the lock."""
    try:
        run_directory.check_regular(path)
        return run_directory.lock(path)
    except OSError as error:
        remedy = "resume a copy of it that you own" if isinstance(error, UnsafeFileError) else "make it writable"
        raise ConfigError("resume", str(error.filename or path), str(error.strerror), remedy) from None


def _locked_for_us(path: Path) -> IO[str]:
    lock = _locked(path)
    check(lock is not None, "resume", str(path), "another process is running in it", "wait for it, or stop it")
    assert lock is not None
    return lock


def _check_named(run: Run, session: Session, path: Path, source: str) -> None:
    """Check that `source`, the run in the directory `path` or a checkpoint of it, can be resumed."""
    checkpoint = named_checkpoint(run)
    if checkpoint is not None:
        there = checkpoint.is_dir() and run_directory.step_of(checkpoint) is not None
        names = sorted(path.name for path in checkpoint.parent.glob("step_*"))
        remedy = f"there are {', '.join(names)}; one that was set aside can be renamed to resume from it"
        remedy = remedy if names else "the run has no checkpoints: resume its run directory, or start a new run"
        check(there, "resume", source, "there is no such checkpoint", remedy)
    try:
        saved = saved_config(checkpoint or path)
    except UnreadableConfigError as error:
        why = f"there is no run whose config can be read ({error})"
        raise ConfigError("resume", source, why, "name a run directory, or a checkpoint in one") from None
    check_resumable(saved.values, run.config, source)
    newest, result = run_directory.newest_step(path), run_directory.read_result(path)
    finished = result["steps"] if result.get("status") == "done" else 0
    done = max(newest, finished) if checkpoint is None else run_directory.step_of(checkpoint) or 0
    asking = "epochs" if run.epochs is not None else "the options of the workload"
    derived = f", and {asking} ask for {session.num_steps}" if run.steps is None else ""
    why, more = f"{done} are done already{derived}", f"steps={done + 1} or more, or name an earlier checkpoint of it"
    check(done <= session.num_steps, "steps", session.num_steps, why, more)
    gone = finished and checkpoint is None and newest == 0 and session.num_steps > finished
    why = f"all {finished} steps are done, and the checkpoints to continue from have been deleted"
    check(not gone, "resume", source, why, "start a new run, without resume")


def check_newest(path: Path, run: Run) -> None:
    """Check that `run` can continue the run that wrote the checkpoint to resume from.

    The config in the checkpoint is checked; if it cannot be read, nothing is checked here. It is not enough to check
    the config file of the run directory, because that file or the checkpoint may have been copied from another run.

    Raises:
        ConfigError: as in `check_resumable`.
    """
    checkpoint = _to_resume_from(path, run)
    try:
        text = saved_text(checkpoint, CONFIG)
        saved = parse_config(text.encode()) if text else {}
    except (OSError, DamagedError, ConfigError, UnreadableConfigError):
        return  # when the checkpoint is loaded, an error says why, or the previous checkpoint is taken
    if saved:
        check_resumable(saved, run.config, str(checkpoint))


def check_data(path: Path, run: Run) -> None:
    """Check the data before anything is written. `State.resume` does so again, with the checkpoint that it loads.

    Raises:
        ConfigError: with the key `data`, if the data is not that of the checkpoint to resume from.
    """
    try:
        signature = saved_signature(_to_resume_from(path, run))
    except (OSError, DamagedError, ConfigError):
        return
    run.workload.continue_with(signature)
    run.workload.check_same_samples(signature)


def _to_resume_from(path: Path, run: Run) -> Path:
    newest = run_directory.step_name(run_directory.newest_step(path))
    return named_checkpoint(run) or path / "checkpoints" / newest


def _unfinished(run: Run, parent: Path) -> Claim | None:
    """Claim the newest unfinished run in `parent` with the config of `run`, or log in what the nearest differs."""
    nearest, fewest = None, []
    for path in reversed(run_directory.readable_entries(parent)):
        if path.is_symlink():  # such as `latest`; the run itself is in this directory, or belongs to another one
            continue
        if run_directory.read_result(path).get("status") == "done":
            continue
        found = _differences(path, run)
        if found:
            near = len(found) < (len(fewest) or _NEAR + 1) and run_directory.newest_step(path) > 0
            if near and not is_locked(path / ".lock"):
                nearest, fewest = path, found
        elif found is not None:
            lock = _locked(path)
            if lock is not None and run_directory.read_result(path).get("status") == "done":  # finished in the meantime
                lock.close()
            elif lock is not None:
                return Claim(path.resolve(), lock)
        elif (path / run_directory.CONFIG).exists():
            log.warning("%s is skipped: its config cannot be read or used", path)
    if nearest is not None:
        can_continue = not any(each.is_essential for each in fewest)
        where = f"{text_override('resume', nearest)} continues it with these options" if can_continue else nearest
        log.warning("a new run begins; the nearest unfinished one has %s: %s", "; ".join(map(str, fewest)), where)
    return None


def _started(run: Run, path: Path) -> Claim | None:
    """Claim the directory `path` if its run has the config of `run`, or none has begun; rename another run."""
    if not os.path.lexists(path):
        return None
    for each in (path, path / run_directory.CONFIG):
        check_readable("--run-directory", each)
    is_run = path.is_dir() and not path.is_symlink()
    is_run = is_run and (_has_not_begun(path) or is_of_a_run(path) or _differences(path, run) == [])
    check(is_run, "--run-directory", str(path), "it exists, and is not a run directory", "name another one")
    lock = _locked_for_us(path)
    if _has_not_begun(path):  # only now can nobody else begin
        return Claim(path.resolve(), lock, has_run=False)
    found = _differences(path, run)
    if found == []:
        return Claim(path.resolve(), lock)
    aside = run_directory.free_name(path, "superseded")
    with lock:
        try:
            os.replace(path, aside)
        except OSError as error:
            why = f"the run in it has another config, and it cannot be renamed ({error.strerror})"
            raise ConfigError("--run-directory", str(path), why, "name another one") from None
    what = "; ".join(map(str, (found or [])[:_NEAR])) or "it cannot be read"
    log.warning("the run in %s has another config: it is now in %s (%s)", path, aside.name, what)
    return None


def _has_not_begun(path: Path) -> bool:
    """Return whether the directory `path` is empty, or that of a run that was killed before it wrote its config."""
    names = {entry.name for entry in path.iterdir()}
    return not names or (".lock" in names and names <= _BEFORE_CONFIG)


def _differences(path: Path, run: Run) -> list[Difference] | None:
    """Return in what the run in `path` differs from `run`; None if there is no run whose config can be compared."""
    try:
        saved = saved_config(path).values
    except UnreadableConfigError as error:
        why = f"whether {path} is the run to resume cannot be determined, because its config cannot be read ({error})"
        remedy = "resume=never starts a new run; resume=auto goes on without that directory once it is moved away"
        check(not _may_have_checkpoints(path), "resume", run.resume, why, remedy)
        return None
    try:
        return differences(saved, run.config)
    except ConfigError:  # it names a class that cannot be loaded, for example of a package that has been removed
        return None


def _may_have_checkpoints(path: Path) -> bool:
    """Return whether the run directory `path` has checkpoints; True if they cannot be listed."""
    try:
        return bool(checkpoints(path))
    except ConfigError:
        return True
