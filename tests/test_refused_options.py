"""Tests that options of a component that are out of range, or do not fit together, are refused by key."""

import math
from typing import Any

import pytest

from runner.batching import Accumulation
from runner.config.errors import ConfigError
from runner.device import Device
from runner.optimizer import SGD, Adam, Muon
from runner.precision import Float16
from runner.profiler import Trace
from runner.schedule import Cosine, OneCycle, Schedule, Step
from runner.stop import Stop

REFUSED: list[tuple[type, str, dict[str, Any]]] = [
    (Accumulation, "steps", {"steps": 0}),
    (Device, "index", {"kind": "cuda", "index": -1}),
    (Device, "index", {"index": 1, "indices": [2]}),
    (Device, "indices", {"indices": [0, 0]}),
    (Device, "threads", {"threads": 0}),
    (Adam, "beta1", {"lr": 0.1, "beta1": 1.0}),
    (Muon, "ns_steps", {"lr": 0.1, "ns_steps": 0}),
    (SGD, "layer_decay", {"lr": 0.1, "layer_decay": 1.5}),
    (SGD, "groups.head", {"lr": 0.1, "groups": {"head": 0.1}}),
    (SGD, "groups.a", {"lr": 0.1, "groups": {"a": {}}}),
    (SGD, "groups.a.lrr", {"lr": 0.1, "groups": {"a": {"lrr": 1}}}),
    (SGD, "groups.a.weight_decay", {"lr": 0.1, "groups": {"a": {"weight_decay": -1.0}}}),
    (Float16, "init_scale", {"init_scale": 0.0}),
    (Float16, "growth_interval", {"growth_interval": 0}),
    *((Trace, key, {key: value}) for key, value in (("wait", -1), ("warmup", -1), ("active", 0))),
    *((Schedule, "warmup", {"warmup": value}) for value in (-0.1, 1.1, math.nan)),
    (Cosine, "final", {"final": 2.0}),
    (OneCycle, "rise", {"rise": 1.0}),
    (OneCycle, "final_div", {"final_div": 0.0}),
    (Step, "gamma", {"gamma": 1.5}),
    *((Step, "milestones", {"milestones": value}) for value in ((0.75, 0.5), (0.5, 30.0), (0.0,), (math.nan,))),
    (Stop, "patience", {"patience": 3}),
    (Stop, "target", {"target": 0.5}),
    (Stop, "metric", {"metric": "eval/loss"}),
    (Stop, "target", {"metric": "eval/loss", "target": math.nan}),
    (Stop, "min_delta", {"metric": "eval/loss", "target": 0.5, "min_delta": 0.1}),
    (Stop, "min_delta", {"metric": "eval/loss", "patience": 1, "min_delta": -0.1}),
    (Stop, "max_time", {"max_time": 0}),
]


@pytest.mark.parametrize(("kind", "key", "options"), REFUSED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_options_out_of_range_are_refused_by_key(kind, key, options):
    with pytest.raises(ConfigError) as refused:
        kind(**options)
    assert refused.value.key == key
