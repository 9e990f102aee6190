"""Reads and writes YAML that holds plain values only. Its numbers are those of the command line: 010 is a text."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.errors import ABSENT, ConfigError, check

_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"[-+]?(?:(?:0|[1-9][0-9_]*)(?:\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)
_FIRST = list("-+.0123456789")
_MAX_DEPTH = 20
"""The number of collections that may be inside each other; reading is recursive."""


def _reader(base: Any) -> Any:
    """Return a loader of PyYAML with the numbers of the command line, which refuses keys that are no text or double."""

    class Loader(base):
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
            first: [(tag, pattern) for tag, pattern in found if tag in (f"{_TAG}null", f"{_TAG}bool")]
            for first, found in base.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = {key.value for key, _ in node.value if key.tag == f"{_TAG}str" and key.value}
            if len(names) < len(node.value):
                why = "a key is not a text, or is there twice"
                raise yaml.constructor.ConstructorError(None, None, why, node.start_mark)
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver(f"{_TAG}int", _INTEGER, _FIRST)
    Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, _FIRST)
    return Loader


_PythonLoader = _reader(yaml.SafeLoader)  # reads lone surrogates, of the names of files, but is slow
_Loader = _reader(getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # libyaml is fast, but not everywhere
_MAX_SLOW = 100_000


_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_SafeDumper):
    """Quotes a text that any reader of YAML would take for a number or a date, and repeats values instead of naming."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver(f"{_TAG}float", _FLOAT, _FIRST)


def yaml_text(values: Any) -> str:
    """Return plain values as YAML, from which `plain_values` reads the same values."""
    try:
        text = yaml.dump(values, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
        if all(line.isprintable() for line in text.split("\n")):
            return text
    except UnicodeEncodeError:  # a lone surrogate, of a file name
        pass
    return json.dumps(values, indent=2) + "\n"  # JSON is YAML, too, and escapes what YAML would change


def read_config(path: Path) -> Any:
    """Return the content of a YAML file as an OmegaConf node; an empty mapping if the file is empty.

    Raises:
        ConfigError: with the path as its key, if the file cannot be read or parsed, or holds anything but plain values.
    """
    name = os.path.relpath(path)
    try:
        values = plain_values(path.read_text(encoding="utf-8"), name)
        check(values is None or isinstance(values, dict), name, ABSENT, "it is not a mapping", "write KEY: VALUE")
        return OmegaConf.create(values or {})
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ConfigError(name, ABSENT, f"it cannot be read: {why}", "correct or remove the file") from None
    except OmegaConfBaseException as error:
        why = f"it is not valid: {str(error).splitlines()[0]}"
        raise ConfigError(name, ABSENT, why, "correct the file") from None


def plain_values(text: str, name: str) -> Any:
    """Return the values in a YAML text; None if it is empty. References (`${…}`) are not resolved.

    Args:
        text: the YAML text.
        name: the key of an error: the path of the file.

    Raises:
        ConfigError: if the text cannot be parsed, or has a tag (`!TYPE`) or an alias (`*NAME`), which can make a small
            text enormous.
    """
    loader, depth = _PythonLoader if "\\ud" in text and len(text) < _MAX_SLOW else _Loader, 0
    try:
        for event in yaml.parse(text, loader):  # before libyaml composes it, which would overflow the stack
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            is_plain = not isinstance(event, yaml.AliasEvent) and getattr(event, "tag", None) is None
            if depth > _MAX_DEPTH or not is_plain:
                why = f"line {event.start_mark.line + 1} has a tag (!TYPE), an alias (*NAME) or too many levels"
                raise ConfigError(name, ABSENT, why, "write a plain value; ${KEY} refers to another one")
        return yaml.load(text, loader)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(name, ABSENT, f"it is not valid YAML{line}: {error.problem}", "correct that line") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        why = f"it is not valid YAML: {str(error).splitlines()[0]}"
        raise ConfigError(name, ABSENT, why, "correct the file") from None
