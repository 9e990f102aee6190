"""Tests of the architecture: imports follow layers, training.py names no mode, and config errors need no torch."""

import ast
import functools
import graphlib
import sys
from pathlib import Path

from helpers.command import ROOT, Command

PARTS = (
    *("runner.device", "runner.seeds", "runner.precision", "runner.optimizer", "runner.torch_optimizer"),
    "runner.optimizer_trial",
    *("runner.schedule", "runner.plateau", "runner.profiler", "runner.batching"),
    *("runner.ema", "runner.stop", "runner.result"),
)
"""Config groups with one module each, which the training loop uses. They form one group of modules in `LAYERS`."""

# The layers. Each is a list of groups: a group is a package, a module, or a tuple of them. A module may import from its
# own group and from the layers above its own in this list. Imports under `TYPE_CHECKING` count, too.
LAYERS = [
    ["runner.models"],
    ["runner.system"],
    ["runner.config"],
    ["runner.storage"],
    [PARTS],
    ["runner.tracking"],
    ["runner.data", "runner.env", "runner.model"],
    ["runner.workloads"],
    ["runner.parallel"],
    ["runner.run"],
    [("runner.code_state", "runner.code_places", "runner.code_values")],
    [("runner.state", "runner.saved_state", "runner.trial"), "runner.resume", "runner.failures"],
    [("runner.training", "runner.compiled_step"), "runner.analysis"],
    ["runner.sweeps", "runner.planning", "runner.verification"],
    ["runner.api"],
    [("runner.commands", "runner.__main__"), "runner"],
]


@functools.cache
def modules() -> dict[str, Path]:
    files = [*(ROOT / "runner").rglob("*.py"), *(ROOT / "runner" / "models").rglob("*.py")]
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def layer_of(module: str) -> tuple[int, object]:
    """Return the index of the layer to which `module` belongs, and the group in this layer to which it belongs."""
    for level, groups in enumerate(LAYERS):
        for group in groups:
            names = group if isinstance(group, tuple) else (group,)
            if any(module == name or (module.startswith(f"{name}.") and name != "runner") for name in names):
                return level, group
    raise AssertionError(f"{module} is in no layer: add it to LAYERS")


@functools.cache
def imports(path: Path) -> set[str]:
    """Return the project's modules that a file imports, at the top level or in functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules() else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.partition(".")[0] == "runner"}


def test_modules_import_only_from_their_group_and_earlier_layers():
    for module, path in modules().items():
        level, group = layer_of(module)
        for imported in imports(path):
            other_level, other_group = layer_of(imported)
            assert other_level < level or other_group == group, f"{module} imports {imported}"


def test_there_are_no_import_cycles():
    graph = {module: imports(path) - {module} for module, path in modules().items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that names the modules of a cycle


def test_networks_import_only_torch_torchvision_and_the_standard_library():
    for path in (ROOT / "models").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        names = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        others = {name.partition(".")[0] for name in names if not name.startswith("runner.models.")}
        assert others <= {"torch", "torchvision", *sys.stdlib_module_names}, path


def test_the_training_loop_names_no_mode_no_precision_and_no_workload():
    source = (ROOT / "runner" / "training.py").read_text(encoding="utf-8")
    groups = ("parallel", "workload", "precision")
    options = [path.stem for group in groups for path in (ROOT / "conf" / group).glob("[!_]*.yaml")]
    assert len(options) > 10
    assert [word for word in options if not word.isdigit() and f'"{word}"' in source] == []
    assert "isinstance" not in source


def test_composing_and_checking_a_config_needs_no_torch(tmp_path):
    code, console = Command(tmp_path, "batch_size=10", "accumulation.steps=3", kind="no-torch").wait()
    assert code == 2, console
    assert "batch_size: got 10" in console
