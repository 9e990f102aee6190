"""The import rule: one way, from the command to the networks; and no torch where the user waits for an answer."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command import ROOT, environment

# Each module may import from its own floor's base and from the floors below.
FLOORS = [
    ["models"],
    [
        "runner",
        "runner.system.lazy_import",
        "runner.config",
        "runner.system.section_timer",
        "runner.system.signals",
        "runner.tracking.images",
        "runner.system.cpu",
    ],
    ["runner.system.forkserver", "runner.parallel.pipelining.gantt"],
    [
        "runner.seeds",
        "runner.storage.run_directory",
        "runner.system.memory",
        "runner.system.environment",
        "runner.tracking.progress",
    ],
    ["runner.device", "runner.batching", "runner.optimizer", "runner.schedule", "runner.model"],
    ["runner.model.qnet", "runner.env"],
    ["runner.tracking.tensorboard", "runner.storage.manifest"],
    ["runner.data.base", "runner.precision", "runner.profiler"],
    ["runner.data"],
    ["runner.workloads.base"],
    ["runner.workloads.dqn.replay"],
    ["runner.workloads.dqn.n_step", "runner.workloads.dqn.evaluation"],
    ["runner.workloads.dqn.actor"],
    ["runner.parallel.launch.cluster", "runner.parallel.launch.supervisor", "runner.parallel.sync_batch_norm"],
    [
        "runner.parallel.pipelining.partition",
        "runner.parallel.pipelining.deferred_batch_norm",
        "runner.parallel.devices",
        "runner.parallel.collectives",
    ],
    ["runner.parallel.launch.process_group"],
    [
        "runner.parallel.pipelining.micro_batches",
        "runner.parallel.pipelining.stages",
        "runner.parallel.pipelining.timeline",
    ],
    ["runner.parallel.pipelining.schedules", "runner.parallel.pipelining.streams"],
    ["runner.workloads", "runner.parallel.base"],
    ["runner.parallel.launch.processes"],
    ["runner.parallel"],
    ["runner.run"],
    ["runner.storage.checkpoint", "runner.tracking.recorder", "runner.resume", "runner.tracking.metrics"],
    ["runner.state"],
    ["runner.train"],
    ["runner.session"],
    ["runner.cli", "runner.sweep"],
    ["runner.cli.hydra_errors"],
    ["runner.__main__"],
    ["runner.tools"],
]
# Within these floors modules build on each other; siblings elsewhere do not know each other.
LAYERED = {"models", "runner.data", "runner.env", "runner.tools", "runner"}


def modules() -> dict[str, Path]:
    files = [*(ROOT / "runner").rglob("*.py"), *(ROOT / "models").rglob("*.py")]
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def floor(module: str) -> tuple[int, str]:
    """The floor of `module`, and the entry that puts it there: the longest one that it begins with."""
    entries = [(entry, level) for level, entries in enumerate(FLOORS) for entry in entries]
    fits = [(entry, level) for entry, level in entries if module == entry or module.startswith(entry + ".")]
    assert fits, f"{module} has no floor: give it one"
    entry, level = max(fits, key=lambda fit: len(fit[0]))
    assert entry != "runner" or module == "runner", f"{module} has no floor: give it one"
    return level, entry


def imports(path: Path) -> set[str]:
    """The project's modules that the file imports, wherever in it; those for the type checker alone left out."""
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    checked_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in checked_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules() else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.partition(".")[0] in ("runner", "models")}


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_one_way(module):
    level, entry = floor(module)
    for imported in imports(modules()[module]):
        other_level, other_entry = floor(imported)
        same_room = entry == other_entry and entry in LAYERED
        assert other_level < level or same_room, f"{module} imports {imported}, which is beside or above it"


@pytest.mark.parametrize("module", sorted(name for name in modules() if name.startswith("models")))
def test_networks_import_torch_alone(module):
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    roots = {n.module.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    roots |= {alias.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    assert roots <= {"torch", "torchvision", "models", *sys.stdlib_module_names}


def test_the_story_names_no_mode_no_precision_and_no_workload():
    story = (ROOT / "runner" / "train.py").read_text(encoding="utf-8")
    options = [
        path.stem for group in ("parallel", "workload", "precision") for path in (ROOT / "conf" / group).iterdir()
    ]
    assert [word for word in options if not word.isdigit() and f'"{word}"' in story] == []
    assert "isinstance" not in story


def test_composing_and_checking_a_config_needs_no_torch():
    program = """
import sys
from runner.system.lazy_import import import_lazily
import_lazily("torch", "torchvision")
sys.argv = ["runner", "batch_size=10", "accumulation.steps=3"]
from runner.__main__ import main
assert main() == 2
loaded = [name for name in ("torch._C", "torchvision.transforms", "numpy", "PIL.Image") if name in sys.modules]
assert not loaded, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "batch_size: got 10" in done.stderr
