"""Names in a user's file that look like a part of it, but are none: what a file defines is used, refused or said."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from runner.config.errors import ConfigError, shown
from runner.config.other_names import of_code

log = logging.getLogger(__name__)


def check_names(
    path: str, source: bytes, values: Mapping[str, Any], missing: Collection[str], others: Mapping[str, str] = {}
) -> None:
    """Refuse names in a file that nothing in it uses, and by which the config or another part is called elsewhere.

    Examples are `metric` for `metrics`, `after_epoch`, and an `optimizer`. Helpers, imports and names that begin with
    `_` are never refused. A mere constant, such as `lr = 0.1`, is said in a line of the log.

    Args:
        path, source, values: the file, its content, and what it has defined, by name.
        missing: the parts of a workload that it does not define and that are not given otherwise.
        others: the parts that this workload does not take, and what it takes instead.

    Raises:
        ConfigError: if there is such a name; it says what to write or type instead.
    """
    for name, line in _unused(ast.parse(source)):
        value = values.get(name)
        if name in others and name in values:
            why = f"{name} (line {line}) is not used beside {others[name] or 'a loss'}"
            raise ConfigError("workload", shown(path), why, f"leave one of the two out, or rename it _{name}")
        remedy = of_code(name, missing, callable(value)) if name in values else ""
        is_constant = value is None or isinstance(value, int | float | str) or type(value).__name__ == "device"
        if remedy and not is_constant:
            why = f"nothing uses {name} (line {line})"
            raise ConfigError("workload", shown(path), why, f"{remedy}; or begin its name with _ if it is a helper")
        words = re.findall(r"[A-Z]?[a-z]+", name)
        if not remedy and callable(value) and words and (last := words[-1].lower()) in {*missing} - {"model", "data"}:
            remedy = f"name it {last} if it is meant"
        if remedy:
            log.warning("%s:%d: %s has no effect, as nothing uses it: %s", shown(path), line, name, remedy)


def names_defined(source: bytes) -> set[str]:
    """Return the names that a file defines or imports at its top level; none if it cannot be parsed."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):  # which an execution reports
        return set()
    imported = (each for each in body if isinstance(each, ast.Import | ast.ImportFrom))
    return {name for name, _ in _defined(body)} | {a.asname or a.name for each in imported for a in each.names}


def _unused(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each public name that a module defines at its top level and does not use elsewhere, and its line."""
    used = [node for node in ast.walk(module) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    for name, definition in _defined(module.body):
        inside = {*ast.walk(definition)}
        if name[:1] != "_" and not any(node.id == name and node not in inside for node in used):
            yield name, definition.lineno


def _defined(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the functions, classes and variables that statements define, but not what they import."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = (node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
            yield from ((node.id, statement) for node in names if isinstance(node.ctx, ast.Store))
        else:  # inside `if`, `try` or `with`
            for field in ("body", "orelse", "finalbody"):
                yield from _defined(getattr(statement, field, []))
