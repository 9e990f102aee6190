"""Builds components from YAML nodes: dataclasses, whose fields are their schema, and whose `__post_init__` checks them.

This module imports neither torch nor Hydra, so that a config error is reported within a second.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar, cast, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from runner.config.errors import ABSENT, ConfigError, check, did_you_mean, errors_under, see_comments

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
        for name, value in values.items():
            no_user = isinstance(value, str) and os.path.expanduser(value).startswith("~")
            check(not no_user, name, value, "there is no such user", "write out the path of the home directory")
        component = _constructed(cls, values, {name: parts[name] for name in component_fields(cls)})
        defaults = {field.name: field.default for field in _init_fields(cls)}
        for name, value in values.items():
            if value == "" and defaults[name] != "":  # no `check`: finding the file with the comments takes 10 ms
                raise ConfigError(name, value, "it must be a text that is not empty", see_comments(cls))
        return component


def _constructed(cls: type[Component], values: dict[str, Any], parts: dict[str, object]) -> Component:
    try:
        return cls(**values, **parts)
    except OSError as error:  # of a file that an option names
        texts = {name: value for name, value in values.items() if value and isinstance(value, str)}
        named = [name for name, text in texts.items() if text in str(error.filename)]
        name = max(named, key=lambda name: len(texts[name]), default="_target_")  # the path, not a short part of it
        raise ConfigError(name, values.get(name), f"{error.strerror}", see_comments(cls)) from None


def component_fields(cls: type) -> list[str]:
    """Return the names of the fields of `cls` that hold other components, such as `optimizer`."""
    hints = field_types(cls)
    return [field.name for field in _init_fields(cls) if dataclasses.is_dataclass(hints[field.name])]


def option_fields(cls: type) -> list[str]:
    """Return the names of the fields of the component class `cls` that are options in its YAML file."""
    parts = component_fields(cls)
    return [field.name for field in _init_fields(cls) if field.name not in parts]


@cache
def field_types(cls: type) -> Mapping[str, Any]:
    """Return the type of each field of the component class `cls`, by field name."""
    # `typing.get_type_hints` would evaluate all annotations, including those that only a type checker can resolve.
    names = {field.name for field in _init_fields(cls)}
    types = {}
    for base in reversed(cls.__mro__):
        scope = vars(sys.modules[base.__module__])
        for name, hint in inspect.get_annotations(base).items():
            if name in names and not str(hint).startswith("ClassVar"):
                types[name] = eval(hint, scope) if isinstance(hint, str) else hint
    return types


_MAX_PARTS = 20
"""The largest number of dots in the name of a class."""


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
    is_name = isinstance(target, str) and 1 <= target.count(".") <= _MAX_PARTS
    if not is_name or "__main__" in cast(str, target):  # importing that would run a program
        raise ConfigError(where, target, "it must name a class", "as package.module.Class")
    module_name, _, name = cast(str, target).rpartition(".")
    package = module_name.partition(".")[0]
    if package != "runner":  # reading the entry points of all installed packages is slow
        trusted = {"runner"} | {point.module.partition(".")[0] for point in entry_points(group="runner.components")}
        why = f"only classes of these packages may be named: {', '.join(sorted(trusted))}"
        remedy = "declare an entry point in the group runner.components in the package that holds the class"
        if importlib.util.find_spec(package) is None:  # as in the environment of another run, or of a resumed one
            why = f"no package {package} is installed here"
            remedy = "install it, with an entry point in the group runner.components"
        check(package in trusted, where, target, why, remedy)
    try:
        cls = getattr(importlib.import_module(module_name), name, None)
    except (ModuleNotFoundError, ValueError) as error:  # ValueError: an empty part
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
        ConfigError: for an unknown key, a wrong type, a missing value, or an environment variable that is not set.
    """
    schema, hints, options = checked_schema(cls, node), field_types(cls), option_fields(cls)
    for name in options:
        if OmegaConf.is_missing(schema, name):
            raise ConfigError(name, ABSENT, "it has no value", f"give it one; {see_comments(cls)}")
    return {name: _resolved(schema, name, hints[name]) for name in options}


