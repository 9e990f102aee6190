"""Reads the option files under conf/: the config groups, their options, and the keys of each option."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

_PACKAGE = Path(__file__).parent.parent

# conf/ is next to runner/ in a checkout and inside it in an installed package.
CONF = next(path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir())


def option_files(*more: Path) -> dict[str, dict[str, Path]]:
    """Return the option files in conf/ and then in `more`: for each group, a dict from option names to paths.

    Files whose names begin with `_` are left out: they hold the keys that several options inherit.
    """
    files: dict[str, dict[str, Path]] = {}
    for folder in (CONF, *more):
        for path in folder.glob("*/[!_]*.yaml"):
            files.setdefault(path.parent.name, {})[path.stem] = path
    # As text, accumulation=16 would come before 2.
    names = {group: sorted(files[group], key=lambda name: name.zfill(9) if name.isdigit() else name) for group in files}
    return {group: {name: files[group][name] for name in names[group]} for group in sorted(files)}


@cache
def groups_in_defaults() -> set[str]:
    """Return the config groups in the defaults list of conf/config.yaml, except optional groups such as `local`."""
    # As text: every command needs them, and parsing the YAML takes 8 ms.
    return set(re.findall(r"^  - (\w+): ", (CONF / "config.yaml").read_text(encoding="utf-8"), re.MULTILINE))


@cache
def root_keys() -> set[str]:
    """Return the keys of the root config, including the config groups."""
    return {*groups_in_defaults(), *map(str, OmegaConf.load(CONF / "config.yaml"))} - {"defaults", "hydra"}


def option_keys(group: str) -> dict[str, set[str]]:
    """Return the keys of each option of a config group, including inherited keys."""
    return {option: {*values} - {"_target_", "hydra"} for option, values in option_contents(group).items()}


def option_name(group: str, node: Mapping[str, Any]) -> str:
    """Return the name of the option with the `_target_` of `node` whose values are most similar to those of `node`.

    If there is no such option, return the name of the module of `_target_`.
    """
    target = str(node.get("_target_"))
    candidates = _options_with(group, target)
    if not candidates:
        return target.split(".")[-2] if target.count(".") else target  # the name of the module, as for parallel modes
    if len(candidates) == 1:
        return candidates[0][0]
    return min(candidates, key=lambda option: sum(node.get(key) != value for key, value in option[1].items()))[0]


@cache
def _options_with(group: str, target: str) -> list[tuple[str, dict[str, Any]]]:
    return [(name, values) for name, values in option_contents(group).items() if values.get("_target_") == target]


def chosen_option(group: str, component: object) -> str:
    """Return the name of the option that the class and the values of a component are those of, as `option_name`."""
    cls = type(component)
    return option_name(group, {"_target_": f"{cls.__module__}.{cls.__qualname__}", **vars(component)})


@cache
def option_contents(group: str) -> dict[str, dict[str, Any]]:
    """Return the keys and values of each option of a config group, with those that its file inherits."""
    return {name: _content(path) for name, path in option_files().get(group, {}).items()}


def _content(file: Path) -> dict[str, Any]:
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    entries = [entry for entry in content.pop("defaults", []) if isinstance(entry, str) and entry != "_self_"]
    # `classifier@workload` inherits the option `classifier`
    inherited = [_content(file.with_name(f"{entry.partition('@')[0]}.yaml")) for entry in entries]
    values = content.get(file.parent.name) or content  # a file of `@package _global_` nests the keys below the group
    return {key: value for each in (*inherited, values) for key, value in each.items()}


def description(option: Path) -> str:
    """Return the first comment in an option file that is no directive (`# @package`) or example command; or ""."""
    comments = [line[1:].strip() for line in option.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    sentences = [line for line in comments if not line.startswith(("python -m", "@package"))]
    return sentences[0] if sentences else ""


def option_file(cls: type, key: str = "") -> str:
    """Return the path of the option file whose `_target_` is `cls`, for example `conf/optimizer/sgd.yaml`.

    If this file lacks the `key`, and one that it inherits has it, return the path of that one. If several files name
    the class, return their folder; if no file does, return the path of the root config.
    """
    found = _files_by_target().get(f"{cls.__module__}.{cls.__qualname__}", [CONF / "config.yaml"])
    if key:
        line, own = re.compile(rf"^ *{re.escape(key)}:", re.MULTILINE), found[0].read_text(encoding="utf-8")
        inherited = [path for path in found[0].parent.glob("_*.yaml") if re.search(rf"\b{path.stem}\b", own)]
        shared = [path for path in inherited if line.search(path.read_text(encoding="utf-8"))]
        found = shared if shared and not line.search(own) else found
    if len(found) > 1:
        return f"conf/{found[0].parent.relative_to(CONF).as_posix()}/"
    return f"conf/{found[0].relative_to(CONF).as_posix()}"


@cache
def _files_by_target() -> dict[str, list[Path]]:
    """Return the files below conf/ that have a `_target_`, by its value."""
    files: dict[str, list[Path]] = {}
    for path in sorted(CONF.rglob("*.yaml")):
        for target in {*re.findall(r"^ *_target_: ([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE)}:
            files.setdefault(target, []).append(path)
    return files
