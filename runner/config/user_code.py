"""Code of the user: objects that are passed to `runner.train`, and Python files that are typed, as `model=mine.py:Net`.

A config has only names of code. The code itself is held by this module: of the objects that a caller passes, and of the
files whose paths are typed. A saved run or an option file may name code, but nothing is imported because of that.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from runner.config.errors import ABSENT, ConfigError, check, described, did_you_mean, shown
from runner.config.functions import check_function, name_of
from runner.config.hooks import Hooks, watched
from runner.config.other_names import of_code
from runner.config.overrides import hydra_quoted, override_key, override_value
from runner.config.unused_names import check_names, names_defined
from runner.system.import_path import import_also
from runner.system.signals import is_of_signal

log = logging.getLogger(__name__)
_FILE = re.compile(r"([^:,]+\.py)(?::(\w+))?")
_GROUPS = ("model", "data", "env", "schedule", "workload")


STEPS = ("training_step", "evaluation_step", "phases")
"""The parts that say what a training step and an evaluation are, in place of a loss and metrics."""

PARTS = ("model", "data", "collate", "loss", "metrics", *STEPS, "schedule", *Hooks._fields)
"""What a user may give: the arguments of `runner.train`, and names in a file."""


class File(NamedTuple):
    """A Python file, as `typed` (`mine.py:Net`), its absolute path, and the name in it; empty: that of the part."""

    typed: str
    path: str
    name: str


@dataclass(frozen=True)
class UserCode:
    """The code that is given: `objects` by part (see `PARTS`), `files` by config group; `workload` has all parts.

    `named` are the names in the file of the workload that options use, as `optimizer.name`.
    """

    objects: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, File] = field(default_factory=dict)
    named: set[str] = field(default_factory=set, compare=False)

    def names(self) -> dict[str, str]:
        """Return the names by which configs refer to the code, by part or config group."""
        objects = {part: name_of(value) for part, value in self.objects.items() if value is not None}
        return objects | {group: file.typed for group, file in self.files.items()}

    def hashes(self) -> dict[str, str]:
        """Return the SHA-256 of each file by path, and of the source of each class and function by part and name.

        Files that are imported from the folder of one of them are included.
        """
        paths = {file.path for file in self.files.values()}
        folders = {f"{os.path.dirname(path)}{os.sep}" for path in paths}
        modules = [*sys.modules.items()] if folders else []  # of thousands
        others = [module for name, module in modules if name.partition(".")[0] != "runner"]
        imported = (str(getattr(module, "__file__", "")) for module in others)
        paths |= {path for path in imported if path.startswith((*folders,)) and "site-packages" not in path}
        contents = {shown(path): Path(path).read_bytes() for path in sorted(paths) if os.path.isfile(path)}
        for part, value in self.objects.items():
            with suppress(OSError, TypeError):  # for example, of what is typed in a console
                contents[f"{part}={name_of(value)}"] = inspect.getsource(value).encode()
        return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}

    def added_to(self, overrides: Sequence[str]) -> list[str]:
        """Return `overrides` after those that name the `objects` and, in a new run, choose the options for them."""
        is_new = override_value(overrides, "resume") in (None, "auto", "never")
        names = {part: name for part, name in self.names().items() if part in self.objects}
        groups = [part for part in ("model", "data", "schedule") if part in names]
        groups += ["workload"] if {"data", "loss", "metrics", *STEPS} & {*names} else []
        chosen = [f"{group}={_option(group, {*names})}" for group in groups] if is_new else []
        return [*chosen, *(f"++code.{part}={hydra_quoted(name)}" for part, name in names.items()), *overrides]


_given = UserCode()


def given() -> UserCode:
    """Return the code that is given in this process."""
    return _given


def give(code: UserCode) -> None:
    """Hold `code` in this process, in place of what was given before."""
    global _given
    _given = code


@contextmanager
def using(code: UserCode) -> Iterator[UserCode]:
    """A context in which `code` is given."""
    before = _given
    give(code)
    try:
        yield code
    finally:
        give(before)


def passed(overrides: Iterable[str] = (), **parts: Any) -> UserCode:
    """Return the code that a caller passes: `parts` that are not None, and the files in `overrides`.

    Raises:
        ConfigError: if there is no such part or file.
    """
    for part in parts:
        remedy = of_code(part, PARTS) or did_you_mean(part, PARTS)
        check(part in PARTS, part, ABSENT, "there is no such argument;", remedy)
    return UserCode({part: value for part, value in parts.items() if value is not None}, typed_files(overrides))


def typed_files(overrides: Iterable[str]) -> dict[str, File]:
    """Return the Python files in overrides such as `model=mine.py:Net` and `workload=mine.py`, by config group.

    Raises:
        ConfigError: if there is no such file, or a name follows that of a workload.
    """
    files: dict[str, File] = {}
    for word in overrides:
        group = override_key(word)
        if group not in _GROUPS:
            continue
        files.pop(group, None)
        if found := _FILE.fullmatch(override_value([word], group) or ""):
            path, name = os.path.abspath(os.path.expanduser(found[1])), found[2] or ""
            check(os.path.isfile(path), group, found[1], "there is no such file", "name a Python file that exists")
            why, remedy = "a workload is a whole file", f"workload={found[1]}, or model={found[1]}:{name}"
            check(not name or group != "workload", group, found[0], why, remedy)
            files[group] = File(os.path.normpath(found[1]) + f":{name}" * bool(name), path, name)
    return files


def is_generated(override: str) -> bool:
    """Return whether an override was not typed, but stands for code that is given."""
    group, _, option = override.partition("=")
    return override.startswith("++code.") or (group in _GROUPS and option in ("_user", "_steps"))


def is_file(override: str) -> bool:
    """Return whether an override of a sweep names a Python file, or several."""
    key, value = override_key(override), override_value([override], override_key(override)) or ""
    return key in _GROUPS and any(_FILE.fullmatch(part.strip()) for part in value.strip("[]").split(","))


def expanded(overrides: Iterable[str], is_new: bool) -> Iterator[str]:
    """Yield overrides for Hydra, in place of those that name Python files, which it does not know.

    If the run `is_new`, they choose options; otherwise, the saved config has these, and they only name the code.
    """
    overrides = list(overrides)
    chosen = {override_key(word) for word in overrides}
    for word in overrides:
        files = typed_files([word])
        for group, file in files.items():
            yield f"++code.{group}={hydra_quoted(file.typed)}"
            if is_new:
                yield f"{group}={_option(group, names_defined(Path(file.path).read_bytes()))}"
                if group == "data" and "workload" not in chosen:
                    yield "workload=_user"
        if not files:
            yield word


def _option(group: str, names: Collection[str]) -> str:
    """Return the option of a config group for code of the user, which defines `names`."""
    return "_steps" if group == "workload" and {"training_step", "phases"} & {*names} else "_user"


def chosen_by_file(group: str, name: str) -> ConfigError:
    """Return the error of an option file in which `group` is the Python file `name`."""
    why = "an option file cannot choose a Python file, which is run only if it is typed"
    return ConfigError(group, name, why, f"leave it out there, and type it beside the option: {group}={name}")


def check_given(named: Mapping[str, Any], source: str, key: str = "resume") -> None:
    """Check that all code that a config has `named` is given; `source` is the run that is resumed, as typed for `key`.

    Raises:
        ConfigError: otherwise; it says what to type.
    """
    ours = {*_given.objects, *_given.files}
    missing = {part: str(name) for part, name in named.items() if not ours & {part, "workload"}}
    if not missing:
        return
    from runner.system.provenance import command  # imports torch, which composing a config does not need

    words = [f"{group}={name}" for group, name in missing.items() if _FILE.fullmatch(name)]
    why = f"its code ({', '.join(missing)}) is run only if it is typed, and never from a saved config or an option file"
    if len(words) == len(missing):
        in_shell = f"type: {command()} {shlex.join(words)}"
        again = in_shell if command().startswith("python -m runner ") else f"pass it again: {words}"
        remedy = f"look at the code, then {again}"
    else:
        remedy = f"pass it again: {', '.join(f'{part}=…  ({name})' for part, name in missing.items())}"
    raise ConfigError(*(("code", ABSENT) if source in ("never", "auto") else (key, source)), why, remedy)


def find(part: str) -> Any:
    """Return what is given as `part`; None if nothing is. `collate` is in the file of the data.

    Raises:
        ConfigError: if a file cannot be executed, or does not define the name that was typed.
    """
    if part in _given.objects:
        return _given.objects[part]
    beside = "data" if part == "collate" else part
    file = _given.files.get(beside) or _given.files.get("workload")
    if file is None:
        return None
    module, name = executed(file.path), part if part != beside else file.name or part
    if not hasattr(module, name) and part in _given.files:
        public = [key for key, value in vars(module).items() if key[:1] != "_" and not isinstance(value, ModuleType)]
        why = f"{shown(file.path)} defines no {name};"
        raise ConfigError(part, file.typed, why, did_you_mean(name, public, f"{part}={shown(file.path)}:"))
    if part not in PARTS:
        _given.named.add(name)
    return getattr(module, name, None)


def has_steps() -> bool:
    """Return whether the user's code says what a training step is."""
    return find("training_step") is not None or find("phases") is not None


