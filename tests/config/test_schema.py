"""Tests of `runner.config.schema`, which builds components from YAML nodes: conversions and errors."""

import enum
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Optional

import pytest
from helpers.command import ROOT, run_program
from helpers.compose import compose_config
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from runner.config.errors import ABSENT, ConfigError
from runner.config.limits import Range
from runner.config.schema import build
from runner.run import build_run

# Overrides, separated by two spaces: the beginning of the error message, and texts that it contains. Errors in parsing,
# and misspelled keys and options, are in tests/commands/test_train.py.
REFUSED: dict[str, tuple[str, ...]] = {
    # Wrong type
    "optimizer.lr=abc": ("optimizer.lr: got 'abc'", "number"),
    "optimizer.fused=3": ("optimizer.fused: got 3", "true or false"),
    "batch_size=1.5": ("batch_size: got 1.5", "whole number"),
    "steps=1e3": ("steps: got 1000.0", "whole number", "null"),
    "seed=0x10": ("seed: got '0x10'", "whole number"),
    "name=null": ("name: got null", "text"),
    "model.channels=20": ("model.channels: got 20", "list", "whole number"),
    # Values that OmegaConf would convert to other values
    "seed='1_000'": ("seed: got '1_000'", "whole number"),
    "optimizer.lr=012.5": ("optimizer.lr: got '012.5'", "number"),
    "name=1.10": ("name: got 1.1", "text"),
    "model.channels=[020,20]": ("model.channels: got ['020', 20]", "list", "whole number"),
    "model.weights=''": ("model.weights: got ''", "not empty"),
    # Out of range
    "optimizer.lr=0": ("optimizer.lr: got 0", "> 0", "≤ 1000"),
    "device.kind=gpu": ("device.kind: got 'gpu'", "auto, cpu, cuda, mps"),
    # Incompatible values
    "batch_size=63  accumulation.steps=4": ("batch_size: got 63", "batch_size=60", "batch_size=64"),
    "optimizer.nesterov=true  optimizer.momentum=0": ("optimizer.nesterov: got True", "optimizer.momentum=0.9"),
    "device.kind=cpu  device.index=3": ("device.index: got 3", "cpu"),
    "model.reset_head=true": ("model.reset_head: got True", "model.weights"),
    # Names and paths
    "name='  '": ("name: got '  '", "directory"),
    "name=../x": ("name: got '../x'", "directory"),
    f"name='{'ü' * 101}'": ("name: got 'ü", "too long"),
    "output_root='a\nb'": ("output_root: got 'a\\nb'", "output_root=."),
    # Classes
    "optimizer._target_=os.system": ("optimizer._target_: got 'os.system'", "runner.components"),
    "optimizer._target_=runnerx.SGD": ("optimizer._target_: got 'runnerx.SGD'", "runner.components"),
    "optimizer._target_=runner.optimizer.torch": ("optimizer._target_: got 'runner.optimizer.torch'", "it is not a"),
    "optimizer._target_=runner.nope.SGD": ("optimizer._target_: got 'runner.nope.SGD'", "'runner.nope'"),
    "optimizer._target_=SGD": ("optimizer._target_: got 'SGD'", "package.module.Class"),
    "workload._target_=runner.workloads.supervised.SupervisedWorkload": (
        "workload._target_: got 'runner.workloads.supervised.SupervisedWorkload'",
        "criterion",
    ),
    # Whole nodes
    "optimizer=3": ("optimizer: got 3", "conf/"),
    "code=0": ("code: got 0", "it must be a mapping"),
    "+optimizer.lrr=1": ("optimizer.lrr", "SGD", "lr?"),
}


def typed(line: str) -> dict[str, Any]:
    """Return the default config, changed by the overrides in `line`, which are parsed by Hydra.

    Two spaces separate the overrides. A line that contains the value `'  '` (two spaces in single quotes) is not split:
    the whole line is one override.
    """
    found = OmegaConf.create(compose_config())
    for override in OverridesParser.create().parse_overrides(line.split("  ") if "'  '" not in line else [line]):
        OmegaConf.update(found, override.key_or_group, override.value(), merge=False, force_add=True)
    return OmegaConf.to_container(found)


@pytest.mark.parametrize("line", REFUSED)
def test_an_invalid_value_is_refused_by_its_key(line):
    with pytest.raises(ConfigError) as refusal:
        build_run(typed(line))
    begins, *words = REFUSED[line]
    message = str(refusal.value)
    assert message.startswith(begins if begins.endswith("ü") else f"{begins}:")
    assert refusal.value.key == begins.partition(":")[0]
    for word in words:
        assert word in message
    assert len(message.splitlines()) == 2, "what is wrong, and what to do"


@pytest.mark.cases(
    ("optimizer.lr=1", "optimizer.lr", 1.0),
    ("optimizer.lr='0.5'", "optimizer.lr", 0.5),
    ("optimizer.fused=1", "optimizer.fused", True),
    ("optimizer.fused=no", "optimizer.fused", False),
    ("batch_size='32'", "batch_size", 32),
    ("name=3", "name", "3"),
    ("steps=null  epochs=0.5", "steps", None),
    ("model.channels=[3,4,5]", "workload.model.channels", (3, 4, 5)),
    ("device.indices=[0,1]", "device.indices", [0, 1]),
    ("name='ü ö=,'", "name", "ü ö=,"),
)
def test_a_valid_value_is_converted_to_its_type(line, where, value):
    found: Any = build_run(typed(line))
    for name in where.split("."):
        found = getattr(found, name)
    assert (found, type(found)) == (value, type(value))


