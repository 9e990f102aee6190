"""References in a config, `${…}`: what they stand for is what counts, unless it may be a credential.

Beside the resolvers of OmegaConf, `${eval:…}` computes a number: `${eval:'${batch_size} * 1e-3'}`.
"""

from __future__ import annotations

import ast
import math
import operator
import os
import re
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import omegaconf
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.overrides import LOCATION_KEYS
from runner.system.secrets import names_a_secret, redacted_values

_OF_ENVIRONMENT = re.compile(r"\$(?=\{\s*oc\.env\s*:)")
_COMPUTED = re.compile(r"\$(?=\{\s*(?:oc\.env|oc\.decode|eval)\s*:)")
_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*(?P<name>\w+)\s*(?:,(?P<default>[^{}]*))?\}")
_MARK = secrets.token_hex(8)
"""A random text, which no config contains. It replaces the `$` of references that OmegaConf must not resolve."""

_MAX_NESTED = 9
"""How deep references may be nested in the defaults of others."""

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS = {"min": min, "max": max, "round": round, "int": int, "float": float, "sqrt": math.sqrt}


def resolved(config: DictConfig) -> dict[str, Any]:
    """Return `config` as plain values, with all interpolations resolved except references to what may be a credential.

    Such a reference is kept as the text `${oc.env:NAME}` until a component is built: the files of a run contain this
    text instead of the value. It is a reference whose variable is not set, whose variable, key or value looks like a
    credential, or which is an option of a tracker.
    """
    raw: Any = OmegaConf.to_container(config, resolve=False)
    if "oc.env" not in str(raw):
        return OmegaConf.to_container(config, resolve=True)  # pyright: ignore[reportReturnType]
    marked = {
        key: value if key in LOCATION_KEYS else _marked(value, key, is_hidden=key == "tracking")
        for key, value in raw.items()
    }
    try:
        found = OmegaConf.to_container(OmegaConf.create(marked), resolve=True)
    except OmegaConfBaseException:  # of what refers to a text that is marked, and can only be computed later
        marked = _mapped(partial(_COMPUTED.sub, _MARK), marked)
        found = OmegaConf.to_container(OmegaConf.create(marked), resolve=True)
    return _mapped(lambda text: text.replace(_MARK, "$"), found)


def with_variables(override: str) -> str:
    """Return an override in which references to environment variables, except to credentials, are their values."""
    key, equals, text = override.partition("=")
    value = None if key.lstrip("+").startswith("tracking") else _with_values(text, key)
    return override if value is None else f"{key}{equals}{value}"


def _with_values(text: str, key: str) -> str | None:
    """Return the value `text` of `key` with the values of environment variables; None if it must be kept as it is."""
    for _ in range(_MAX_NESTED):
        if any(names_a_secret(found["name"]) for found in _VARIABLE.finditer(text)):
            return None
        text = _VARIABLE.sub(lambda found: os.environ.get(found["name"], found["default"] or found[0]), text)
    return None if _OF_ENVIRONMENT.search(text) or redacted_values(text, key) != text else text


def _marked(value: Any, key: str, is_hidden: bool) -> Any:
    """Return a raw `value` in which the references to environment variables that must be kept are marked."""
    if isinstance(value, dict):
        within = is_hidden or names_a_secret(key)
        return {name: _marked(inner, key if within else str(name), within) for name, inner in value.items()}
    if isinstance(value, list):
        return [_marked(inner, key, is_hidden) for inner in value]
    if not isinstance(value, str) or not _OF_ENVIRONMENT.search(value):
        return value
    return _COMPUTED.sub(_MARK, value) if is_hidden or _with_values(value, key) is None else value


def _mapped(function: Callable[[str], str], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(function, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mapped(function, inner) for inner in value]
    return function(value) if isinstance(value, str) else value


def computed(expression: object) -> int | float:
    """Return the value of an arithmetic expression: numbers, `+ - * / // %`, parentheses and `_FUNCTIONS`.

    Raises:
        ValueError: if it is anything else, or has no finite value.
    """
    text = str(expression)
    try:
        value = _computed(ast.parse(text.strip(), mode="eval").body)
        if math.isfinite(value):
            return value
    except (SyntaxError, ArithmeticError, TypeError, RecursionError) as error:
        raise ValueError(f"{text!r} cannot be computed ({error})") from None
    raise ValueError(f"{text!r} is not finite")


def _computed(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_computed(left), _computed(right))
        case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_computed(operand))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_computed, arguments))
    known = f"numbers, + - * / // %, parentheses, {', '.join(_FUNCTIONS)}"
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic, which is {known}")


def register() -> None:
    """Register the resolver `${eval:…}` with OmegaConf."""
    is_older = omegaconf.__version__.startswith("2.3.")
    add: Any = OmegaConf.register_new_resolver if is_older else OmegaConf.register_resolver
    add("eval", computed, replace=True)
