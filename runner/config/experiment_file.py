"""Experiments: option files for conf/experiment/ with the same effect as the overrides of a command."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from runner.config.composition import with_several_trackers
from runner.config.options import groups_in_defaults, option_files
from runner.config.overrides import override_key, quoted
from runner.config.user_code import typed_files

_INHERITED = ("experiment", "debug")
"""Config groups whose options set keys of the whole config. An experiment can inherit them, but not override them."""


def experiment_file(overrides: Iterable[str], comments: Sequence[str], config_dir: str | None = None) -> str:
    """Return the content of an option file for conf/experiment/ with the same effect as `overrides` of a command.

    Overrides that delete a key are left out, because a file cannot delete keys; `~GROUP` sets the group to null. Those
    that name Python files are left out, because a file cannot choose code.

    Args:
        overrides: the overrides.
        comments: the lines of the comment at the top of the file, without `#`.
        config_dir: a directory with the user's own options, which the overrides may choose; None to use only conf/.
    """
    own_groups = option_files(*([Path(config_dir).expanduser()] if config_dir else [])).keys() - groups_in_defaults()
    inherited: dict[str, list[str]] = {group: [] for group in _INHERITED}
    chosen: dict[str, Any] = {}
    values = OmegaConf.create()
    parser = OverridesParser.create()
    for text in with_several_trackers(text for text in overrides if not typed_files([text])):
        override = parser.parse_override(quoted(text, sweep=False))
        key, value = override_key(text), None if override.is_delete() else override.value()
        if key in _INHERITED:
            options = value if isinstance(value, list) else [value]
            inherited[key] = [f"/{key}/{option}" for option in options if option is not None]
        elif key in groups_in_defaults() and not isinstance(value, dict):
            chosen[f"override /{key}"] = value
        elif key in own_groups and not isinstance(value, dict):
            chosen[f"/{key}"] = value
        elif not override.is_delete():
            OmegaConf.update(values, key, value, force_add=True)
    defaults = [*inherited["experiment"], *inherited["debug"], *({key: value} for key, value in chosen.items())]
    head = "".join(f"# {line}\n" for line in ("@package _global_", *comments))
    listed = OmegaConf.to_yaml(OmegaConf.create({"defaults": [*defaults, "_self_"]})) if defaults else ""
    return f"{head}{listed}{OmegaConf.to_yaml(values) if values else ''}"


def experiment_command(directory: str, name: str, config_dir: str | None) -> str:
    """Return the command that trains `directory/experiment/NAME.yaml`, which may choose options of `config_dir`."""
    words = ["python", "-m", "runner", f"--config-dir={directory}"]
    if config_dir is not None:
        source = json.dumps(f"file://{os.path.abspath(os.path.expanduser(config_dir))}", ensure_ascii=False)
        words.append(f"hydra.searchpath=[{source}]")
    return shlex.join([*words, f"experiment={name}"])
