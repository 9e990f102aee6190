"""Where a run writes: a directory of its own, or the one in which it goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from runner import directory
from runner.config import ConfigError, check, load_class
from runner.environment import environment
from runner.run import Run, config_hash


@contextmanager
def claimed_directory(run: Run, parent: Path, name: str | None, overrides: list[str]) -> Iterator[Path]:
    """The directory of `run`, held by this process, with the config, the overrides and the environment in it.

    Args:
        parent: where a new directory is made.
        name: its name; None for `<date>_<time>-<id>`.

    Raises:
        ConfigError: when `resume` names nothing to go on with, another run's directory, or one in use.
    """
    found = _to_resume(run, parent)
    path = found or directory.create(parent, name)
    held = directory.lock(path)
    check(held is not None, "resume", str(path), "another process is at work in it", "wait for it, or stop it")
    try:
        directory.write_config(path, run.config, overrides)
        directory.write_json(path / "environment.json", environment())
        yield path
    except ConfigError:
        if found is None:  # refused after all: nothing is left behind
            shutil.rmtree(path)
        raise
    finally:
        if held is not None:
            held.close()


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


def _to_resume(run: Run, parent: Path) -> Path | None:
    if run.resume == "never":
        return None
    if run.resume == "auto":
        return _unfinished(run, parent)
    source = Path(run.resume)
    path = _run_directory(source).resolve()
    check((path / "config.yaml").is_file(), "resume", run.resume, "there is no run", "name a run directory")
    saved: Any = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
    check_resumable(saved, run.config, run.resume)
    if path != source.resolve():
        _set_later_aside(source)
    return path


def _unfinished(run: Run, parent: Path) -> Path | None:
    """The newest directory under `parent` of a run with this very config that is not done, and not being worked on."""
    for path in sorted(parent.glob("*"), reverse=True):
        if not (path / "config.yaml").is_file() or directory.read_result(path).get("status") == "done":
            continue
        saved: Any = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
        held = directory.lock(path) if config_hash(saved) == config_hash(run.config) else None
        if held is not None:
            held.close()
            return path.resolve()
    return None


def _set_later_aside(checkpoint: Path) -> None:
    """Going on from `checkpoint` abandons those after it: they are renamed, not deleted."""
    check(checkpoint.is_dir(), "resume", str(checkpoint), "there is no such checkpoint", "see what is beside it")
    for later in checkpoint.parent.glob("step_*"):
        if later.name > checkpoint.name and later.name.removeprefix("step_").isdigit():
            os.replace(later, directory.free_name(later, "superseded"))


# ---------------------------------------------------------------------------------------------------------------------
# What makes two configs the same run

_WHAT = ("seed", "batch_size", "workload", "model", "data")
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
            "resume", source, f"another run: {'; '.join(differences[:5])}", "take these back, or start with resume=never"
        )


def _essential(node: Any) -> dict[str, Any]:
    """A config node without the options that say only how: how a model or its data get to the device."""
    if not isinstance(node, Mapping):
        return {"": node}
    how = getattr(load_class(node["_target_"], object), "how", ()) if "_target_" in node else ()
    return {name: value for name, value in node.items() if name not in how}
