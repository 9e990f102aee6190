"""From a YAML node to a component: what is taken, and what is refused in which words."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from helpers.command import environment
from helpers.compose import composed
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from runner.config import schema as config
from runner.config.errors import ABSENT, ConfigError, check_choice, check_range, did_you_mean, errors_under
from runner.config.schema import build
from runner.run import build_run

# What is typed, in place of the default: what the refusal must say. The mistakes that only the parser sees, and those
# in the names of keys and options, are in tests/test_cli.py.
REFUSED = {
    # Another type
    "optimizer.lr=abc": "optimizer.lr: got 'abc': it must be a number",
    "optimizer.lr=": "optimizer.lr: got '': it must be a number",
    "optimizer.lr=null": "optimizer.lr: got null: it must be a number",
    "optimizer.lr=true": "optimizer.lr: got True: it must be a number",
    "optimizer.lr=[1]": "optimizer.lr: got [1]: it must be a number",
    "optimizer.lr={a:1}": "optimizer.lr: got {'a': 1}: it must be a number",
    "optimizer.fused=maybe": "optimizer.fused: got 'maybe': it must be true or false",
    "optimizer.fused=3": "optimizer.fused: got 3: it must be true or false",
    "optimizer.fused=0.5": "optimizer.fused: got 0.5: it must be true or false",
    "optimizer.fused=null": "optimizer.fused: got null: it must be true or false",
    "deterministic=[true]": "deterministic: got [True]: it must be true or false",
    "batch_size=1.5": "batch_size: got 1.5: it must be a whole number",
    "batch_size=64.0": "batch_size: got 64.0: it must be a whole number",
    "batch_size=": "batch_size: got '': it must be a whole number",
    "batch_size=abc": "batch_size: got 'abc': it must be a whole number",
    "batch_size=null": "batch_size: got null: it must be a whole number",
    "batch_size=true": "batch_size: got True: it must be a whole number",
    "steps=1e3": "steps: got 1000.0: it must be a whole number or null",
    "epochs=many": "epochs: got 'many': it must be a number or null",
    "seed=0x10": "seed: got '0x10': it must be a whole number",
    "name=null": "name: got null: it must be a text",
    "name=[1]": "name: got [1]: it must be a text",
    "device.indices=3": "device.indices: got 3: it must be a list whose items are each a whole number",
    "device.indices=[a]": "device.indices: got ['a']: it must be a list whose items are each a whole number",
    "model.channels=20": "model.channels: got 20: it must be a list whose items are each a whole number",
    # Out of range
    "optimizer.lr=-1": "optimizer.lr: got -1.0: it must be a finite number > 0 and ≤ 1000",
    "optimizer.lr=0": "optimizer.lr: got 0.0: it must be a finite number > 0 and ≤ 1000",
    "optimizer.lr=1e30": "optimizer.lr: got 1e+30: it must be a finite number > 0 and ≤ 1000",
    "optimizer.lr=nan": "optimizer.lr: got nan: it must be a finite number",
    "optimizer.lr=inf": "optimizer.lr: got inf: it must be a finite number",
    "optimizer.lr=-inf": "optimizer.lr: got -inf: it must be a finite number",
    "optimizer.momentum=1.1": "optimizer.momentum: got 1.1: it must be a finite number ≥ 0 and ≤ 1",
    "schedule.rise=0": "schedule.rise: got 0.0: it must be a finite number > 0 and ≤ 0.99",
    "batch_size=0": "batch_size: got 0: it must be a finite number ≥ 1 and ≤ 2147483647",
    "batch_size=-5": "batch_size: got -5: it must be a finite number ≥ 1",
    "batch_size=99999999999": "batch_size: got 99999999999: it must be a finite number ≥ 1 and ≤ 2147483647",
    "accumulation.steps=0": "accumulation.steps: got 0: it must be a finite number ≥ 1",
    "steps=0": "steps: got 0: it must be a finite number ≥ 1 and ≤ 2147483647",
    "epochs=-1": "epochs: got -1.0: it must be a finite number > 0 and ≤ 1000000",
    "epochs=0": "epochs: got 0.0: it must be a finite number > 0 and ≤ 1000000",
    "epochs=1e300": "epochs: got 1e+300: it must be a finite number > 0 and ≤ 1000000",
    "epochs=nan": "epochs: got nan: it must be a finite number",
    "keep=-1": "keep: got -1: it must be a finite number ≥ 0",
    "seed=-1": "seed: got -1: it must be a finite number ≥ 0 and ≤ 9223372036854775807",
    "seed=99999999999999999999": "seed: got 99999999999999999999: it must be a finite number ≥ 0",
    "log_every=0": "log_every: got 0: it must be a finite number ≥ 1",
    "eval_every=-1": "eval_every: got -1: it must be a finite number ≥ 0",
    "save_every=-1": "save_every: got -1: it must be a finite number ≥ 0",
    "max_grad_norm=0": "max_grad_norm: got 0.0: it must be a finite number > 0",
    "max_grad_norm=inf": "max_grad_norm: got inf: it must be a finite number > 0",
    "device.threads=0": "device.threads: got 0: it must be a finite number ≥ 1 and ≤ 1024",
    "data.size=3": "data.size: got 3: it must be a finite number ≥ 8 and ≤ 512",
    "device.kind=gpu": "device.kind: got 'gpu': it must be one of auto, cpu, cuda, mps",
    # Two that do not go together
    "steps=null  epochs=null": "steps: got null: neither steps nor epochs says how long to train",
    "accumulation.steps=5": "batch_size: got 64: it does not divide into 5 micro-batches",
    "accumulation.steps=128": "the nearest that do: batch_size=128",
    "batch_size=63  accumulation.steps=4": "the nearest that do: batch_size=60 or batch_size=64",
    "optimizer.nesterov=true  optimizer.momentum=0": "optimizer.nesterov: got True",
    "device.kind=cpu  device.index=3": "device.index: got 3: device=cpu has no numbered devices",
    "model.reset_head=true": "model.reset_head: got True: without weights every layer is fresh",
    # Names and paths
    "name=": "name: got '': it becomes a directory's name",
    "name='  '": "name: got '  ': it becomes a directory's name",
    "name=.": "name: got '.': it becomes",
    "name=..": "name: got '..': it becomes",
    "name=../x": "name: got '../x': it becomes",
    "name=a/b": "name: got 'a/b': it becomes",
    "name='a\\\\b'": "it becomes a directory's name",
    "name='a\tb'": "name: got 'a\\tb': it becomes",
    f"name='{'ü' * 101}'": "it is too long for a directory",
    "output_root=": "output_root: got '': it is no path",
    "output_root='a\nb'": "output_root: got 'a\\nb': it is no path",
    "model.weights=/nowhere.pt": "model.weights: got '/nowhere.pt': there is no such file",
    # Code
    "optimizer._target_=os.system": "optimizer._target_: got 'os.system': only classes of these packages",
    "optimizer._target_=torch.load": "optimizer._target_: got 'torch.load': only classes of these packages",
    "optimizer._target_=builtins.eval": "optimizer._target_: got 'builtins.eval': only classes of these packages",
    "optimizer._target_=runnerx.SGD": "optimizer._target_: got 'runnerx.SGD': only classes of these packages",
    "optimizer._target_=runner.schedule.Schedule": "it is not a runner.optimizer.Optimizer",
    "optimizer._target_=runner.optimizer.trainable": "it is not a runner.optimizer.Optimizer",
    "optimizer._target_=runner.optimizer.torch": "it is not a runner.optimizer.Optimizer",
    "optimizer._target_=runner.optimizer.SGDD": "it is not a runner.optimizer.Optimizer",
    "optimizer._target_=runner.nope.SGD": "No module named 'runner.nope'",
    "optimizer._target_=": "optimizer._target_: got '': it must name a class",
    "optimizer._target_=SGD": "optimizer._target_: got 'SGD': it must name a class",
    "optimizer._target_=null": "optimizer._target_: got null: it must name a class",
    "optimizer._target_=3": "optimizer._target_: got 3: it must name a class",
    "optimizer._target_=[a.b]": "optimizer._target_: got ['a.b']: it must name a class",
    # Whole nodes
    "optimizer=3": "optimizer: got 3: nothing is chosen",
    "model=[]": "model: got []: nothing is chosen",
    "+seeed=1": "seeed: there is no such key;\n  did you mean seed",
    "+optimizer.lrr=1": "optimizer.lrr: SGD has no such option;\n  did you mean lr?",
    "+parallel.foo=1": "parallel.foo: Parallel has no such option;\n  it has none",
}


def typed(line: str) -> dict[str, Any]:
    """The default config with the overrides in `line`, apart by two blanks, read as Hydra reads them."""
    found = OmegaConf.create(composed())
    for override in OverridesParser.create().parse_overrides(line.split("  ") if "'  '" not in line else [line]):
        OmegaConf.update(found, override.key_or_group, override.value(), merge=False, force_add=True)
    return OmegaConf.to_container(found)


@pytest.mark.parametrize("line", REFUSED)
def test_a_value_that_cannot_be_is_refused(line: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_run(typed(line))
    told = str(refusal.value)
    assert REFUSED[line] in told
    assert len(told.splitlines()) == 2, "what is wrong; and what to do"


@pytest.mark.parametrize(
    ("line", "where", "value"),
    [
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
    ],
)
def test_a_value_that_can_be_arrives_in_its_type(line: str, where: str, value: object) -> None:
    found: Any = build_run(typed(line))
    for name in where.split("."):
        found = getattr(found, name)
    assert (found, type(found)) == (value, type(value))


def test_a_missing_value_and_a_missing_group_are_told() -> None:
    node = composed()
    del node["optimizer"]["lr"]
    with pytest.raises(ConfigError, match=r"optimizer\.lr: it has no value"):
        build_run(node)
    del node["optimizer"]
    with pytest.raises(ConfigError, match=r"optimizer: got null: nothing is chosen\n.*conf/optimizer/"):
        build_run(node)


# ---------------------------------------------------------------------------------------------------------------------
# The builder


@dataclass
class Part:
    """Stands for the class of a room."""


@dataclass
class Whole(Part):
    """A component with one of every kind of field."""

    part: Part
    number: float
    numbers: tuple[float, ...] = (1.0,)
    names: list[str] = field(default_factory=list)
    text: str | None = None
    made: int = field(default=3, init=False)
    constant: ClassVar[int] = 4

    def __post_init__(self) -> None:
        check_range(self, "number", least=0)


@dataclass
class Special(Whole):
    number: float = 0.5  # a default of its own, in the place of its base's


def whole(**values: Any) -> Part:
    return build({"_target_": "runner.tests.Whole", **values}, Part, "whole", part=Part())


@pytest.fixture(autouse=True)
def _whole_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "runner.tests", sys.modules[__name__])


def test_values_are_converted_defaults_filled_in_and_parts_handed_over() -> None:
    part = Part()
    node = {"_target_": "runner.tests.Whole", "number": 2, "numbers": [1, 2]}
    built = build(node, Part, "whole", part=part, other=Part())
    assert built == Whole(part, 2.0, (1.0, 2.0))
    assert (type(built.number), type(built.numbers)) == (float, tuple)
    assert built.part is part
    assert built.names is not whole(number=1).names
    assert node["number"] == 2, "the config is left as it was"


def test_fields_are_values_or_components() -> None:
    assert config.option_fields(Whole) == ["number", "numbers", "names", "text"]
    assert config.component_fields(Whole) == ["part"]
    assert config.field_types(Special)["number"] is float
    assert config.option_fields(Special) == config.option_fields(Whole)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"number": -1}, "whole.number: got -1.0: it must be a finite number ≥ 0"),
        (
            {"number": 1, "numbers": [1, "a"]},
            "whole.numbers: got [1, 'a']: it must be a list whose items are each a number",
        ),
        ({"number": 1, "names": "a"}, "whole.names: got 'a': it must be a list whose items are each a text"),
        ({"number": 1, "text": [1]}, "whole.text: got [1]: it must be a text or null"),
        ({"number": 1, "part": {}}, "whole.part: Whole has no such option"),
        ({"number": 1, "made": 1}, "whole.made: Whole has no such option"),
        ({"number": 1, "constant": 1}, "whole.constant: Whole has no such option"),
        ({}, "whole.number: it has no value"),
        ({"number": "???"}, "whole.number: it has no value"),
    ],
)
def test_the_builder_is_strict(values: dict, told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        whole(**values)
    assert str(refusal.value).startswith(told)


def test_errors_carry_the_way_to_their_key() -> None:
    with pytest.raises(ConfigError) as refusal, errors_under("a"), errors_under("b"):
        raise ConfigError("c", 1, "no", "yes")
    assert (refusal.value.key, str(refusal.value)) == ("a.b.c", "a.b.c: got 1: no\n  yes")


def test_what_was_got_is_shown_short() -> None:
    assert str(ConfigError("key", None, "why", "do")) == "key: got null: why\n  do"
    assert str(ConfigError("key", ABSENT, "why", "do")) == "key: why\n  do"
    shown = str(ConfigError("key", "x" * 1000, "why", "do"))
    assert len(shown.splitlines()[0]) < 100
    assert "x…: why" in shown


@pytest.mark.parametrize("value", [1, 1.0, None, 2, 3])
def test_a_range_holds_its_ends_and_null(value: float | None) -> None:
    check_range(dataclasses.make_dataclass("C", ["x"])(value), "x", least=1, most=3)


@pytest.mark.parametrize("value", [0.999, 3.001, math.nan, math.inf, -math.inf])
def test_a_range_holds_nothing_else(value: float) -> None:
    with pytest.raises(ConfigError, match="≥ 1 and ≤ 3"):
        check_range(dataclasses.make_dataclass("C", ["x"])(value), "x", least=1, most=3)


def test_an_open_end_is_outside() -> None:
    with pytest.raises(ConfigError, match="> 0"):
        check_range(dataclasses.make_dataclass("C", ["x"])(0), "x", above=0)


def test_a_choice_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as refusal:
        check_choice(dataclasses.make_dataclass("C", ["x"])("gruop"), "x", ("batch", "group"))
    assert refusal.value.why == "it must be one of batch, group"
    assert refusal.value.remedy == "did you mean group?"


def test_did_you_mean() -> None:
    assert did_you_mean("lrr", ["lr", "momentum"]) == "did you mean lr?"
    assert did_you_mean("LR", ["lr"]) == "did you mean lr?"
    assert did_you_mean("lrr", ["lr"], "optimizer.") == "did you mean optimizer.lr?"
    assert did_you_mean("xyz", ["b", "a"]) == "choose from: a, b"
    assert did_you_mean("xyz", []) == "it has none"


# ---------------------------------------------------------------------------------------------------------------------
# Whose code may be named

PLUGIN = """
import pathlib
from dataclasses import dataclass
from runner.optimizer import SGD
pathlib.Path(__file__).with_name("ran").touch()
@dataclass
class Mine(SGD):
    extra: int = 7
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `plugin`, importable, that declares nothing."""
    (tmp_path / "plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "plugin", raising=False)
    return tmp_path


def test_a_package_that_declares_nothing_is_not_even_imported(plugin: Path) -> None:
    with pytest.raises(ConfigError, match="only classes of these packages may be named: runner"):
        build_run(typed("optimizer._target_=plugin.Mine"))
    assert not (plugin / "ran").exists()


def test_a_package_joins_through_its_entry_point(plugin: Path) -> None:
    (plugin / "plugin-1.dist-info").mkdir()
    (plugin / "plugin-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (plugin / "plugin-1.dist-info" / "entry_points.txt").write_text("[runner.components]\nplugin = plugin\n")
    run = build_run(typed("optimizer._target_=plugin.Mine  +optimizer.extra=8"))
    assert (type(run.optimizer).__name__, run.optimizer.extra) == ("Mine", 8)


def test_configs_need_neither_torch_nor_hydra() -> None:
    code = "import sys, runner.config; sys.exit(any(name in sys.modules for name in ('torch', 'hydra', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0
