"""Reads the YAML files of a config.

These files may contain only plain values. A number that the command line would read differently is an error: for
example 010, which is 8 in YAML.
"""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.errors import ABSENT, ConfigError, check

_PLAIN_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_INTEGER, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_KEYS = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
_parsed: dict[str, bytes] = {}
"""A cache of pickled nodes by the text of their file: unpickling takes a tenth of the time of parsing."""
_MAX_PARSED = 256

_PLAIN = ("null", "bool", "int", "float", "str", "seq", "map", "merge", "value")


def read_config(path: Path) -> Any:
    """Return the content of a YAML file as an OmegaConf node; an empty mapping if the file is empty.

    Raises:
        ConfigError: if the file cannot be read or parsed, or holds anything but plain values. The error names the key
            with the wrong value, or the path of the file if no single key is wrong.
    """
    name = os.path.relpath(path)
    try:
        text = path.read_text(encoding="utf-8")
        if text not in _parsed:
            root = yaml.compose(text, Loader=_Loader)
            if root is not None:
                is_mapping = isinstance(root, yaml.MappingNode)
                check(is_mapping, name, ABSENT, "it is not a mapping", "write KEY: VALUE on a line")
                _check(root, "", name, ())
            content = pickle.dumps(OmegaConf.create(text))
            while len(_parsed) >= _MAX_PARSED:
                del _parsed[next(iter(_parsed))]
            _parsed[text] = content
        return pickle.loads(_parsed[text])
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ConfigError(name, ABSENT, f"it cannot be read: {why}", "correct or remove the file") from None
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(name, ABSENT, f"it is not valid YAML{line}: {error.problem}", "correct that line") from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        why = f"it is not valid YAML: {str(error).splitlines()[0]}"
        raise ConfigError(name, ABSENT, why, "correct the file") from None
    except RecursionError:
        raise ConfigError(name, ABSENT, "it is nested too deeply", "values are at most lists of lists") from None


_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is fast, but not everywhere


class _Loader(_Parser):
    """A loader that reads unquoted values as OmegaConf does: `1e3` is a float, not a string as in PyYAML."""


_Loader.add_implicit_resolver(_FLOAT, re.compile(r"[-+]?[0-9_]+[eE][-+]?[0-9]+"), None)


def _check(node: yaml.Node, key: str, file: str, above: tuple[yaml.Node, ...]) -> None:
    """Check that `node` and all nodes below it are plain values.

    Args:
        node: the node.
        key: the key of the node; empty for the root.
        file: the path of the file, for error messages.
        above: the nodes that contain `node`. An alias to one of these nodes is an error.

    Raises:
        ConfigError: if a node is not a plain value.
    """
    place = f"({file}, line {node.start_mark.line + 1})"
    short = node.tag.removeprefix("tag:yaml.org,2002:")
    if node in above:
        raise ConfigError(key or file, ABSENT, f"it contains itself {place}", "write out the value")
    if short not in (*_PLAIN, "timestamp"):  # OmegaConf reads a date as a text
        remedy = "write a number, a text, true, false, null, a list or a mapping"
        raise ConfigError(key or file, ABSENT, f"the YAML type !!{short} is not allowed {place}", remedy)
    if isinstance(node, yaml.ScalarNode):
        _check_number(node, key, place)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check(item, key, file, (*above, node))
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            is_text = isinstance(name, yaml.ScalarNode) and name.tag in _KEYS and name.value != ""
            check(is_text, key or file, ABSENT, f"a key must be a text {place}", "write KEY: VALUE")
            _check(value, f"{key}.{name.value}".lstrip("."), file, (*above, node))


def _check_number(node: yaml.ScalarNode, key: str, place: str) -> None:
    text = node.value
    if node.tag == _INTEGER and not _PLAIN_INTEGER.fullmatch(text):
        differs = True  # octal, hexadecimal, binary and sexagesimal numbers
    else:
        differs = node.tag == _FLOAT and (":" in text or bool(re.match(r"[-+]?0[0-9_]", text)))
    why = f"YAML and the command line read this number differently {place}"
    check(not differs, key, text, why, "write a decimal number without leading zeros, or a text in quotes")
