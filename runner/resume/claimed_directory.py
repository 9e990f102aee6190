"""The choice of a run's directory: a new directory, or the directory of the run to resume."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from runner.config.errors import ConfigError, check
from runner.config.overrides import override_key
from runner.result import Result
from runner.resume.earlier_run import Claim, check_data, check_newest, later_checkpoints, named_checkpoint, to_resume
from runner.run import Run
from runner.session import Session
from runner.storage import run_directory
from runner.storage.durable_write import sync, write_bytes, write_json
from runner.storage.manifest import DamagedError, verified_manifest
from runner.storage.regular_file import UnsafeFileError, read_regular
from runner.storage.saved_config import UnreadableConfigError
from runner.storage.saved_run import saved_config, saved_overrides
from runner.system.provenance import environment
from runner.system.secrets import redacted_values

log = logging.getLogger(__name__)


@contextmanager
def claimed_directory(
    run: Run, session: Session, parent: Path, name: str | None, overrides: list[str]
) -> Iterator[Path]:
    """Yield a new run directory, or the directory of the run to resume, and keep it locked inside the context.

    First, the config, the overrides and the environment are written to the directory, unless the run has already done
    all of its steps (see `finished`). If a `ConfigError` is raised inside the context, all changes are undone.

    Args:
        run: the run. Its option `resume` determines which earlier run is resumed, if any.
        session: the session that begins.
        parent: the directory in which a new run directory is created, and in which `resume=auto` searches.
        name: the name of the run directory, if `--run-directory` sets it; None for a new, unique name.
        overrides: the overrides with which the config was composed. They are written to the directory, and included in
            a new, unique name.

    Raises:
        ConfigError: if the run to resume does not exist, is running, or cannot be continued with this config; if the
            directory `name` exists, and the run in it is not resumed; or if the directory cannot be written to. The
            error names the key, such as `resume`.
    """
    found = to_resume(run, session, parent, name)
    existing = run_directory.nearest_existing(parent if found is None else found.path)
    path, lock, has_run = found or _new_directory(parent, name, overrides, existing)
    begun = False
    try:
        if has_run:
            check_newest(path, run)
        with ExitStack() as undo:
            if not _is_done(path, run, session):
                if has_run:
                    check_data(path, run)
                _begin_session(path, run, overrides, undo, resumed=has_run)
            begun = True
            try:
                yield path
            except ConfigError:  # a refused run leaves no trace
                raise
            except BaseException:
                undo.pop_all()
                raise
            undo.pop_all()
    except BaseException as error:
        if not has_run and (isinstance(error, ConfigError) or not begun):
            _clear(path)
            run_directory.remove_empty(path, existing)
        raise
    finally:
        lock.close()


def _new_directory(parent: Path, name: str | None, overrides: list[str], existing: Path) -> Claim:
    """Create a run directory and lock it. If this fails, remove it and its empty parents below `existing`."""
    if name is not None:
        remedy = "name a new one; resume=auto continues the run in it"
        check(not os.path.lexists(parent / name), "--run-directory", str(parent / name), "it exists", remedy)
    try:
        path = run_directory.create(parent, name, overrides)
    except ConfigError as error:
        if name is None:
            raise
        raise ConfigError("--run-directory", str(parent / name), error.why, "name another one") from None
    try:
        lock = run_directory.lock(path)
    except OSError as error:
        with suppress(OSError):  # of a file system without locks; nobody else can have locked it
            (path / ".lock").unlink()
        run_directory.remove_empty(path, existing)
        why = f"{error.filename or path} cannot be written or locked ({error.strerror})"
        raise ConfigError("output_root", str(path), why, "make room, or output_root=DIR elsewhere") from None
    why, remedy = "another process is running in it", "wait for it, or name another one"
    check(lock is not None, "--run-directory", str(path), why, remedy)
    assert lock is not None
    return Claim(path, lock, has_run=False)


def _clear(path: Path) -> None:
    """Remove everything in `path`, a locked directory in which this process has begun a run."""
    for entry in path.iterdir():
        entry.unlink() if entry.is_symlink() or not entry.is_dir() else shutil.rmtree(entry)


def finished(directory: Path) -> dict[str, Any] | None:
    """Return the fields of the result of the run in `directory` if it has no steps left to do; otherwise None.

    This function must be called inside `claimed_directory`, which renames the result file of a run that has steps left.
    A run whose result file still has its original name is therefore finished.
    """
    result, known = run_directory.read_result(directory), {field.name for field in fields(Result) if field.init}
    return {name: value for name, value in result.items() if name in known} if result else None


def _is_done(path: Path, run: Run, session: Session) -> bool:
    result, named = run_directory.read_result(path), named_checkpoint(run)
    newest = named is None or not later_checkpoints(named)
    ended = result.get("steps", 0) >= session.num_steps or (result.get("stopped_by") and _has_same_rules(path, run))
    done = result.get("status") == "done" and ended and newest
    return bool(done) and (run.keep == 0 or _newest_is_valid(path, result["steps"]))


def _has_same_rules(path: Path, run: Run) -> bool:
    """Return whether the run in `path`, which a rule of `stop` has ended, has the same rules as `run`."""
    try:
        return saved_config(path).values.get("stop") == run.config.get("stop")
    except UnreadableConfigError:
        return False


def _newest_is_valid(path: Path, steps: int) -> bool:
    """Return whether the newest checkpoint is intact and that of step `steps`; otherwise, last steps are repeated."""
    try:
        newest = path / "checkpoints" / run_directory.step_name(run_directory.newest_step(path))
        return verified_manifest(newest)["step"] == steps
    except DamagedError:  # or there is no checkpoint
        return False


def _begin_session(path: Path, run: Run, overrides: list[str], undo: ExitStack, resumed: bool) -> None:
    """Write config, overrides and environment; rename an earlier result and later checkpoints; `undo` reverts it."""
    known = set(map(override_key, overrides))
    earlier = [text for text in saved_overrides(path) if override_key(text) not in known]
    try:
        for name in (run_directory.CONFIG, run_directory.OVERRIDES, run_directory.ENVIRONMENT):
            there = (path / name).exists()
            content = read_regular(path / name, run_directory.LIMIT_BYTES) if there else None
            undo.callback(_undone, path / name, partial(_restore, path / name, content))
        result = path / run_directory.RESULT
        superseded = [result] if result.exists() else []
        superseded += later_checkpoints(named_checkpoint(run))
        for current in superseded:
            aside = run_directory.free_name(current, "superseded")
            os.replace(current, aside)
            undo.callback(_undone, current, partial(os.replace, aside, current))
        if superseded:  # before the config is written: a power loss must not leave it beside later checkpoints
            sync(superseded[-1].parent)
        run_directory.write_config(path, run.config, redacted_values([*earlier, *overrides]))
        write_json(path / run_directory.ENVIRONMENT, environment())
    except UnsafeFileError as error:
        remedy = "move it away, or resume a copy of the run without it"
        raise ConfigError("resume", str(error.filename or path), str(error.strerror), remedy) from None
    except OSError as error:
        why = f"{error.filename or path} cannot be written ({error.strerror})"
        key, remedy = "output_root", "make room, or output_root=DIR elsewhere"
        if resumed:  # `output_root` would have no effect
            key, remedy = "resume", "make room, or make the directory writable"
        raise ConfigError(key, str(path), why, remedy) from None


def _restore(path: Path, content: bytes | None) -> None:
    """Restore the file `path` to its previous `content` if it has changed; None: there was no such file."""
    if content is None:
        path.unlink(missing_ok=True)
    elif not path.exists() or read_regular(path, run_directory.LIMIT_BYTES) != content:
        write_bytes(path, content)


def _undone(path: Path, restore: Callable[[], None]) -> None:
    """Call `restore`. If it fails, only log a warning, so that the user still sees why the session was refused."""
    try:
        restore()
    except OSError as error:
        log.warning("%s cannot be restored: %s", path, error)