def checked_schema(cls: type, node: Mapping[str, Any]) -> DictConfig:
    """Return an OmegaConf schema of the options of `cls`, with the values in `node`, the defaults, or missing (`???`).

    Raises:
        ConfigError: for an unknown key, or a value of a wrong type.
    """
    hints = field_types(cls)
    options = option_fields(cls)
    for name in node:
        if name not in options:
            raise ConfigError(name, ABSENT, f"{cls.__name__} has no such option;", did_you_mean(name, options))
    schema = copy.deepcopy(_empty_schema(cls))
    for name, value in node.items():  # one at a time, so that an error names a single key
        try:
            if not _is_meant(value, hints[name]):
                raise ValidationError("OmegaConf would convert it to another value")
            OmegaConf.update(schema, name, value, merge=False)  # assigning warns of conversions that are meant
        except (OmegaConfBaseException, ValueError, OverflowError):
            raise ConfigError(name, value, f"it must be {_in_words(hints[name])}", see_comments(cls)) from None
    return schema


@cache
def _empty_schema(cls: type) -> DictConfig:
    hints, options = field_types(cls), option_fields(cls)
    fields = [
        (name, hints[name], _schema_default(field)) for field in _init_fields(cls) if (name := field.name) in options
    ]
    return OmegaConf.structured(dataclasses.make_dataclass(cls.__name__, fields, kw_only=True))


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.?inf|\.?nan")
_TRUTH_VALUES = ("true", "false", "yes", "no", "on", "off", "1", "0")


def _is_meant(value: Any, hint: Any) -> bool:
    """Return whether `value` is clearly intended as a value of the type `hint`: OmegaConf alone converts too much."""
    if value in (None, "???") or (isinstance(value, str) and "${" in value):  # missing, or OmegaConf resolves it
        return True
    if isinstance(value, list | tuple):
        items = get_args(hint)[:1] if get_origin(hint) in (list, tuple) else ()
        if items == (str,) and any(type(item) is int for item in value):  # 1_0 would become the text 10
            return False
        return all(_is_meant(item, kind) for kind in items for item in value)
    if isinstance(value, dict) or get_origin(hint) in (list, tuple):  # refused by OmegaConf
        return True
    return any(_is_of(kind, value) for kind in get_args(hint) or (hint,))


def _is_of(kind: Any, value: Any) -> bool:
    if kind is bool:
        return str(value).lower() in _TRUTH_VALUES
    if kind is int or kind is float:
        number = _INTEGER if kind is int else _FLOAT
        is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        return is_number or (isinstance(value, str) and number.fullmatch(value) is not None)
    if kind is str:  # 1.10 would become the text 1.1
        return isinstance(value, str) or type(value) is int
    return kind is not type(None)


def _in_words(hint: Any) -> str:
    if get_origin(hint) is dict:
        return "a mapping"
    inner = [_in_words(part) for part in get_args(hint) if part is not ...]
    if get_origin(hint) in (list, tuple):
        return f"a list whose items are each {inner[0]}"
    return " or ".join(inner) or _WORDS.get(hint, str(hint))


def _resolved(schema: Any, name: str, hint: Any) -> Any:
    try:
        return _plain(schema[name], hint)
    except OmegaConfBaseException as error:
        raw: Any = OmegaConf.to_container(schema, resolve=False)
        is_wrong = isinstance(error, ValidationError)  # whose message has the value, which may be a secret
        why = "its value has a wrong type" if is_wrong else str(error).splitlines()[0]
        raise ConfigError(name, raw[name], why, f"it must be {_in_words(hint)}") from None


def _plain(value: Any, hint: Any) -> Any:
    value = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
    if isinstance(value, str) and get_origin(hint) in (list, tuple, dict):  # OmegaConf takes any value of a reference
        raise ValidationError("it is a text")
    return tuple(value) if get_origin(hint) is tuple else value


def _init_fields(cls: type) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(cls) if field.init]


def _schema_default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory)
    return dataclasses.field(default="???" if field.default is dataclasses.MISSING else field.default)
