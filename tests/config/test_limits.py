"""Tests of `runner.config.limits`: what is just outside the limits of an option is refused by its key."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from helpers.compose import option_content

from runner.config.errors import ConfigError
from runner.config.limits import Range, check_range
from runner.config.options import CONF
from runner.config.schema import field_types, load_class, option_fields, typed_values
from runner.run import Run

# The options, named as in `conf/`, that could give a wrong result in silence or waste a machine if they had no limits.
EXPECTED = {
    "seed": "a whole number ≥ 0 and ≤ 9223372036854775807",
    "batch_size": "a whole number ≥ 1 and ≤ 2147483647",
    "epochs": "a finite number > 0 and ≤ 1000000 or null",
    "max_grad_norm": "a finite number > 0 or null",
    "compile": "one of true, false, blocks, step",
    "accumulation/1.steps": "a whole number ≥ 1 and ≤ 2147483647 or auto",
    "data/digits.changed": "one of refuse, accept",
    "data/digits.holdout": "a finite number > 0 and ≤ 0.9",
    "data/imagefolder.timeout": "a finite number ≥ 1 and ≤ 86400",
    "ema/default.decay": "a finite number > 0 and < 1 or null",
    "model/convnet.dropout": "a finite number ≥ 0 and < 1",
    "model/qnet.hidden": "a list whose items are each a whole number ≥ 1 and ≤ 2147483647",
    "optimizer/adamw.beta1": "a finite number ≥ 0 and < 1",
    "optimizer/adamw.eps": "a finite number > 0 and ≤ 1",
    "optimizer/sgd.layer_decay": "a finite number > 0 and ≤ 1",
    "optimizer/sgd.lr": "a finite number > 0 and ≤ 1000",
    "optimizer/sgd.momentum": "a finite number ≥ 0 and ≤ 1",
    "optimizer/sgd.weight_decay": "a finite number ≥ 0 and ≤ 1000",
    "parallel/ddp.processes": "a whole number ≥ 1 and ≤ 4096 or auto",
    "parallel/ddp.timeout": "a finite number ≥ 1 and ≤ 86400",
    "parallel/pipeline.schedule": "one of gpipe, 1f1b, interleaved_1f1b, zero_bubble",
    "precision/16.init_scale": "a finite number > 0 and ≤ 4294967296",
    "schedule/cosine.final": "a finite number ≥ 0 and ≤ 1",
    "schedule/cosine.warmup": "a finite number ≥ 0 and < 1 or a whole number ≥ 0 and ≤ 2147483647",
    "schedule/plateau.gamma": "a finite number > 0 and < 1",
    "stop/default.target": "a finite number or null",
    "sweep/local.goal": "one of min, max or a list whose items are each one of min, max, null or null",
    "tracking/wandb.mode": "one of offline, online",
    "workload/classifier.label_smoothing": "a finite number ≥ 0 and < 1",
    "workload/dqn.discount": "a finite number ≥ 0 and ≤ 1",
    "workload/dqn.replay_ratio": "a finite number > 0 and ≤ 1000",
    "workload/dqn.target_tau": "a finite number > 0 and ≤ 1",
    "workload/regression.huber_delta": "a finite number > 0",
}


def components() -> Iterator[tuple[str, type]]:
    """Yield each class that a file in `conf/` names, after the group and the option; and `Run`, after an empty name."""
    yield "", Run
    for path in sorted(CONF.glob("*/[!_]*.yaml")):
        group, content = path.parent.name, option_content(path.parent.name, path.stem)
        target = content.get("_target_") or content.get(group, {}).get("_target_")
        if target is not None:
            yield f"{group}/{path.stem}.", load_class(target, object)


OPTIONS = {f"{name}{key}": (cls, key) for name, cls in components() for key in option_fields(cls)}


def outside(hint: Any) -> list[Any]:
    """Return values just outside the limits of a type; empty if it has none."""
    values: list[Any] = []
    kinds = get_args(hint) if get_origin(hint) in (Union, type(int | None)) else (hint,)
    for kind in kinds:
        if get_origin(kind) is Annotated:
            base, limits = get_args(kind)
            step = 1 if base is int else 1e-12
            values += [math.nan, math.inf, -math.inf] if base is float else []
            values += [end if base is float else int(end) for end in (limits.above, limits.below) if math.isfinite(end)]
            values += [limits.least - step] if math.isfinite(limits.least) else []
            values += [limits.most + step * max(1, abs(limits.most))] if math.isfinite(limits.most) else []
        elif get_origin(kind) in (tuple, list):
            values += [[value] for value in outside(get_args(kind)[0])]
        elif get_origin(kind) is Literal:
            values += ["none such", ""] if list in map(get_origin, kinds) else ["none such", "", [*get_args(kind)]]
    return values


def refusal(cls: type, key: str, value: Any) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        typed_values(cls, {key: value})
    return refused.value


@pytest.mark.parametrize("option", [name for name, (cls, key) in OPTIONS.items() if outside(field_types(cls)[key])])
def test_what_is_just_outside_the_limits_is_refused_by_its_key(option):
    cls, key = OPTIONS[option]
    for value in outside(field_types(cls)[key]):
        error = refusal(cls, key, value)
        assert (error.key, repr(error.got)) == (key, repr(value))
        assert "it must be" in error.why


@pytest.mark.parametrize("option", EXPECTED)
def test_an_option_has_these_limits(option):
    assert refusal(*OPTIONS[option], {}).why == f"it must be {EXPECTED[option]}"
    assert outside(field_types(OPTIONS[option][0])[OPTIONS[option][1]])


@pytest.mark.parametrize("value", [1.001, 2, 3, 1, 3.001, math.nan, math.inf, -math.inf, 10**400, -(10**400)])
def test_a_range_includes_some_ends(value):
    assert (value in Range(above=1, most=3)) == (value in (1.001, 2, 3))
    assert (value in Range(least=1, below=3)) == (value in (1, 1.001, 2))


def test_limits_that_depend_on_other_options_are_in_the_error():
    component = dataclasses.make_dataclass("C", ["x"])(4)
    check_range(component, "x", Range(most=4))
    with pytest.raises(ConfigError, match=re.escape("x: got 4: it must be a whole number ≥ 0 and ≤ 3")):
        check_range(component, "x", Range(least=0, most=3))


@pytest.mark.cases(
    ("optimizer/sgd.lr", "1e-3", 1e-3),
    ("accumulation/1.steps", "2", 2),
    ("compile", "true", True),
    ("compile", "step", "step"),
    ("model/resnet50.depth", "18", 18),
    ("sweep/local.goal", None, None),
)
def test_a_value_within_the_limits_is_converted_to_its_type(option, typed, value):
    cls, key = OPTIONS[option]
    known = {"lr": 1.0, "name": "a", "batch_size": 2, "root": "."}
    needed = {name: given for name, given in known.items() if name in option_fields(cls)}
    got = typed_values(cls, needed | {key: typed})[key]
    assert (got, type(got)) == (value, type(value))


@pytest.mark.cases(
    ("compile", "blok", "did you mean blocks?"),
    ("proof", "maybe", "choose from: auto, false, true"),
    ("optimizer/sgd.lr", "abc", "see the comments in conf/optimizer/sgd.yaml"),
    ("data/text.holdout", "x", "see the comments in conf/data/_tokens.yaml"),
    ("accumulation/1.steps", "x", "see the comments in conf/accumulation/"),
)
def test_an_error_names_similar_choices_or_the_file_of_the_option(option, typed, remedy):
    assert refusal(*OPTIONS[option], typed).remedy == remedy
