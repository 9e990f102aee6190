"""Reads and writes YAML that holds plain values only, and no number that the command line reads differently, as 010."""

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
_PLAIN = ("null", "bool", "int", "float", "str", "seq", "map", "merge", "value")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_MAX_DEPTH = 20
"""The number of collections that may be inside each other; reading is recursive."""


def _as_omegaconf(base: Any) -> Any:
    """Return a class of PyYAML that reads and writes as OmegaConf does: 1e3 is a number, and 2020-01-01 a text."""

    class Class(base):
        def ignore_aliases(self, data: Any) -> bool:  # only when it writes
            return True

        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
            first: [(tag, pattern) for tag, pattern in found if tag != f"{_TAG}timestamp"]
            for first, found in base.yaml_implicit_resolvers.items()
        }

    number = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
    Class.add_implicit_resolver(f"{_TAG}float", number, list("-+.0123456789"))
    return Class


_PythonLoader = _as_omegaconf(yaml.SafeLoader)  # reads lone surrogates, of the names of files, but is slow
_Loader = _as_omegaconf(getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # libyaml is fast, but not everywhere
_Dumper = _as_omegaconf(getattr(yaml, "CSafeDumper", yaml.SafeDumper))
_MAX_SLOW = 100_000


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
        ConfigError: if the file cannot be read or parsed, or holds anything but plain values. The error names the key
            with the wrong value, or the path of the file if no single key is wrong.
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


def plain_values(text: str, name: str, *, anchors: bool = True) -> Any:
    """Return the values in a YAML text; None if it is empty. References (`${…}`) are not resolved.

    Args:
        text: the YAML text.
        name: what an error calls the text: the path of the file.
        anchors: whether `*NAME` may repeat a value. It can make a small text enormous: not in untrusted texts.

    Raises:
        ConfigError: if the text cannot be parsed, or holds anything but plain values.
    """
    try:
        loader_class = _PythonLoader if "\\ud" in text and len(text) < _MAX_SLOW else _Loader
        depth = 0
        for event in yaml.parse(text, loader_class):  # before libyaml composes it, which would overflow the stack
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            check(depth <= _MAX_DEPTH, name, ABSENT, "it is nested too deeply", "values are at most lists of lists")
            named = isinstance(event, yaml.AliasEvent) and not anchors
            check(not named, name, ABSENT, "it has an alias (*NAME)", "write out the value")
        loader = loader_class(text)
        try:
            if (root := loader.get_single_node()) is None:
                return None
            _check(root, "", name, ())
            return loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(name, ABSENT, f"it is not valid YAML{line}: {error.problem}", "correct that line") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        why = f"it is not valid YAML: {str(error).splitlines()[0]}"
        raise ConfigError(name, ABSENT, why, "correct the file") from None


def _check(node: yaml.Node, key: str, file: str, above: tuple[yaml.Node, ...]) -> None:
    """Check that `node`, at `key` of `file` and inside the nodes `above`, and all below it are plain values."""
    place = f"({file}, line {node.start_mark.line + 1})"
    short = node.tag.removeprefix(_TAG)
    if node in above:
        raise ConfigError(key or file, ABSENT, f"it contains itself {place}", "write out the value")
    if short not in _PLAIN:
        remedy = "write a number, a text, true, false, null, a list or a mapping"
        raise ConfigError(key or file, ABSENT, f"the YAML type !!{short} is not allowed {place}", remedy)
    if isinstance(node, yaml.ScalarNode):
        number = node.value if short in ("int", "float") else "0"
        if ":" in number or re.match("[-+]?0[0-9_]", number) or (short == "int" and not _INTEGER.fullmatch(number)):
            why, remedy = f"YAML and the command line read this number differently {place}", "or a text in quotes"
            raise ConfigError(key, node.value, why, f"write a decimal number without leading zeros, {remedy}")
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check(item, key, file, (*above, node))
    elif isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for name, value in node.value:
            is_text = isinstance(name, yaml.ScalarNode) and name.tag in (f"{_TAG}str", f"{_TAG}merge") and name.value
            check(bool(is_text), key or file, ABSENT, f"a key must be a text {place}", "write KEY: VALUE")
            if name.value in names:
                raise ConfigError(file, ABSENT, f"{name.value} is in it twice {place}", "leave one of them out")
            names.add(name.value)
            _check(value, f"{key}.{name.value}".lstrip("."), file, (*above, node))
