"""Where a run starts: in a new run directory, or in that of the run to resume, checked and locked."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

from runner.config.errors import ConfigError, check
from runner.config.overrides import override_key
from runner.parallel.session import Session
from runner.result import Result
from runner.resume.changed_options import Difference, check_resumable, differences
from runner.run import Run
from runner.storage import run_directory, saved_run
from runner.storage.files import check_readable, is_locked, json_text, read_regular, renamed_together, sync
from runner.storage.manifest import DamagedError, saved_text, verified_manifest
from runner.storage.saved_run import UnreadableConfigError, named_checkpoint, saved_config
from runner.storage.signature import checkpoint_to_resume, saved_signature
from runner.system.provenance import environment
from runner.system.secrets import redacted_values
from runner.tracking.recorder import flatten

log = logging.getLogger(__name__)

_FIRST = (run_directory.ENVIRONMENT, run_directory.OVERRIDES)
_BEFORE_CONFIG = {".lock", *_FIRST, *(f".{name}.part" for name in (*_FIRST, run_directory.CONFIG))}
"""The files that a run which is killed before it has written its config may leave behind, the lock always."""

_SHOWN = 5  # differences that a message mentions


@dataclass
class Claim:
    """The run directory `path`, which is absolute, with its open lock file.

    Args:
        has_run: whether there is a run in it; otherwise, it is empty, or a run was killed before it wrote its config.
        result: the values of the `Result` of the run if it has no steps left to do; otherwise None.
        begin: writes, once, what says that a session with steps to do has begun; it may be called in any process.
    """

    path: Path
    lock: IO[str]
    has_run: bool = True
    result: dict[str, Any] | None = None
    begin: Callable[[], None] = lambda: None


@contextmanager
def claimed_directory(
    run: Run, session: Session, parent: Path, name: str | None, overrides: list[str]
) -> Iterator[Claim]:
    """Yield the claim of a new run directory or of that of the run to resume, and keep it locked inside the context.

    The config, the overrides and the environment are written to a new directory at once, and to an existing one by
    `Claim.begin`, once nothing else refuses the session. After a `ConfigError`, a new directory is removed.

    Args:
        run: the run. Its option `resume` determines which earlier run is resumed, if any.
        session: the session that begins.
        parent: the directory in which a new run directory is created, and in which `resume=auto` searches.
        name: the name of the run directory, if `--run-directory` sets it; None for a new, unique name.
        overrides: the overrides with which the config was composed, for the files and a unique name.

    Raises:
        ConfigError: if the run to resume does not exist, is running, or cannot be continued with this config; if the
            directory `name` exists, and is not resumed; or if the directory cannot be written to.
    """
    existing = run_directory.nearest_existing(parent / (name or "")).resolve()
    claim = _to_resume(run, parent, name) or _new_directory(parent, name, overrides, existing)
    begun = False
    with claim.lock:
        try:
            if claim.has_run:
                if run.resume != "auto":
                    _check_named(run, session, claim.path, run.resume)
                _check_checkpoint(claim, run, session)
            if claim.result is None:
                claim.begin = _beginning(claim, run, overrides)
            if not claim.has_run:
                claim.begin()
            begun = True
            yield claim
        except BaseException as error:
            if not claim.has_run and (isinstance(error, ConfigError) or not begun):
                for entry in claim.path.iterdir():
                    entry.unlink() if entry.is_symlink() or not entry.is_dir() else shutil.rmtree(entry)
                run_directory.remove_empty(claim.path, existing)
            raise


def _new_directory(parent: Path, name: str | None, overrides: list[str], existing: Path) -> Claim:
    path = run_directory.create(parent, name, overrides, "output_root" if name is None else "--run-directory")
    try:
        lock = run_directory.lock(path)
    except OSError as error:
        with suppress(OSError):  # of a file system without locks; nobody else can have locked it
            (path / ".lock").unlink()
        run_directory.remove_empty(path, existing)
        raise _unwritable("output_root", path, error) from None
    return Claim(path, _needed("--run-directory", path, lock), has_run=False)


def _needed(key: str, path: Path, lock: IO[str] | None) -> IO[str]:
    if lock is None:
        raise ConfigError(key, str(path), "another process is running in it", "wait for it, or stop it")
    return lock


def _unwritable(key: str, path: Path, error: OSError) -> ConfigError:
    why = f"{error.filename or path} cannot be written ({error.strerror})"
    return ConfigError(key, str(path), why, "make room, or make it writable")


def _beginning(claim: Claim, run: Run, overrides: list[str]) -> Callable[[], None]:
    """Return `Claim.begin`, which can be pickled, for a session that has steps to do."""
    code = saved_run.warn_of_changed_code(claim.path)  # of a new run, none
    about = json_text({"began": datetime.now(UTC).isoformat(), **environment(), "code": code})
    earlier = _still_true(claim.path, run.config, set(map(override_key, overrides)))
    files = {claim.path / run_directory.ENVIRONMENT: about.encode()}
    files |= saved_run.config_files(claim.path, run.config, redacted_values([*earlier, *overrides]))
    key = "resume" if claim.has_run else "output_root"
    return partial(_begin, claim.path, files, named_checkpoint(run.resume), key)


def _still_true(path: Path, config: dict[str, Any], typed: set[str]) -> list[str]:
    """Return the earlier overrides of the run in `path` of which no key is `typed`, and none has another value now.

    The checkpoint that is resumed may have been saved before they were typed, or another option of a group is chosen.
    """
    then = now = flatten(redacted_values(config))
    with suppress(UnreadableConfigError):
        then = flatten(saved_config(path).values)
    changed = {key for key in {*then, *now} if then.get(key) != now.get(key)} - typed
    keys = {key[:end] for key in changed for end in (*(dot.start() for dot in re.finditer(r"\.", key)), None)}
    return [text for text in saved_run.saved_overrides(path) if override_key(text) not in keys | typed]


def _begin(path: Path, files: Mapping[Path, bytes], named: Path | None, key: str) -> None:
    """Write `files`, and rename the earlier result and the checkpoints after `named`; all, or nothing."""
    try:
        with suppress(OSError):
            if all(read_regular(file, len(content)) == content for file, content in files.items()):
                return  # they hold the time of the session: one of its processes has begun it
        later = _later_checkpoints(named)
        superseded = [*later, path / run_directory.RESULT] if (path / run_directory.RESULT).exists() else later
        with renamed_together(files):
            for current in superseded:
                os.replace(current, run_directory.free_name(current, "superseded"))
            for folder in {current.parent for current in superseded}:
                sync(folder)  # a power loss must not leave the new config beside later checkpoints
        if named and later:
            log.warning("back to %s: the later checkpoints and the result are now named *.superseded", named.name)
    except OSError as error:
        raise _unwritable(key, path, error) from None


def _later_checkpoints(checkpoint: Path | None) -> list[Path]:
    if checkpoint is None:
        return []
    step = run_directory.step_of(checkpoint) or 0
    return [path for path in checkpoint.parent.iterdir() if (run_directory.step_of(path) or 0) > step]


def _result_if_done(path: Path, run: Run, session: Session) -> dict[str, Any] | None:
    """Return the result of the run in `path`; None if steps are left to do, or the last ones have to be repeated."""
    result = run_directory.read_result(path)
    ended = result.get("steps", 0) >= session.num_steps
    if not ended and result.get("stopped_by"):
        with suppress(UnreadableConfigError):
            ended = saved_config(path).values.get("stop") == run.config.get("stop")
    done = result.get("status") == "done" and ended and not _later_checkpoints(named_checkpoint(run.resume))
    if done and run.keep > 0:
        newest = path / "checkpoints" / run_directory.step_name(run_directory.newest_step(path))
        try:
            done = verified_manifest(newest)["step"] == result["steps"]
        except DamagedError:  # or there is no checkpoint
            done = False
    known = {field.name for field in fields(Result) if field.init}
    return {key: value for key, value in result.items() if key in known} if done else None


def _to_resume(run: Run, parent: Path, name: str | None) -> Claim | None:
    source = run.resume
    if source == "never":
        return None
    if source == "auto":
        return _unfinished(run, parent) if name is None else _started(run, parent / name)
    path = saved_run.directory_of(Path(source)).resolve()
    return Claim(path, _needed("resume", path, _locked(path)))


def _locked(path: Path) -> IO[str] | None:
    try:
        run_directory.check_regular(path)
        return run_directory.lock(path)
    except OSError as error:
        remedy = "make it writable, or resume a copy of it that you own"
        raise ConfigError("resume", str(error.filename or path), str(error.strerror), remedy) from None


def _check_named(run: Run, session: Session, path: Path, source: str) -> None:
    checkpoint = named_checkpoint(source)
    saved = saved_config(checkpoint or path)
    if checkpoint is not None and (not checkpoint.is_dir() or run_directory.step_of(checkpoint) is None):
        names = ", ".join(each.name for each in saved_run.checkpoints(path))
        remedy = f"choose from: {names}" if names else "it has none: resume its run directory, or start a new run"
        raise ConfigError("resume", source, "there is no such checkpoint", remedy)
    check_resumable(saved.values, run.config, source)
    if other := [each for each in differences(saved.values, run.config) if each.key.startswith("code.")]:
        log.warning("the code has another name than in the last session: %s", "; ".join(map(str, other)))
    newest, result = run_directory.newest_step(path), run_directory.read_result(path)
    finished = result["steps"] if result.get("status") == "done" else 0
    done = max(newest, finished) if checkpoint is None else run_directory.step_of(checkpoint) or 0
    more = f"steps={done + 1} or more, or more epochs, or name an earlier checkpoint of it"
    check(done <= session.num_steps, "steps", session.num_steps, f"{done} are done already", more)
    if finished and checkpoint is None and newest == 0 and session.num_steps > finished:
        why = f"all {finished} steps are done, and the checkpoints to continue from have been deleted"
        raise ConfigError("resume", source, why, "start a new run, without resume")


def _check_checkpoint(claim: Claim, run: Run, session: Session) -> None:
    """Check that `run` can continue the run that wrote the checkpoint to resume from, and find out if it is done."""
    # The config of the run directory is not enough: it or the checkpoint may have been copied from another run. What
    # cannot be read is not checked: when it is loaded, an error says why, or the previous checkpoint is taken.
    checkpoint, saved, signature = checkpoint_to_resume(claim.path, run.resume), None, None
    unreadable = (OSError, DamagedError, ConfigError)
    with suppress(*unreadable):
        saved = saved_run.parse_config((saved_text(checkpoint, run_directory.CONFIG) or "").encode())
    with suppress(*unreadable):
        signature = saved_signature(checkpoint)
    if saved is not None:
        check_resumable(saved, run.config, str(checkpoint))
    claim.result = _result_if_done(claim.path, run, session)
    if claim.result is None and signature is not None:
        run.workload.continue_with(signature)
        run.workload.check_same_samples(signature)


def _unfinished(run: Run, parent: Path) -> Claim | None:
    """Claim the newest unfinished run in `parent` with the config of `run`, or log in what the newest differs.

    Raises:
        ConfigError: if the only ones with that config are running.
    """
    newest, running = None, None
    for path in reversed(run_directory.readable_entries(parent)):
        if path.is_symlink() or run_directory.read_result(path).get("status") == "done":  # a link such as `latest`
            continue
        found = _differences(path, run)
        if found:
            if newest is None and run_directory.newest_step(path) > 0 and not is_locked(path / ".lock"):
                newest = path, "; ".join(map(str, found[:_SHOWN]))
        elif found is not None:
            lock = _locked(path)
            if lock is None:
                running = path
            elif run_directory.read_result(path).get("status") == "done":  # finished in the meantime
                lock.close()
            else:
                return Claim(path.resolve(), lock)
        elif (path / run_directory.CONFIG).exists():
            log.warning("%s is skipped: its config cannot be read or used", path)
    why = f"the run of this config, {running}, is running"
    check(running is None, "resume", "auto", why, "wait for it, or stop it; resume=never starts another run")
    if newest is not None:
        log.warning("a new run begins; the newest unfinished one, %s, has %s", *newest)
    return None


def _started(run: Run, path: Path) -> Claim | None:
    """Claim the directory `path` if its run has the config of `run`, or none has begun; rename another run."""
    if not os.path.lexists(path):
        return None
    for each in (path, path / run_directory.CONFIG):
        check_readable("--run-directory", each)
    if not path.is_dir() or path.is_symlink() or not (_has_not_begun(path) or saved_run.is_of_a_run(path)):
        raise ConfigError("--run-directory", str(path), "it exists, and is not a run directory", "name another one")
    lock = _needed("resume", path, _locked(path))
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
    what = "; ".join(map(str, (found or [])[:_SHOWN])) or "it cannot be read"
    log.warning("the run in %s has another config: it is now in %s (%s)", path, aside.name, what)
    return None


def _has_not_begun(path: Path) -> bool:
    """Return whether the directory `path` is empty, or that of a run that was killed before it wrote its config."""
    names = {entry.name for entry in path.iterdir()}
    return not names or (".lock" in names and names <= _BEFORE_CONFIG)


def _differences(path: Path, run: Run) -> list[Difference] | None:
    """Return in what the run in `path` differs from `run`; None if there is no run whose config can be compared."""
    try:
        saved = saved_config(path, is_read_only=True).values
    except UnreadableConfigError as error:
        may_have_checkpoints = True
        with suppress(ConfigError):  # they cannot be listed
            may_have_checkpoints = bool(saved_run.checkpoints(path))
        if may_have_checkpoints:
            why = f"whether {path} is the run to resume is not known: {error.why}"
            remedy = "resume=never starts a new run; resume=auto goes on without that directory once it is moved away"
            raise ConfigError("resume", run.resume, why, remedy) from None
        return None
    try:
        return differences(saved, run.config)
    except ConfigError:  # it names a class that cannot be loaded, for example of a package that has been removed
        return None
