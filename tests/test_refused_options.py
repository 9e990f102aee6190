"""Tests that options of a component that do not fit together are refused by key."""

import math
from typing import Any

import pytest

from runner.config.errors import ConfigError
from runner.device import Device
from runner.optimizer import SGD
from runner.schedule import Step
from runner.stop import Stop

REFUSED: list[tuple[type, str, dict[str, Any]]] = [
    (Device, "index", {"index": 1, "indices": [2]}),
    (Device, "indices", {"indices": [0, 0]}),
    (SGD, "groups.head", {"lr": 0.1, "groups": {"head": 0.1}}),
    (SGD, "groups.a", {"lr": 0.1, "groups": {"a": {}}}),
    (SGD, "groups.a.lrr", {"lr": 0.1, "groups": {"a": {"lrr": 1}}}),
    (SGD, "groups.a.weight_decay", {"lr": 0.1, "groups": {"a": {"weight_decay": -1.0}}}),
    *((Step, "milestones", {"milestones": value}) for value in ((0.75, 0.5), (0.5, 30.0), (0.0,), (math.nan,))),
    (Stop, "patience", {"patience": 3}),
    (Stop, "target", {"target": 0.5}),
    (Stop, "metric", {"metric": "eval/loss"}),
    (Stop, "min_delta", {"metric": "eval/loss", "target": 0.5, "min_delta": 0.1}),
]


@pytest.mark.parametrize(("kind", "key", "options"), REFUSED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_options_that_do_not_fit_together_are_refused_by_key(kind, key, options):
    with pytest.raises(ConfigError) as refused:
        kind(**options)
    assert refused.value.key == key
