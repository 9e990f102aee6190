"""Trains a config with the code of another commit of the repository of the current directory (`verify --against`)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from runner.config.errors import ConfigError, check
from runner.config.overrides import hydra_quoted, replaced
from runner.system.console import DIVERGED, DONE, REFUSED
from runner.system.provenance import git

_LIMIT = 600  # seconds in which git has to copy a repository


class CommitError(RuntimeError):
    """The config cannot be trained to its end with the code of the other commit."""


class Copy(NamedTuple):
    """A copy of a repository in a temporary directory.

    Attributes:
        commit: the commit as it was typed.
        top: the directory of the repository.
        files: the directory of the copy.
        modules: the directories in it from which modules are imported.
    """

    commit: str
    top: Path
    files: Path
    modules: list[Path]


@contextmanager
def copy_of(commit: str) -> Iterator[Copy]:
    """A context with a copy of the repository of the current directory, as it was at `commit`.

    Nothing is written to the repository. What git does not track, such as data, is linked into the copy.

    Raises:
        ConfigError: if the current directory is in no repository, or there is no such commit.
    """
    here = Path.cwd()
    try:
        top = Path(git(here, "rev-parse", "--show-toplevel").strip())
        found = git(here, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}").strip()
    except (OSError, subprocess.SubprocessError) as error:
        why = f"git finds no such commit here: {(getattr(error, 'stderr', None) or str(error)).strip()}"
        raise ConfigError("--against", commit, why, "name a commit of the repository of this directory") from None
    with tempfile.TemporaryDirectory(prefix="runner-verify-") as scratch:
        files = Path(scratch).resolve() / "code"
        git(top, "clone", "--quiet", "--shared", "--no-checkout", ".", str(files), timeout=_LIMIT)
        git(files, "checkout", "--quiet", "--detach", found, timeout=_LIMIT)
        modules = [files / path for path in _imported_from(top) if (files / path).is_dir()]
        _link_untracked(top, files)
        (files / ".git/info/exclude").write_text("*\n")  # these links are no changes of the commit
        yield Copy(commit, top, files, modules)


def trained_in(copy: Copy, overrides: Sequence[str], config_dir: str | None) -> Path:
    """Train a run with the code of `copy`, in a process of its own, and return its directory, beside the copy.

    Modules that this process imports from the repository are imported from the copy.

    Raises:
        ConfigError: if the code refuses the config, which it has explained on standard error.
        CommitError: if the run crashes or diverges.
    """
    runs, directory = copy.files.parent / "runs", copy.files / Path.cwd().resolve().relative_to(copy.top)
    directory.mkdir(parents=True, exist_ok=True)
    flags = [] if config_dir is None else [f"--config-dir={config_dir}"]
    words = [word.replace(f"{copy.top}{os.sep}", f"{copy.files}{os.sep}") for word in (*flags, *overrides)]
    words = replaced(words, f"output_root={hydra_quoted(str(runs))}", "name=then", "tracking=tensorboard")
    paths = os.pathsep.join([*map(str, copy.modules), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "runner", *words]
    code = subprocess.run(command, cwd=directory, env=variables, stdout=subprocess.DEVNULL).returncode
    remedy = "name a commit whose code can train it"
    check(code != REFUSED, "--against", copy.commit, "its code refuses the config: see above", remedy)
    if code != DONE:
        raise CommitError(f"the code of {copy.commit} {'diverges' if code == DIVERGED else 'crashes: see above'}")
    return next(runs.glob("then/*"))


def _imported_from(top: Path) -> list[Path]:
    """Return, relative to the repository, the directories in it from which this process imports modules."""
    installed = {point.module.partition(".")[0] for point in entry_points(group="runner.components")}
    origins = [spec.origin for name in sorted(installed) if (spec := find_spec(name)) is not None and spec.origin]
    folders = [*map(Path, sys.path), *(Path(origin).parents[1] for origin in origins)]
    inside = [folder.resolve() for folder in folders if folder.resolve().is_relative_to(top)]
    return [folder.relative_to(top) for folder in dict.fromkeys(inside)]


def _link_untracked(top: Path, copy: Path) -> None:
    for name in git(top, "ls-files", "--others", "--directory", "-z", timeout=_LIMIT).split("\0"):
        path = copy / name.rstrip("/")
        if name and path.name != "__pycache__" and not os.path.lexists(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(top / name.rstrip("/"))