def test_a_missing_value_and_a_missing_group_are_refused_by_key():
    node = compose_config()
    del node["optimizer"]["lr"]
    with pytest.raises(ConfigError) as refusal:
        build_run(node)
    assert (refusal.value.key, refusal.value.got) == ("optimizer.lr", ABSENT)
    del node["optimizer"]
    with pytest.raises(ConfigError) as refusal:
        build_run(node)
    assert (refusal.value.key, refusal.value.got) == ("optimizer", None)
    assert "conf/optimizer/" in refusal.value.remedy


@dataclass
class Part:
    """The base class of a config group."""


@dataclass
class Whole(Part):
    """A component with a field of every kind."""

    part: Part
    number: Annotated[float, Range(least=0)]
    numbers: tuple[float, ...] = (1.0,)
    names: list[str] = field(default_factory=list)
    text: str | None = None
    made: int = field(default=3, init=False)
    constant: ClassVar[int] = 4


def whole(**values: Any) -> Part:
    return build({"_target_": "runner.tests.Whole", **values}, Part, "whole", part=Part())


@pytest.fixture(autouse=True)
def _whole_can_be_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "runner.tests", sys.modules[__name__])


def test_build_converts_values_fills_in_defaults_and_passes_parts_on():
    part = Part()
    node = {"_target_": "runner.tests.Whole", "number": 2, "numbers": [1, 2]}
    built = build(node, Part, "whole", part=part, other=Part())
    assert built == Whole(part, 2.0, (1.0, 2.0))
    assert (type(built.number), type(built.numbers)) == (float, tuple)
    assert built.part is part
    assert built.names is not whole(number=1).names
    assert node["number"] == 2, "the config is left as it was"


@pytest.mark.cases(
    ({"number": 1, "names": ["a", 10]}, "whole.names: got ['a', 10]: it must be a list"),
    ({"number": 1, "part": {}}, "whole.part: Whole has no such option"),
    ({"number": 1, "made": 1}, "whole.made: Whole has no such option"),
    ({"number": 1, "constant": 1}, "whole.constant: Whole has no such option"),
    ({"number": "???"}, "whole.number: it has no value"),
)
def test_build_refuses_wrong_types_unknown_keys_and_missing_values(values, told):
    with pytest.raises(ConfigError) as refusal:
        whole(**values)
    assert str(refusal.value).startswith(told)


@pytest.mark.parametrize("value", ["${oc.env:MINE}", ["${oc.env:MINE}"]])
def test_an_error_does_not_contain_the_value_of_an_environment_variable(value, monkeypatch):
    monkeypatch.setenv("MINE", "hunter2")
    with pytest.raises(ConfigError, match="its value has a wrong type, or is out of range") as refusal:
        whole(number=1, numbers=value)
    assert (refusal.value.key, refusal.value.got) == ("whole.numbers", value)
    assert "it must be a list" in refusal.value.remedy
    assert "hunter2" not in str(refusal.value)


class Color(enum.Enum):
    RED = 1


@dataclass
class Other(Part):
    """A component with fields of types that this project does not use."""

    path: Path
    color: Color = Color.RED
    anything: tuple = ()
    maybe: Optional[int] = None  # noqa: UP045


def test_components_of_others_may_have_paths_enums_and_bare_tuples():
    node = {"_target_": "runner.tests.Other", "path": "a/b", "color": "RED", "anything": [1, "a"], "maybe": "3"}
    assert build(node, Part, "other") == Other(Path("a/b"), Color.RED, (1, "a"), 3)
    with pytest.raises(ConfigError) as refusal:
        build(node | {"color": "BLUE"}, Part, "other")
    assert (refusal.value.key, refusal.value.got) == ("other.color", "BLUE")


def test_references_to_environment_variables_are_resolved_and_converted(monkeypatch):
    monkeypatch.setenv("MINE", "2")
    monkeypatch.setenv("LIST", "[1,2]")
    built = whole(number="${oc.env:MINE}", numbers="${oc.decode:${oc.env:LIST}}")
    assert built == Whole(Part(), 2.0, (1.0, 2.0))


@pytest.fixture
def plugin(tmp_path, monkeypatch) -> Path:
    """Create an importable package `plugin` without an entry point, and return its directory."""
    shutil.copy(ROOT / "tests" / "helpers" / "plugin_component.py", tmp_path / "plugin.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "plugin", raising=False)
    return tmp_path


def test_a_package_without_an_entry_point_is_not_even_imported(plugin):
    with pytest.raises(ConfigError) as refusal:
        build_run(typed("optimizer._target_=plugin.PluginSGD"))
    assert (refusal.value.key, refusal.value.got) == ("optimizer._target_", "plugin.PluginSGD")
    assert "runner.components" in refusal.value.remedy
    assert not (plugin / "ran").exists()


def test_a_package_is_trusted_through_its_entry_point(plugin):
    (plugin / "plugin-1.dist-info").mkdir()
    (plugin / "plugin-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (plugin / "plugin-1.dist-info" / "entry_points.txt").write_text("[runner.components]\nplugin = plugin\n")
    run = build_run(typed("optimizer._target_=plugin.PluginSGD  +optimizer.extra=8"))
    assert (type(run.optimizer).__name__, run.optimizer.extra) == ("PluginSGD", 8)


def test_the_config_package_imports_neither_torch_nor_hydra():
    done = run_program("imported_by", "runner.config.schema", "runner.config.options")
    imported = set(done.stdout.split())
    assert {"runner.config.schema", "omegaconf"} <= imported
    assert not imported & {"torch", "hydra", "numpy"}
