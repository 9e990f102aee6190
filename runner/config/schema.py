"""Builds components from YAML nodes: dataclasses, whose fields are their schema.

The type of a field has its limits (see `runner.config.limits`); what involves several fields, `__post_init__` checks.

This module imports neither torch nor Hydra, so that a config error is reported within a second.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from enum import EnumMeta
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.errors import ABSENT, ConfigError, check, did_you_mean, errors_under, see_comments
from runner.config.limits import Range

Component = TypeVar("Component")


def build(node: Mapping[str, Any], base: type[Component], key: str, **parts: object) -> Component:
    """Build the component that the `_target_` of `node` names. Unknown keys and values of a wrong type are errors.

    Args:
        node: plain values by field name, and `_target_`, the class as `package.module.Class`.
        base: the base class of the config group; `_target_` must name this class or a subclass.
        key: the key of the node in the config, for error messages (`optimizer`).
        parts: the components that the new component holds, by field name. They must have been built already.

    Raises:
        ConfigError: if the node is invalid; the error names the full key, for example `optimizer.lr`.
    """
    node = dict(node)
    with errors_under(key):
        cls = load_class(node.pop("_target_", None), base)
        values = typed_values(cls, node)
        return cls(**values, **{name: parts[name] for name in component_fields(cls)})


def component_fields(cls: type) -> list[str]:
    """Return the names of the fields of `cls` that hold other components, such as `optimizer`."""
    return [name for name, hint in field_types(cls).items() if dataclasses.is_dataclass(hint)]


def option_fields(cls: type) -> list[str]:
    """Return the names of the fields of the component class `cls` that are options in its YAML file."""
    return [name for name, hint in field_types(cls).items() if not dataclasses.is_dataclass(hint)]


@cache
def field_types(cls: type) -> Mapping[str, Any]:
    # `typing.get_type_hints` would evaluate all annotations, including those that only a type checker can resolve.
    names = {field.name for field in dataclasses.fields(cls) if field.init}
    types = {}
    for base in reversed(cls.__mro__):
        scope = vars(sys.modules[base.__module__])
        for name, hint in inspect.get_annotations(base).items():
            if name in names and not str(hint).startswith("ClassVar"):
                types[name] = eval(hint, scope) if isinstance(hint, str) else hint
    return types


def load_class(target: object, base: type[Component]) -> type[Component]:
    """Import and return the class `target`, which must be a subclass of `base`.

    Only this project and packages with an entry point in the group `runner.components` are imported, so that a config
    file cannot run arbitrary code, as it could with `hydra.utils.instantiate`.

    Args:
        target: `package.module.Class`.
        base: the base class, usually that of a config group.

    Raises:
        ConfigError: if `target` cannot be imported, is not a concrete dataclass derived from `base`, or belongs to a
            package that is not trusted.
    """
    where = "_target_"
    if not isinstance(target, str) or "." not in target or "__main__" in target:  # importing that would run a program
        raise ConfigError(where, target, "it must name a class", "as package.module.Class")
    module_name, _, name = target.rpartition(".")
    package = module_name.partition(".")[0]
    if package != "runner":  # reading the entry points of all installed packages is slow
        trusted = {"runner"} | {point.module.partition(".")[0] for point in entry_points(group="runner.components")}
        why = f"only classes of these packages may be named: {', '.join(sorted(trusted))}"
        remedy = "install the package, with an entry point in the group runner.components"
        check(package in trusted, where, target, why, remedy)
    try:
        cls = getattr(importlib.import_module(module_name), name, None)
    except (ModuleNotFoundError, ValueError, RecursionError) as error:  # ValueError: an empty part
        raise ConfigError(where, target, str(error), "name an importable module") from None
    if not isinstance(cls, type) or not issubclass(cls, base) or not dataclasses.is_dataclass(cls):
        why = f"it is not a {base.__module__}.{base.__name__}"
        raise ConfigError(where, target, why, "name a dataclass derived from it")
    if undefined := ", ".join(sorted(getattr(cls, "__abstractmethods__", ()))):
        why = f"it is abstract: it does not define {undefined}"
        raise ConfigError(where, target, why, "name a class that defines all abstract methods")
    return cast(type[Component], cls)


def typed_values(cls: type, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict of the option values of `cls`, from `node` or the defaults, converted to the declared types.

    Raises:
        ConfigError: for an unknown key, a wrong type, a value out of range, a missing value, or an environment variable
            that is not set.
    """
    given, values = checked_values(cls, node), {}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in option_fields(cls):
        default, factory = fields[name].default, fields[name].default_factory
        value = given[name] if name in given else default if factory is dataclasses.MISSING else factory()
        if value in ("???", dataclasses.MISSING):
            raise ConfigError(name, ABSENT, "it has no value", f"give it one; {see_comments(cls, name)}")
        values[name] = _resolved(name, value, field_types(cls)[name]) if "${" in str(value) else value
        if values[name] == "" and default != "":
            raise ConfigError(name, value, "it must be a text that is not empty", see_comments(cls, name))
    return values


