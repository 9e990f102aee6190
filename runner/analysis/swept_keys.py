"""The config keys in which runs differ, and the names of the options that they chose."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from runner.config.options import option_files

REPEATS = ("seed", "repeat")
"""Config keys in which the repeats of one measurement differ."""

_WRITTEN = ("name", "output_root", "resume")
"""Config keys that determine where a run is saved."""


def labels_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values in a config by dotted key (`model.depth`), and the chosen options by config group (`model`)."""
    labels: dict[str, Any] = {}
    for key, value in config.items():
        if not isinstance(value, dict):
            labels[key] = value
            continue
        labels[key] = _option(key, value)
        labels |= {f"{key}.{name}": inner for name, inner in value.items() if name != "_target_"}
    return labels


def _option(group: str, node: dict[str, Any]) -> str:
    """Return the name of the option with the `_target_` of `node` whose values are most similar to those of `node`.

    If there is no such option, return the name of the module of `_target_`.
    """
    target = str(node.get("_target_"))
    candidates = [(name, values) for name, values in _options(group).items() if values.get("_target_") == target]
    if not candidates:
        return target.split(".")[-2] if target.count(".") else target  # the name of the module, as for parallel modes
    return min(candidates, key=lambda option: sum(node.get(key) != value for key, value in option[1].items()))[0]


@cache
def _options(group: str) -> dict[str, dict[str, Any]]:
    files = option_files().get(group, {})
    contents: dict[str, Any] = {name: OmegaConf.to_container(OmegaConf.load(path)) for name, path in files.items()}
    return contents


def user_options(overrides: Iterable[str], labels: dict[str, Any]) -> dict[str, str]:
    """Return the typed options that are not in conf/, but in the user's `--config-dir`, by config group."""
    groups = {key.partition(".")[0] for key in labels if "." in key}
    typed = (text.partition("=") for text in overrides)
    return {
        group: name
        for group, _, name in typed
        if group in groups and re.fullmatch(r"[\w-]{1,100}", name) and name not in _options(group)
    }


def swept_keys(runs: list[dict[str, Any]]) -> list[str]:
    """Return the config keys whose values differ among `runs`, given by their labels (see `labels_of`).

    Left out are the keys in `REPEATS`, keys that determine where a run is saved, and keys whose values follow from the
    option of their group: with `model=resnet18,resnet50`, `model` is returned, but `model.depth` is not.
    """
    swept: list[str] = []
    for key in dict.fromkeys(key for labels in runs for key in labels):
        with_key = [labels for labels in runs if key in labels]
        if key in (*REPEATS, *_WRITTEN) or len({repr(labels[key]) for labels in with_key}) < 2:
            continue
        group = key.partition(".")[0]
        pairs = {(repr(labels.get(group)), repr(labels[key])) for labels in with_key}
        if group == key or group not in swept or len(pairs) > len({option for option, _ in pairs}):
            swept.append(key)
    return swept
