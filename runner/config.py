"""From a YAML node to a typed, validated component; from a mistake to an error that a person can act on.

A component is a dataclass. Its fields are its config schema, its `__post_init__` holds its checks, its methods do the
work. This module knows no component, and imports neither torch nor Hydra: a mistake is told within a second.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

# In a checkout conf/ lies beside runner/, in an installed package inside it.
CONF = next(path for path in (Path(__file__).parent / "conf", Path(__file__).parent.parent / "conf") if path.is_dir())

Component = TypeVar("Component")


class ConfigError(Exception):
    """The config cannot run: which key, what was got, why that cannot be, and what to do instead.

    Raised by components with the bare name of their field; `build` puts the group's name before it, so that the user
    reads the key that they would type.
    """

    def __init__(self, key: str, got: object, why: str, remedy: str):
        super().__init__(key, got, why, remedy)
        self.key, self.got, self.why, self.remedy = key, got, why, remedy

    def __str__(self) -> str:
        got = "" if self.got is ABSENT else f" got {_shown(self.got)}:"
        return f"{self.key}:{got} {self.why}\n  {self.remedy}"


ABSENT = object()
"""In place of a value, where there is none to show."""


def check(ok: bool, key: str, got: object, why: str, remedy: str) -> None:
    """Raise `ConfigError` unless `ok`."""
    if not ok:
        raise ConfigError(key, got, why, remedy)


def check_range(
    component: object,
    key: str,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> None:
    """Refuse a number of `component` that is not finite, outside (`above`, `below`), or outside [`least`, `most`]."""
    value = getattr(component, key)
    if value is None or (math.isfinite(value) and above < value < below and least <= value <= most):
        return
    bounds = (("> ", above), ("≥ ", least), ("≤ ", most), ("< ", below))
    wanted = [
        f"{word}{bound if isinstance(bound, int) else f'{bound:g}'}" for word, bound in bounds if math.isfinite(bound)
    ]
    raise ConfigError(key, value, "it must be a finite number " + " and ".join(wanted), _see(component))


def check_choice(component: object, key: str, choices: Iterable[str]) -> None:
    """Refuse a string of `component` that is none of `choices`."""
    value, choices = getattr(component, key), list(choices)
    if value not in choices:
        raise ConfigError(key, value, f"it is none of {', '.join(choices)}", did_you_mean(value, choices))


def did_you_mean(word: str, known: Iterable[str], before: str = "") -> str:
    """A sentence that names the nearest of `known`, or all of them when none is near; each with `before` before it."""
    spelled = {name.lower(): before + name for name in sorted(known)}
    near = difflib.get_close_matches(word.lower(), spelled, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(spelled[name] for name in near)}?"
    return f"known are: {', '.join(spelled.values())}" if spelled else "it has none"


def build(node: Mapping[str, Any], base: type[Component], key: str, **parts: object) -> Component:
    """Build the component that `node` names by `_target_`, strictly: no unknown key, no wrong type, no bad range.

    Args:
        node: plain values by field name, and `_target_`, the class as `package.module.Class`.
        base: the class of the room; `_target_` must be it or a subclass.
        key: where the node stands in the config (`optimizer`), for messages.
        parts: components built before this one, for the fields of those names.

    Raises:
        ConfigError: with the full key that the user would type.
    """
    node = dict(node)
    with errors_under(key):
        cls = load_class(node.pop("_target_", None), base)
        return cls(**typed_values(cls, node), **{name: parts[name] for name in component_fields(cls)})


@contextmanager
def errors_under(key: str) -> Iterator[None]:
    """Put `key` before the keys of the config errors raised inside: a component does not know where it stands."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}.{error.key}", error.got, error.why, error.remedy) from None


def component_fields(cls: type) -> list[str]:
    """The fields of a component that are components themselves: filled with the root node of the same name."""
    hints = field_types(cls)
    return [field.name for field in _init_fields(cls) if dataclasses.is_dataclass(hints[field.name])]


def option_fields(cls: type) -> list[str]:
    """The fields of a component that are values in its YAML file."""
    parts = component_fields(cls)
    return [field.name for field in _init_fields(cls) if field.name not in parts]


