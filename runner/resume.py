"""Where a run writes: a directory of its own, or the one in which it goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from runner import directory
from runner.config import ConfigError, check, load_class
from runner.environment import environment
from runner.manifest import DamagedError, verified_manifest
from runner.run import Result, Run, config_hash


@contextmanager
def claimed_directory(run: Run, parent: Path, name: str | None, overrides: list[str]) -> Iterator[Path]:
    """The directory of `run`, held by this process, with the config, the overrides and the environment in it.

    The directory of a run that is done, to the last step that is now asked for, is left as it is: `finished` tells.

    Args:
        parent: where a new directory is made.
        name: its name, under which a job of a sweep goes on too; None for `<date>_<time>-<id>`.

    Raises:
        ConfigError: when `resume` names nothing to go on with, another run's directory, or one in use.
    """
    found, held = _to_resume(run, parent, name)
    there_before = directory.nearest_existing(parent)
    path = found or directory.create(parent, name)
    held = held or directory.lock(path)
    try:
        if not _is_done(path, run):
            try:
                _begin_session(path, run, overrides)
            except OSError as error:
                why = f"nothing can be written there ({error.strerror})"
                raise ConfigError("output_root", str(path), why, "make room, or output_root=DIR elsewhere") from None
        yield path
    except ConfigError:
        if found is None:  # refused after all: nothing is left behind
            shutil.rmtree(path)
            directory.remove_empty(parent, there_before)
        raise
    finally:
        if held is not None:
            held.close()


def finished(run: Run) -> Result | None:
    """The result of a run that has nothing left to do; None for any other.

    A session that begins sets the result of the one before aside: one that is there is that of a run that is done.
    """
    result = directory.read_result(run.directory)
    return Result(**result) if result else None


def _is_done(path: Path, run: Run) -> bool:
    result, named = directory.read_result(path), _named_checkpoint(run)
    newest = named is None or not _later(named)
    done = result.get("status") == "done" and result["steps"] >= run.num_steps and newest
    return done and (run.keep == 0 or _last_is_whole(path))


def _last_is_whole(path: Path) -> bool:
    """Whether the newest checkpoint of the run at `path` is as it was written; else the steps to it are done again."""
    try:
        return bool(verified_manifest(path / "checkpoints" / directory.step_name(directory.newest_step(path))))
    except DamagedError:  # or none at all
        return False


def _begin_session(path: Path, run: Run, overrides: list[str]) -> None:
    """Leave what belongs to this session; what it makes obsolete is renamed, not deleted."""
    if (path / directory.RESULT).exists():
        os.replace(path / directory.RESULT, path / f"{directory.RESULT}.superseded")
    for later in _later(_named_checkpoint(run)):
        os.replace(later, directory.free_name(later, "superseded"))
    directory.write_config(path, run.config, overrides)
    directory.write_json(path / "environment.json", environment())


def saved_overrides(source: Path) -> list[str]:
    """What the run at `source`, a run directory or a checkpoint in it, was started with.

    Raises:
        ConfigError: when there is no run.
    """
    path = _run_directory(source) / "overrides.yaml"
    check(path.is_file(), "resume", str(source), "there is no run", "name a run directory, or a checkpoint in one")
    return [str(text) for text in OmegaConf.load(path)]


def _run_directory(source: Path) -> Path:
    """`source`, or, where it is a checkpoint, the run directory that it is in."""
    return source.parent.parent if source.parent.name == "checkpoints" else source


def _named_checkpoint(run: Run) -> Path | None:
    """The checkpoint that `resume` names; None when it names a run directory, or nothing."""
    source = Path(run.resume)
    return source.resolve() if source.parent.name == "checkpoints" else None


def _later(checkpoint: Path | None) -> list[Path]:
    """The checkpoints after `checkpoint`, which going on from it abandons."""
    if checkpoint is None:
        return []
    step = directory.step_of(checkpoint) or 0
    return [path for path in checkpoint.parent.iterdir() if (directory.step_of(path) or 0) > step]


def _to_resume(run: Run, parent: Path, name: str | None) -> tuple[Path | None, IO[str] | None]:
    """The directory to go on in, and the hold on it; (None, None) for a new one."""
    if run.resume == "never":
        return None, None
    if run.resume == "auto":
        return _unfinished(run, parent) if name is None else _begun(run, parent / name)
    path = _run_directory(Path(run.resume)).resolve()
    check((path / "config.yaml").is_file(), "resume", run.resume, "there is no run", "name a run directory")
    if checkpoint := _named_checkpoint(run):
        there = checkpoint.is_dir() and directory.step_of(checkpoint) is not None
        names = sorted(path.name for path in checkpoint.parent.glob("step_*"))
        remedy = f"there are: {', '.join(names)}; one that was set aside can be renamed to go on from it"
        check(there, "resume", run.resume, "there is no such checkpoint", remedy)
    saved: Any = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
    check_resumable(saved, run.config, run.resume)
    done = directory.newest_step(path) if checkpoint is None else directory.step_of(checkpoint) or 0
    why, more = f"{done} are done already", f"steps={done + 1} or more, or name an earlier checkpoint of it"
    check(done <= run.num_steps or _is_done(path, run), "steps", run.num_steps, why, more)
    held = directory.lock(path)
    check(held is not None, "resume", str(path), "another process is at work in it", "wait for it, or stop it")
    return path, held


def _unfinished(run: Run, parent: Path) -> tuple[Path | None, IO[str] | None]:
    """The newest directory under `parent` of a run with this very config that is not done, and not being worked on."""
    for path in sorted(parent.glob("*"), reverse=True):
        if not (path / "config.yaml").is_file() or directory.read_result(path).get("status") == "done":
            continue
        saved: Any = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
        held = directory.lock(path) if config_hash(saved) == config_hash(run.config) else None
        if held is not None and directory.read_result(path).get("status") == "done":  # while we looked
            held.close()
        elif held is not None:
            return path.resolve(), held
    return None, None


def _begun(run: Run, path: Path) -> tuple[Path | None, IO[str] | None]:
    """The directory at `path`, where a run with this very config was begun; what another one left is set aside."""
    if not path.is_dir():
        return None, None
    held = directory.lock(path)
    check(held is not None, "resume", str(path), "another process is at work in it", "wait for it, or stop it")
    assert held is not None
    saved: Any = (
        OmegaConf.to_container(OmegaConf.load(path / "config.yaml")) if (path / "config.yaml").is_file() else {}
    )
    if saved and config_hash(saved) == config_hash(run.config):
        return path.resolve(), held
    held.close()
    os.replace(path, directory.free_name(path, "superseded"))
    return None, None


# ---------------------------------------------------------------------------------------------------------------------
# What makes two configs the same run

_WHAT = ("seed", "batch_size", "workload", "model", "data", "env")
"""What is computed, and so cannot change on a resume; everything else is how, and may."""


def check_resumable(saved: Mapping[str, Any], now: Mapping[str, Any], source: str) -> None:
    """Refuse to go on with a checkpoint of `saved` under `now`, where other samples or another model would follow.

    Raises:
        ConfigError: showing every difference that stands in the way.
    """
    differences = []
    for key in _WHAT:
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
    if differences:
        raise ConfigError(
            "resume",
            source,
            f"another run: {'; '.join(differences[:5])}",
            "take these back, or start with resume=never",
        )


def _essential(node: Any) -> dict[str, Any]:
    """A config node without the options that say only how: how a model or its data get to the device."""
    if not isinstance(node, Mapping):
        return {"": node}
    how = getattr(load_class(node["_target_"], object), "how", ()) if "_target_" in node else ()
    return {name: value for name, value in node.items() if name not in how}
