"""The choice of a run's directory: a new directory, or the directory of the run to resume."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import IO, Any

from runner.config.errors import ConfigError, check
from runner.config.overrides import override_key
from runner.config.schema import load_class, option_fields
from runner.run import Result, Run, Session, hashed_options
from runner.storage import run_directory
from runner.storage.durable_write import sync, write_bytes, write_json
from runner.storage.manifest import CONFIG, DamagedError, saved_text, verified_manifest
from runner.storage.regular_file import UnsafeFileError, check_readable, read_regular
from runner.storage.saved_config import UnreadableConfigError, parse_config
from runner.storage.saved_run import checkpoints, directory_of, saved_config, saved_overrides
from runner.system.provenance import environment
from runner.system.secrets import redacted_values

log = logging.getLogger(__name__)


@contextmanager
def claimed_directory(session: Session, parent: Path, name: str | None, overrides: list[str]) -> Iterator[Path]:
    """Yield a new run directory, or the directory of the run to resume, and keep it locked inside the context.

    First, the config, the overrides and the environment are written to the directory, unless the run has already done
    all of its steps (see `finished`). If a `ConfigError` is raised inside the context, all changes are undone.

    Args:
        session: the session that begins. Its option `resume` determines which earlier run is resumed, if any.
        parent: the directory in which a new run directory is created, and in which `resume=auto` searches.
        name: the name of the run directory, if `--run-directory` sets it; None for a new, unique name.
        overrides: the overrides with which the config was composed. They are written to the directory, and included in
            a new, unique name.

    Raises:
        ConfigError: if the run to resume does not exist, is running, or cannot be continued with this config; if the
            directory `name` exists, and the run in it is not resumed; or if the directory cannot be written to. The
            error names the key, such as `resume`.
    """
    found, lock = _to_resume(session, parent, name)
    if name is not None and found is None:
        remedy = "name a new one; resume=auto continues the run in it"
        check(not os.path.lexists(parent / name), "--run-directory", str(parent / name), "it exists", remedy)
    existing = run_directory.nearest_existing(parent)
    try:
        path = found or run_directory.create(parent, name, overrides)
    except ConfigError as error:
        if name is None:
            raise
        raise ConfigError("--run-directory", str(parent / name), error.why, "name another one") from None
    begun = False
    try:
        lock = lock or _locked_new(path)
        if found is not None:
            _check_newest(path, session)
        with ExitStack() as undo:
            if not _is_done(path, session):
                _begin_session(path, session, overrides, undo, resumed=found is not None)
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
        if found is None and (isinstance(error, ConfigError) or not begun):
            if lock is not None:  # otherwise, another process may run in the directory
                shutil.rmtree(path)
            run_directory.remove_empty(run_directory.nearest_existing(parent / path.name), existing)
        raise
    finally:
        if lock is not None:
            lock.close()


def finished(directory: Path) -> Result | None:
    """Return the result of the run in `directory` if the run has no steps left to do; otherwise None.

    This function must be called inside `claimed_directory`, which renames the result file of a run that has steps left.
    A run whose result file still has its original name is therefore finished.
    """
    result, known = run_directory.read_result(directory), {field.name for field in fields(Result) if field.init}
    return Result(**{name: value for name, value in result.items() if name in known}) if result else None


def _is_done(path: Path, session: Session) -> bool:
    result, named = run_directory.read_result(path), _named_checkpoint(session)
    newest = named is None or not _later(named)
    ended = result.get("steps", 0) >= session.num_steps or (result.get("stopped_by") and _has_same_rules(path, session))
    done = result.get("status") == "done" and ended and newest
    return bool(done) and (session.run.keep == 0 or _newest_is_valid(path, result["steps"]))


def _has_same_rules(path: Path, session: Session) -> bool:
    """Return whether the run in `path`, which a rule of `stop` has ended, has the same rules as `session`."""
    try:
        return saved_config(path).values.get("stop") == session.run.config.get("stop")
    except UnreadableConfigError:
        return False


def _newest_is_valid(path: Path, steps: int) -> bool:
    """Return whether the newest checkpoint in the run directory `path` is intact, and is that of step `steps`.

    If the result is False, the run is resumed from an earlier checkpoint and repeats its last steps.
    """
    try:
        newest = path / "checkpoints" / run_directory.step_name(run_directory.newest_step(path))
        return verified_manifest(newest)["step"] == steps
    except DamagedError:  # or there is no checkpoint
        return False


def _begin_session(path: Path, session: Session, overrides: list[str], undo: ExitStack, resumed: bool) -> None:
    """Write the config, the overrides and the environment of this session to the run directory.

    The result file of the previous session is renamed, not deleted. If `resume` is the path of a checkpoint, all
    checkpoints of later steps are renamed, too.

    Args:
        path: the run directory.
        session: the session that begins.
        overrides: the overrides of this session. The file of the overrides also keeps those of earlier sessions, except
            for keys that this session overrides.
        undo: an `ExitStack`, to which callbacks that restore the previous files are added. The caller calls them if
            this session is refused.
        resumed: whether an earlier session has used the run directory; only the error message depends on it.

    Raises:
        ConfigError: if a file cannot be read, written or renamed. The error names the key `resume` if `resumed` is True
            or a file is unsafe to read, such as a link; otherwise the key `output_root`.
    """
    known = set(map(override_key, overrides))
    earlier = [text for text in saved_overrides(path) if override_key(text) not in known]
    try:
        for name in (run_directory.CONFIG, run_directory.OVERRIDES, run_directory.ENVIRONMENT):
            there = (path / name).exists()
            content = read_regular(path / name, run_directory.LIMIT_BYTES) if there else None
            undo.callback(_undone, path / name, partial(_restore, path / name, content))
        result = path / run_directory.RESULT
        superseded = [result] if result.exists() else []
        superseded += _later(_named_checkpoint(session))
        for current in superseded:
            aside = run_directory.free_name(current, "superseded")
            os.replace(current, aside)
            undo.callback(_undone, current, partial(os.replace, aside, current))
        if superseded:  # before the config is written: a power loss must not leave it beside later checkpoints
            sync(superseded[-1].parent)
        run_directory.write_config(path, session.run.config, redacted_values([*earlier, *overrides]))
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
    """Restore the file `path` to its previous `content` if it has changed.

    If `content` is None, there was no such file, and the file is deleted.

    Raises:
        OSError: if the file has changed and cannot be restored.
    """
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


def _named_checkpoint(session: Session) -> Path | None:
    """Return the checkpoint that `resume` names; None if `resume` is a run directory, `auto` or `never`."""
    source = Path(session.run.resume)
    return source.resolve() if source.parent.name == "checkpoints" else None


def _later(checkpoint: Path | None) -> list[Path]:
    """Return the checkpoints of all steps after the step of `checkpoint`; an empty list if `checkpoint` is None."""
    if checkpoint is None:
        return []
    step = run_directory.step_of(checkpoint) or 0
    return [path for path in checkpoint.parent.iterdir() if (run_directory.step_of(path) or 0) > step]


def _locked(path: Path) -> IO[str] | None:
    """Lock the run directory `path`, and return the open lock file; None if another process holds the lock.

    Raises:
        ConfigError: if the directory cannot be written to, or contains a link, a pipe or a device.
    """
    try:
        run_directory.check_regular(path)
        return run_directory.lock(path)
    except OSError as error:
        remedy = "resume a copy of it that you own" if isinstance(error, UnsafeFileError) else "make it writable"
        raise ConfigError("resume", str(error.filename or path), str(error.strerror), remedy) from None


def _locked_new(path: Path) -> IO[str]:
    """Lock the new run directory `path`, and return the open lock file.

    Raises:
        ConfigError: if no file can be created in the directory, or if another process with the same `--run-directory`
            has already locked the directory.
    """
    try:
        lock = run_directory.lock(path)
    except OSError as error:
        with suppress(OSError):  # of a file system without locks; nobody else can have locked it
            (path / ".lock").unlink()
        why = f"{error.filename or path} cannot be written or locked ({error.strerror})"
        raise ConfigError("output_root", str(path), why, "make room, or output_root=DIR elsewhere") from None
    why, remedy = "another process is running in it", "wait for it, or name another one"
    check(lock is not None, "--run-directory", str(path), why, remedy)
    assert lock is not None
    return lock


def _locked_for_us(path: Path) -> IO[str]:
    lock = _locked(path)
    check(lock is not None, "resume", str(path), "another process is running in it", "wait for it, or stop it")
    assert lock is not None
    return lock


def _to_resume(session: Session, parent: Path, name: str | None) -> tuple[Path | None, IO[str] | None]:
    """Return the directory of the run to resume, and its open lock file; (None, None) if a new run begins.

    With `resume=auto`, the run is the one in the directory `name`; if `name` is None, the run is found by its config.

    Raises:
        ConfigError: if the run to resume does not exist, is running, or cannot be continued with this config.
    """
    source = session.run.resume
    if source == "never":
        return None, None
    if source == "auto":
        return _unfinished(session, parent) if name is None else _started(session, parent / name)
    path = directory_of(Path(source)).resolve()
    lock = _locked_for_us(path)
    try:
        _check_named(session, path, source)
    except ConfigError:
        lock.close()
        raise
    return path, lock


def _check_named(session: Session, path: Path, source: str) -> None:
    """Check that the run in the directory `path` can be resumed.

    Args:
        session: the session that resumes the run.
        path: the run directory.
        source: the value of the option `resume`: the path of a run directory, or of a checkpoint in one.

    Raises:
        ConfigError: if there is no such run or checkpoint, if the config belongs to another run, if the run already has
            more steps than this session asks for, or if the checkpoints to continue from have been deleted.
    """
    checkpoint = _named_checkpoint(session)
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
    check_resumable(saved.values, redacted_values(session.run.config), source)
    newest, result = run_directory.newest_step(path), run_directory.read_result(path)
    finished = result["steps"] if result.get("status") == "done" else 0
    done = max(newest, finished) if checkpoint is None else run_directory.step_of(checkpoint) or 0
    asking = "epochs" if session.run.epochs is not None else "the options of the workload"
    derived = f", and {asking} ask for {session.num_steps}" if session.run.steps is None else ""
    why, more = f"{done} are done already{derived}", f"steps={done + 1} or more, or name an earlier checkpoint of it"
    check(done <= session.num_steps, "steps", session.num_steps, why, more)
    gone = finished and checkpoint is None and newest == 0 and session.num_steps > finished
    why = f"all {finished} steps are done, and the checkpoints to continue from have been deleted"
    check(not gone, "resume", source, why, "start a new run, without resume")


def _check_newest(path: Path, session: Session) -> None:
    """Check that `session` can continue the run that wrote the checkpoint to resume from.

    The config in the checkpoint is checked; if it cannot be read, nothing is checked here. It is not enough to check
    the config file of the run directory, because that file or the checkpoint may have been copied from another run.

    Raises:
        ConfigError: as in `check_resumable`.
    """
    checkpoint = _named_checkpoint(session) or path / "checkpoints" / run_directory.step_name(
        run_directory.newest_step(path)
    )
    try:
        text = saved_text(checkpoint, CONFIG)
        saved = parse_config(text.encode()) if text else {}
    except (OSError, DamagedError, ConfigError, UnreadableConfigError):
        return  # when the checkpoint is loaded, an error says why, or the previous checkpoint is taken
    if saved:
        check_resumable(saved, redacted_values(session.run.config), str(checkpoint))


def _unfinished(session: Session, parent: Path) -> tuple[Path | None, IO[str] | None]:
    """Find the newest unfinished run in `parent` that has the config of `session` and is not running, and lock it.

    Returns:
        The run directory and the open lock file; (None, None) if there is no such run.

    Raises:
        ConfigError: if `parent` cannot be read, the run cannot be locked, or `_has_same_config` raises an error.
    """
    for path in reversed(run_directory.readable_entries(parent)):
        if path.is_symlink():  # such as `latest`; the run itself is in this directory, or belongs to another one
            continue
        if run_directory.read_result(path).get("status") == "done" or not _has_same_config(path, session):
            continue
        lock = _locked(path)
        if lock is not None and run_directory.read_result(path).get("status") == "done":  # finished in the meantime
            lock.close()
        elif lock is not None:
            return path.resolve(), lock
    return None, None


def _started(session: Session, path: Path) -> tuple[Path | None, IO[str] | None]:
    """Return the run directory `path` and its open lock file if the run in it has the config of `session`.

    If `path` does not exist, return (None, None). If `path` contains neither a config nor checkpoints, delete `path`
    and return (None, None). If the run in `path` has another config, rename `path` and return (None, None).

    Raises:
        ConfigError: if `path` exists and is not a run directory; if it cannot be read or renamed; if the run in it is
            running; or if the run has checkpoints, but its config cannot be read.
    """
    if not os.path.lexists(path):
        return None, None
    for each in (path, path / run_directory.CONFIG):
        check_readable("--run-directory", each)
    check(_is_run(path), "--run-directory", str(path), "it exists, and is not a run directory", "name another one")
    lock = _locked_for_us(path)
    if _has_same_config(path, session):
        return path.resolve(), lock
    begun = _has_begun(path)
    aside = run_directory.free_name(path, "superseded")
    with lock:  # a process that has just created the directory, and not locked it yet, must not begin in it
        try:
            os.replace(path, aside)
        except OSError as error:
            why = "the run in it has another config, and it" if begun else "it contains no run, and"
            why = f"{why} cannot be renamed ({error.strerror})"
            raise ConfigError("--run-directory", str(path), why, "name another one") from None
    if begun:
        log.warning("the run in %s has another config: it is now in %s", path, aside.name)
    else:
        shutil.rmtree(aside)
    return None, None


def _is_run(path: Path) -> bool:
    """Return whether `path` is the directory of a run, even if the run was killed before its config was written."""
    if path.is_symlink() or not path.is_dir():
        return False
    others = [entry.name for entry in path.iterdir() if not entry.name.endswith(".part")]
    return _has_begun(path) or set(others) <= {run_directory.OVERRIDES, ".lock"}


def _has_begun(path: Path) -> bool:
    """Return whether the run directory `path` contains a config file or a directory of checkpoints."""
    return (path / run_directory.CONFIG).exists() or (path / "checkpoints").exists()


def _has_same_config(path: Path, session: Session) -> bool:
    """Return whether the run in the directory `path` has the config of `session`; False if there is no run in it.

    Raises:
        ConfigError: if the config cannot be read, and the directory has checkpoints or may have some (see
            `_may_have_checkpoints`). Returning False would be wrong if this were the run to resume.
    """
    try:
        saved = saved_config(path).values
    except UnreadableConfigError as error:
        why = f"whether {path} is the run to resume cannot be determined, because its config cannot be read ({error})"
        remedy = "resume=never starts a new run; resume=auto goes on without that directory once it is moved away"
        check(not _may_have_checkpoints(path), "resume", session.run.resume, why, remedy)
        if path.is_dir() and (path / run_directory.CONFIG).exists():
            log.warning("%s is skipped: %s", path, error)
        return False
    try:
        return is_same_config(saved, session.run.config)
    except ConfigError:  # it names a class that cannot be loaded, for example of a package that has been removed
        return False


def _may_have_checkpoints(path: Path) -> bool:
    """Return whether the run directory `path` has checkpoints; True if they cannot be listed."""
    try:
        return bool(checkpoints(path))
    except ConfigError:
        return True


# ---------------------------------------------------------------------------------------------------------------------
# Which options may change on resume

_ESSENTIAL = ("seed", "batch_size", "workload", "model", "data", "env")
"""Keys that determine what is computed, and therefore must not change on resume.