def check_unused(groups: Iterable[str], parts: Collection[str]) -> None:
    """Refuse names in the file of the workload that are misspelt, or of parts that it does not take.

    The config groups in `groups` take their part of the file, and the workload the `parts`.
    """
    others = [part for part in ("loss", "metrics", *STEPS) if part not in parts]
    taken = [name for name in parts if find(name) is not None]
    if (file := _given.files.get("workload")) is not None:
        values = {name: value for name, value in vars(executed(file.path)).items() if name not in _given.named}
        given = {*values, *_given.objects, *_given.files, *(set(_GROUPS) - set(groups))}
        missing = [part for part in PARTS if part not in given and (part not in others or part in STEPS)]
        check_names(file.path, values["__source__"], values, missing, dict.fromkeys(others, ", ".join(taken)))


def executed(path: str) -> ModuleType:
    """Return the module in the file at `path`, which is executed anew only if it has changed."""
    content = Path(path).read_bytes()
    name = f"{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:6]}"
    module = sys.modules.get(name)
    if module is not None and module.__dict__.get("__source__") == content:
        return module
    import_also(os.path.dirname(path))
    sys.modules[name] = module = ModuleType(name)
    module.__dict__.update(__file__=path, __source__=content)
    from runner.system.generators import seeded  # imports torch, which composing a config does not need

    try:
        with seeded(0):  # what a file draws at its top level is the same in each run, resume and process
            exec(compile(content, path, "exec", dont_inherit=True), module.__dict__)  # not this file's `annotations`
    except BaseException as error:
        del sys.modules[name]
        if is_of_signal(error):
            raise
        raise ConfigError("code", shown(path), f"it raises {described(error)}", "correct the file") from error
    return module