def field_types(cls: type) -> dict[str, Any]:
    """The types of the fields of a component.

    `typing.get_type_hints` would evaluate all annotations, those that only a type checker can follow among them.
    """
    names = {field.name for field in _init_fields(cls)}
    types = {}
    for base in reversed(cls.__mro__):
        scope = vars(sys.modules[base.__module__])
        for name, hint in inspect.get_annotations(base).items():
            if name in names and not str(hint).startswith("ClassVar"):
                types[name] = eval(hint, scope) if isinstance(hint, str) else hint
    return types


def load_class(target: object, base: type[Component]) -> type[Component]:
    """The class at `target`, refused unless it is a `base` from this project or from a declared package.

    Only packages with an entry point in the group `runner.components` are imported: a config file must not be able to
    run arbitrary code, as `hydra.utils.instantiate` lets it.
    """
    where = "_target_"
    check(isinstance(target, str) and "." in target, where, target, "it must name a class", "as package.module.Class")
    module_name, _, name = cast(str, target).rpartition(".")
    package = module_name.partition(".")[0]
    if package != "runner":  # a look at what is installed takes a while
        trusted = {"runner"} | {point.module.partition(".")[0] for point in entry_points(group="runner.components")}
        check(
            package in trusted,
            where,
            target,
            f"only classes of these packages may be named: {', '.join(sorted(trusted))}",
            "declare an entry point in the group runner.components in the package that holds the class",
        )
    try:
        cls = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        raise ConfigError(where, target, str(error), "name an importable module") from None
    check(
        isinstance(cls, type) and issubclass(cls, base) and dataclasses.is_dataclass(cls),
        where,
        target,
        f"it is no {base.__module__}.{base.__name__}",
        "name a dataclass derived from it",
    )
    return cast(type[Component], cls)


def typed_values(cls: type, node: Mapping[str, Any]) -> dict[str, Any]:
    """`node` merged into the schema that the fields of `cls` declare, converted to their types."""
    hints = field_types(cls)
    options = option_fields(cls)
    for name in node:
        check(name in options, name, ABSENT, f"{cls.__name__} has no such option;", did_you_mean(name, options))
    fields = [
        (name, hints[name], _schema_default(field)) for field in _init_fields(cls) if (name := field.name) in options
    ]
    schema = OmegaConf.structured(dataclasses.make_dataclass(cls.__name__, fields, kw_only=True))
    for name, value in node.items():  # one by one, so that a message is about one key
        try:
            if hints[name] is bool and not isinstance(value, str) and value not in (0, 1):
                raise ValidationError("OmegaConf would take any number for a truth value")
            schema[name] = value
        except OmegaConfBaseException:
            raise ConfigError(name, value, f"it must be {_in_words(hints[name])}", _see(cls)) from None
    missing = [name for name in options if OmegaConf.is_missing(schema, name)]
    check(not missing, missing[0] if missing else "", ABSENT, "it has no value", _see(cls))
    return {name: _plain(schema[name], hints[name]) for name in options}


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


def _in_words(hint: Any) -> str:
    inner = [_in_words(part) for part in get_args(hint) if part is not ...]
    if get_origin(hint) in (list, tuple):
        return f"a list, each of it {inner[0]}"
    return " or ".join(inner) or _WORDS.get(hint, str(hint))


def _plain(value: Any, hint: Any) -> Any:
    value = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
    return tuple(value) if get_origin(hint) is tuple else value


def _init_fields(cls: type) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(cls) if field.init]


def _schema_default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory)
    return dataclasses.field(default="???" if field.default is dataclasses.MISSING else field.default)


def _see(component: object) -> str:
    cls = component if isinstance(component, type) else type(component)
    return f"see the comments in {_option_file(cls)}"


def _option_file(cls: type) -> str:
    """The file under conf/ that names `cls`: `conf/optimizer/sgd.yaml`; of several, their folder; of none: root."""
    named = re.compile(rf"^ *_target_: {re.escape(f'{cls.__module__}.{cls.__qualname__}')}\b", re.MULTILINE)
    found = [path for path in sorted(CONF.rglob("*.yaml")) if named.search(path.read_text(encoding="utf-8"))]
    if len(found) > 1:
        return f"conf/{found[0].parent.relative_to(CONF).as_posix()}/"
    return f"conf/{found[0].relative_to(CONF).as_posix()}" if found else "conf/config.yaml"


def _shown(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
