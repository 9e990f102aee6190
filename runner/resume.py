"""The directory of a run: a new one, or that of the run to resume."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from runner.config.errors import ConfigError, check
from runner.config.renamed import with_current_names
from runner.config.schema import load_class
from runner.run import Result, Session, config_hash
from runner.storage import run_directory
from runner.storage.manifest import DamagedError, verified_manifest
from runner.system.environment import environment


@contextmanager
def claimed_directory(session: Session, parent: Path, name: str | None, overrides: list[str]) -> Iterator[Path]:
    """Yield the locked directory of the run, after writing the config, the overrides and the environment to it.

    Nothing is written if the run has already done all of its steps: see `finished`.

    Args:
        session: the run.
        parent: directory in which a new run directory is created.
        name: name of the run directory, by which a job of a sweep is resumed; None: `<date>_<time>-<id>`.
        overrides: the overrides of the run.

    Raises:
        ConfigError: if `resume` names nothing that can be resumed, the directory of another run, or one in use.
    """
    found, lock = _to_resume(session, parent, name)
    existing = run_directory.nearest_existing(parent)
    path = found or run_directory.create(parent, name)
    lock = lock or run_directory.lock(path)
    try:
        if not _is_done(path, session):
            try:
                _begin_session(path, session, overrides)
            except OSError as error:
                why = f"nothing can be written there ({error.strerror})"
                raise ConfigError("output_root", str(path), why, "make room, or output_root=DIR elsewhere") from None
        yield path
    except ConfigError:
        if found is None:  # a refused run leaves nothing behind
            shutil.rmtree(path)
            run_directory.remove_empty(parent, existing)
        raise
    finally:
        if lock is not None:
            lock.close()


def finished(directory: Path) -> Result | None:
    """Return the result of a run that has no steps left to do; None for any other.

    A new session renames the result of the previous one, so a result that is still there belongs to a completed run.
    """
    result = run_directory.read_result(directory)
    return Result(**result) if result else None


def _is_done(path: Path, session: Session) -> bool:
    result, named = run_directory.read_result(path), _named_checkpoint(session)
    newest = named is None or not _later(named)
    done = result.get("status") == "done" and result["steps"] >= session.num_steps and newest
    return done and (session.run.keep == 0 or _newest_is_valid(path))


def _newest_is_valid(path: Path) -> bool:
    """Return whether the newest checkpoint of the run at `path` is intact; if not, its last steps are repeated."""
    try:
        newest = path / "checkpoints" / run_directory.step_name(run_directory.newest_step(path))
        return bool(verified_manifest(newest))
    except DamagedError:  # or there is no checkpoint
        return False


def _begin_session(path: Path, session: Session, overrides: list[str]) -> None:
    """Write the files of this session; files that it supersedes are renamed, not deleted."""
    if (path / run_directory.RESULT).exists():
        os.replace(path / run_directory.RESULT, path / f"{run_directory.RESULT}.superseded")
    for later in _later(_named_checkpoint(session)):
        os.replace(later, run_directory.free_name(later, "superseded"))
    run_directory.write_config(path, session.run.config, overrides)
    run_directory.write_json(path / "environment.json", environment())


def saved_overrides(source: Path) -> list[str]:
    """Return the overrides of the run at `source`, a run directory or a checkpoint in it.

    Raises:
        ConfigError: if there is no run.
    """
    path = _run_directory(source) / "overrides.yaml"
    check(path.is_file(), "resume", str(source), "there is no run", "name a run directory, or a checkpoint in one")
    return [str(text) for text in OmegaConf.load(path)]


def _run_directory(source: Path) -> Path:
    """Return the run directory of `source`, a run directory or a checkpoint in it."""
    return source.parent.parent if source.parent.name == "checkpoints" else source


def _named_checkpoint(session: Session) -> Path | None:
    """Return the checkpoint that `resume` names; None if it names a run directory, or nothing."""
    source = Path(session.run.resume)
    return source.resolve() if source.parent.name == "checkpoints" else None


def _later(checkpoint: Path | None) -> list[Path]:
    """Return the checkpoints after `checkpoint`, which a resume from it supersedes."""
    if checkpoint is None:
        return []
    step = run_directory.step_of(checkpoint) or 0
    return [path for path in checkpoint.parent.iterdir() if (run_directory.step_of(path) or 0) > step]


def _saved_config(path: Path) -> dict[str, Any]:
    """Return the config in the run directory `path`; empty if there is none."""
    file = path / "config.yaml"
    return with_current_names(OmegaConf.to_container(OmegaConf.load(file))) if file.is_file() else {}


def _has_same_config(path: Path, session: Session) -> bool:
    saved = _saved_config(path)
    return bool(saved) and config_hash(saved) == config_hash(session.run.config)


def _locked(path: Path) -> IO[str]:
    """Return the lock on the run directory `path`.

    Raises:
        ConfigError: if another process holds it.
    """
    lock = run_directory.lock(path)
    check(lock is not None, "resume", str(path), "another process is running in it", "wait for it, or stop it")
    assert lock is not None
    return lock


def _to_resume(session: Session, parent: Path, name: str | None) -> tuple[Path | None, IO[str] | None]:
    """Return the directory of the run to resume, and its lock; (None, None) for a new run."""
    source = session.run.resume
    if source == "never":
        return None, None
    if source == "auto":
        return _unfinished(session, parent) if name is None else _started(session, parent / name)
    path = _run_directory(Path(source)).resolve()
    check((path / "config.yaml").is_file(), "resume", source, "there is no run", "name a run directory")
    checkpoint = _named_checkpoint(session)
    if checkpoint is not None:
        there = checkpoint.is_dir() and run_directory.step_of(checkpoint) is not None
        names = sorted(path.name for path in checkpoint.parent.glob("step_*"))
        remedy = f"there are: {', '.join(names)}; one that was set aside can be renamed to resume from it"
        check(there, "resume", source, "there is no such checkpoint", remedy)
    check_resumable(_saved_config(path), session.run.config, source)
    done = run_directory.newest_step(path) if checkpoint is None else run_directory.step_of(checkpoint) or 0
    why, more = f"{done} are done already", f"steps={done + 1} or more, or name an earlier checkpoint of it"
    check(done <= session.num_steps or _is_done(path, session), "steps", session.num_steps, why, more)
    return path, _locked(path)


def _unfinished(session: Session, parent: Path) -> tuple[Path | None, IO[str] | None]:
    """Return the newest unfinished run under `parent` that has the same config and is not running, and its lock."""
    for path in sorted(parent.glob("*"), reverse=True):
        if run_directory.read_result(path).get("status") == "done" or not _has_same_config(path, session):
            continue
        lock = run_directory.lock(path)
        if lock is not None and run_directory.read_result(path).get("status") == "done":  # finished in the meantime
            lock.close()
        elif lock is not None:
            return path.resolve(), lock
    return None, None


def _started(session: Session, path: Path) -> tuple[Path | None, IO[str] | None]:
    """Return the run at `path` if it has the same config, and its lock; the directory of any other run is renamed."""
    if not path.is_dir():
        return None, None
    lock = _locked(path)
    if _has_same_config(path, session):
        return path.resolve(), lock
    lock.close()
    os.replace(path, run_directory.free_name(path, "superseded"))
    return None, None


# ---------------------------------------------------------------------------------------------------------------------
# Which options may change on resume

_ESSENTIAL = ("seed", "batch_size", "workload", "model", "data", "env")
"""Keys that determine what is computed, and must not change on resume; the others determine how, and may."""


def check_resumable(saved: Mapping[str, Any], now: Mapping[str, Any], source: str) -> None:
    """Refuse to resume a run of config `saved` with config `now`, if its samples or its model would change.

    Raises:
        ConfigError: if they would; it lists the differences.
    """
    differences = []
    for key in _ESSENTIAL:
        then, today = _essential(saved.get(key)), _essential(now.get(key))
        names = sorted({*then, *today})
        differences += [
            f"{key}{name and '.' + name}: {then.get(name)} then, {today.get(name)} now"
            for name in names
            if then.get(name) != today.get(name)
        ]
    then, today = (config.get("optimizer", {}).get("_target_") for config in (saved, now))
    if then != today:
        differences.append(f"optimizer: {then} then, {today} now")
    why, remedy = f"another run: {'; '.join(differences[:5])}", "take these back, or start with resume=never"
    check(not differences, "resume", source, why, remedy)


def _essential(node: Any) -> dict[str, Any]:
    """Return a config node without the options that its component allows to change on resume."""
    if not isinstance(node, Mapping):
        return {"": node}
    cls = load_class(node["_target_"], object) if "_target_" in node else None
    free = getattr(cls, "may_change_on_resume", ())
    return {name: value for name, value in node.items() if name not in free}
