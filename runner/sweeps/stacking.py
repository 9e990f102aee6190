"""Which jobs of a sweep can be computed together: those that differ only in what a pass through the network ignores."""

from __future__ import annotations

import ast
import functools
import symtable
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from runner.config.options import chosen_option
from runner.config.user_code import Hooks, given
from runner.parallel.base import Parallel
from runner.profiler import Profiler
from runner.run import Run
from runner.workloads.base import Workload

_FREE = (
    *("seed", "repeat", "optimizer", "schedule", "ema", "stop", "max_grad_norm", "steps", "epochs"),
    *("log_every", "eval_every", "save_every", "keep", "tracking"),
)
"""Keys and groups of which a pass through the network, forward and backward, does not depend."""


def free_keys(workload: Workload) -> Collection[str]:
    """Return the keys, and groups of keys, whose values may differ between runs that are computed together."""
    return (*_FREE, *(f"workload.{name}" for name in workload.not_in_passes))


def is_free(key: str, free: Collection[str]) -> bool:
    """Return whether `key`, such as `optimizer.lr`, or a group of it is among the `free` ones."""
    parts = key.partition("@")[0].split(".")
    return any(".".join(parts[:count]) in free for count in range(1, len(parts) + 1))


def rest_of(config: dict[str, Any], free: Collection[str], path: str = "") -> dict[str, Any]:
    """Return `config` without its `free` keys."""
    rest = {}
    for name, value in config.items():
        key = f"{path}{name}"
        if key not in free:
            rest[name] = rest_of(value, free, f"{key}.") if isinstance(value, dict) else value
    return rest


@functools.cache
def shared_state(path: str) -> str:
    """Return what in a file of the user's would be shared by runs in one process, and may change; empty if nothing.

    These are hooks, which may change anything, and names at its top level that are neither a function, a class, a
    constant, nor what the runner copies for each run.
    """
    names: list[str] = []
    for node in ast.parse(Path(path).read_bytes()).body:
        if isinstance(node, ast.FunctionDef) and node.name in Hooks._fields:
            return f"{node.name}() may change anything of a run"
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and not _is_constant(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [ast.unparse(each) for each in targets]
    tree = ast.walk(ast.parse(Path(path).read_bytes()))
    names += [name for node in tree if isinstance(node, ast.Global) for name in node.names]
    if used := sorted(_used_in_functions(path) & {*COPIED}):
        return f"{used[0]} in {Path(path).name}, which its functions use, would be shared by the runs"
    found = next((name for name in names if name not in COPIED and not name.startswith("__")), "")
    return f"{found} in {Path(path).name} would be shared by the runs" if found else ""


def _used_in_functions(path: str) -> set[str]:
    """Return the names at the top level of a file, other than functions, that its functions look up."""
    table = symtable.symtable(Path(path).read_bytes(), path, "exec")  # pyright: ignore[reportArgumentType]
    values = {each.get_name() for each in table.get_symbols() if each.is_assigned() and not each.is_namespace()}
    used, waiting = set[str](), table.get_children()
    while waiting:
        inner = waiting.pop()
        used |= {each.get_name() for each in inner.get_symbols() if each.is_global() and each.is_referenced()}
        waiting += inner.get_children()
    return used & values


def _is_constant(node: ast.expr | None) -> bool:
    allowed = ast.Constant | ast.Tuple | ast.UnaryOp | ast.BinOp | ast.Name | ast.Attribute | ast.expr_context
    allowed |= ast.operator | ast.unaryop
    return node is None or all(isinstance(each, allowed) for each in ast.walk(node))


COPIED = ("model", "loss")
"""The objects at the top level of a file that each run copies."""


def why_alone(run: Run) -> str:
    """Return why `run` can only be computed alone; empty if it may be computed together with others."""
    if type(run.parallel) is not Parallel:
        return f"parallel={chosen_option('parallel', run.parallel)} divides a run among processes or devices"
    if given().objects:
        return "objects that are passed may be shared by the runs of a process"
    if run.compile:
        return f"compile={run.compile} compiles each run by itself"
    if run.workload.has_steps:
        return "steps of the user's own may call parts of the network, or have several phases"
    if run.precision.compute_dtype(torch.device("cpu")) == torch.float16:
        return "precision=16 scales the loss of each run by itself"
    if type(run.profiler) is not Profiler:
        return "the profiler measures one run"
    return ""