@contextmanager
def errors_of(part: str) -> Iterator[None]:
    """Raise a config error, with file and line, in place of an error that the user's `part` raises in the context."""
    try:
        yield
    except ConfigError:
        raise
    except BaseException as error:
        if is_of_signal(error):
            raise
        given = _given.names().get(part, ABSENT)
        why, remedy = f"it raises {described(error)}", "correct it"
        if type(error).__name__ == "DataError":  # which this module cannot import
            what, why, remedy = error.args
            why = f"{what}: {why}"
        raise ConfigError(part, given, why, remedy) from error


def hooks() -> Hooks:
    """Return the hooks that are given.

    Raises:
        ConfigError: if one is not a function of these arguments.
    """
    found = {}
    for name, default in Hooks._field_defaults.items():
        if (hook := function_of(name, [*inspect.signature(default).parameters], "…")) is not None:
            found[name] = watched(name, hook)
    return Hooks(**found)


def function_of(name: str, arguments: Sequence[str], body: str) -> Callable[..., Any] | None:
    """Return the function of `arguments` that is given as `name`, of which `body` is an example; None if none is.

    Raises:
        ConfigError: if it is not a function of these arguments.
    """
    if (function := find(name)) is not None:
        check_function(name, function, arguments, body)
    return function


def run_name(code: Mapping[str, str]) -> str:
    """Return the name of a run whose config has the names of `code`: that of its file, or of the class of its model."""
    files = [Path(found[1]).stem for group in ("workload", "data") if (found := _FILE.fullmatch(code.get(group, "")))]
    return re.sub(r"[^a-zA-Z0-9_]", "_", (files or [code.get("model", "_user").rpartition(".")[2]])[0])