Of the components among them, the options in `may_change_on_resume` may change. Keys that are not listed here may
change, except that the type of the optimizer must stay the same.
"""


def check_resumable(saved: Mapping[str, Any], now: Mapping[str, Any], source: str) -> None:
    """Check that a run with the config `saved` can be continued with the config `now`.

    Args:
        saved: the config of the run to resume.
        now: the config of the session that resumes the run. Neither config contains credentials (see
            `redacted_values`).
        source: path of the run directory or the checkpoint, for the error message.

    Raises:
        ConfigError: if the seed, the batch size or the type of the optimizer differs; or if an option of the workload,
            the model, the data or the environment differs, unless `may_change_on_resume` of that component lists the
            option. The error lists the first five differences.
    """
    saved, now, differences = _completed(saved), _completed(now), []
    for key in _ESSENTIAL:
        then, today = _essential(saved.get(key)), _essential(now.get(key))
        names = sorted({*then, *today})
        differences += [
            f"{key}{name and '.' + name}: {then.get(name)} then, {today.get(name)} now"
            for name in names
            if then.get(name) != today.get(name)
        ]
    then, today = (_essential(config.get("optimizer")).get("_target_") for config in (saved, now))
    if then != today:
        differences.append(f"optimizer: {then} then, {today} now")
    why, remedy = f"another run: {'; '.join(differences[:5])}", "take these back, or start a new run, without resume"
    check(not differences, "resume", source, why, remedy)


def is_same_config(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a session with the config `now` and `resume=auto` continues a run with the config `saved`.

    Raises:
        ConfigError: if a config names a class that cannot be loaded.
    """
    return hashed_options(_completed(saved)) == hashed_options(_completed(now))


def _completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `config` in which missing options have their default values.

    Options may be missing because an earlier version of this project has written the config.
    """

    def defaults(cls: type) -> dict[str, Any]:
        known = option_fields(cls)
        options = {field.name: field.default for field in fields(cls) if field.name in known}
        given = {name: value for name, value in options.items() if value is not MISSING}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

    def node(value: Any) -> Any:
        if not isinstance(value, Mapping) or "_target_" not in value:
            return value
        return defaults(load_class(value["_target_"], object)) | dict(value)

    return {key: node(value) for key, value in (defaults(Run) | dict(config)).items()}


def _essential(node: Any) -> dict[str, Any]:
    """Return the options in `node`, the config of a component, except options that may change on resume.

    If `node` is a plain value, such as the seed, `{"": node}` is returned.
    """
    if not isinstance(node, Mapping):
        return {"": node}
    cls = load_class(node["_target_"], object) if "_target_" in node else None
    free = getattr(cls, "may_change_on_resume", ())
    return {name: value for name, value in node.items() if name not in free}