def checked_values(cls: type, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in `node`, converted to the types of the options of `cls`, but for `${…}` and missing ones.

    Raises:
        ConfigError: for an unknown key, or a value of a wrong type or out of range.
    """
    hints, options, values = field_types(cls), option_fields(cls), {}
    for name, value in node.items():
        if name not in options:
            raise ConfigError(name, ABSENT, f"{cls.__name__} has no such option;", did_you_mean(name, options))
        try:
            is_later = value == "???" or "${" in str(value)
            values[name] = value if is_later else _converted(value, hints[name])
        except (ValueError, OverflowError):
            why, choices = f"it must be {_in_words(hints[name])}", _choices(hints[name])
            remedy = did_you_mean(value, choices) if choices and isinstance(value, str) else see_comments(cls, name)
            raise ConfigError(name, value, why, remedy) from None
    return values


def plain_options(component: object, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `node` as the `component` that was built from it understands them, still as plain values.

    A text that was meant as a number, such as that of an environment variable, is the number. What refers to a
    credential is kept, as `runner.config.references` says.
    """
    hints, plain = field_types(type(component)), dict(node)
    for name in hints.keys() & {name for name, value in node.items() if isinstance(value, str | list)}:
        value = node[name]
        if "oc.env" not in str(value):
            typed = _resolved(name, value, hints[name]) if "${" in str(value) else _converted(value, hints[name])
            typed = list(typed) if isinstance(typed, tuple) else typed
            plain[name] = typed if isinstance(typed, str | int | float | list | None) else value
    return plain


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.?inf|\.?nan")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def _converted(value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint`.

    Raises:
        ValueError: if it is not clearly meant as one: 016 is no number, and 1.10 no text, as it may have been 1.1.
    """
    origin, items = get_origin(hint) or hint, get_args(hint) or (Any,)
    if origin in (Union, UnionType):
        for kind in [kind for kind in items if type(value) in (kind, *get_args(kind)[:1])] or items:
            with suppress(ValueError):
                return _converted(value, kind)
    elif origin is Annotated:
        found = _converted(value, items[0])
        if all(found in limits for limits in items[1:] if isinstance(limits, Range)):
            return found
    elif origin is Literal:
        for choice in items:
            if str(value) == str(choice):
                return choice
    elif type(value) is hint:
        return value
    elif hint is Any or (origin is dict and isinstance(value, dict)):
        return copy.deepcopy(value)
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        if items[0] is not str or all(isinstance(item, str) for item in value):  # 1_0 would become the text 10
            return origin(_converted(item, items[0]) for item in value)
    elif hint is bool and (word := str(value).lower()) in (*_TRUE, *_FALSE):
        return word in _TRUE
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif isinstance(hint, EnumMeta) and value in hint.__members__:
        return hint[value]
    elif hint is str and type(value) is int:
        return str(value)
    elif hint is int and isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    elif hint is float and (type(value) is int or (isinstance(value, str) and _FLOAT.fullmatch(value))):
        return float(str(value).replace(".inf", "inf").replace(".nan", "nan"))
    raise ValueError


def _in_words(hint: Any) -> str:
    origin, items = get_origin(hint), get_args(hint)
    if len(choices := _choices(hint)) > 1:
        return f"one of {', '.join(choices)}"
    if origin is Annotated:
        limits = [each for each in items[1:] if isinstance(each, Range)]
        word = "a finite number" if limits and items[0] is float else _in_words(items[0])
        return " ".join([word, *filter(None, map(str, limits))])
    if origin is dict:
        return "a mapping"
    inner = [_in_words(part) for part in items if part is not ...]
    if origin in (list, tuple):
        return f"a list whose items are each {inner[0]}"
    return " or ".join(inner) or _WORDS.get(hint, str(hint))


def _choices(hint: Any) -> list[str]:
    """Return all values of the type `hint`, as they are typed; empty if they cannot be listed."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    listed = {bool: ("true", "false"), NoneType: ("null",)}
    values = [get_args(kind) if get_origin(kind) is Literal else listed.get(kind) for kind in kinds]
    is_choice = all(values) and any(get_origin(kind) is Literal for kind in kinds)
    return [str(value) for each in values for value in each or ()] if is_choice else []


def _resolved(name: str, value: Any, hint: Any) -> Any:
    """Return `value` of the option `name`, which has references, with their values."""
    why = "its value has a wrong type, or is out of range"  # the error must not have the value, which may be a secret
    try:
        found: Any = OmegaConf.to_container(OmegaConf.create({name: value}), resolve=True)
        return _converted(found[name], hint)
    except OmegaConfBaseException as error:
        why = str(error).splitlines()[0]
    except (ValueError, OverflowError):  # whose message may have the value
        pass
    raise ConfigError(name, value, why, f"it must be {_in_words(hint)}")
