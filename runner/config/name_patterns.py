"""Patterns of parameter names: `head`, `layer4`, `*.bias`, `encoder.layers.*`.

A pattern matches a parameter if it matches the name of the parameter, of a module that contains the parameter, or of
the parameter's block (see `runner.models.blocks`). Wildcards are those of a shell: `*` matches any text, including
dots; `?` matches one character; `[12]` matches one of the characters in brackets.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from runner.config.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch


def names_to_match(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the names that a pattern can match for each parameter: of its block, if any, its modules and itself.

    A tied parameter has those of all its uses.
    """
    from runner.models.blocks import block_indices, blocks_of

    blocks, indices = blocks_of(model), block_indices(model)
    paths: dict[torch.Tensor, list[str]] = {}
    for name, block in blocks:
        for parameter in block.parameters():
            paths.setdefault(parameter, []).append(name)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = [blocks[0][0]] if indices else []
        paths.setdefault(parameter, first).extend(paths_of(name))
    return {name: paths[parameter] for name, parameter in model.named_parameters()}


def paths_of(name: str) -> list[str]:
    """Return the names of the modules that contain a parameter, from the outermost, and its own."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def matching(key: str, pattern: str, names: Mapping[str, Sequence[str]], what: str = "parameter") -> list[str]:
    """Return the names of the parameters that `pattern` matches.

    Args:
        key: the config key of the pattern, for the error message.
        pattern: the pattern.
        names: the parameters that `pattern` may match: the result of `names_to_match`, or some of its items.
        what: which items they are, such as `trained parameter`, for the error message.

    Raises:
        ConfigError: if the pattern matches no parameter in `names`.
    """
    if found := [name for name, paths in names.items() if any(fnmatchcase(each, pattern) for each in paths)]:
        return found
    near = difflib.get_close_matches(pattern, {each for several in names.values() for each in several}, n=3)
    why = f"no {what} has this name, or is in a module or block of this name;"
    raise ConfigError(key, pattern, why, did_you_mean(pattern, near or {first for first, *_ in names.values()}))
