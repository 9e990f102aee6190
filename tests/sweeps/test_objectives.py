"""Tests of the metrics by which the jobs of a sweep are compared."""

import math

import pytest

from runner.config.errors import ConfigError
from runner.sweeps.engines.local import Local
from runner.sweeps.objectives import Objective, objectives_of

ACCURACY = ("accuracy", "max")


@pytest.mark.parametrize("best", [True, False])
def test_the_value_is_the_best_or_the_last_one(best):
    result = {"metrics": {"eval/loss": 3, "lr": "NaN"}, "best": {"metric": "eval/loss", "value": 1.5, "step": 2}}
    assert Objective("eval/loss", "min", best).value(result) == (1.5 if best else 3.0)
    assert math.isnan(Objective("eval/f1", "max", best).value({"metrics": {"eval/f1": None}, "best": {}}))
    for tag, of, why in (("eval/los", result, "but eval/loss, lr;"), ("lr", result, "but"), ("x", {}, "but nothing;")):
        with pytest.raises(ConfigError, match=why) as refused:
            Objective(tag, "min", best).value(of)
        assert (refused.value.key, refused.value.got) == ("sweep.metric", tag)
    assert math.isnan(Objective("eval/los", "min", best).value(result, may_lack=True))


def test_throughput_step_time_and_memory_are_those_of_the_whole_run():
    result = {
        "samples_per_second": 9.5,
        "step_seconds": {"median": 0.5, "p90": 0.7},
        "peak_memory_bytes": 7,
        "tflops": 0,
    }
    tags = ("time/samples_per_second", "time/step_seconds", "memory/peak")
    assert [Objective(tag, "max", best=False).value(result) for tag in tags] == [9.5, 0.5, 7]
    with pytest.raises(ConfigError, match="do not measure it"):
        Objective("time/tflops", "max", best=False).value(result)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, {"eval/accuracy": "max"}),
        ({"metric": ["eval/accuracy", "time/tflops"]}, {"eval/accuracy": "max", "time/tflops": "max"}),
        ({"metric": ["memory/peak", "train/loss"], "goal": [None, "min"]}, {"memory/peak": "min", "train/loss": "min"}),
        ({"metric": ["eval/loss"], "goal": "min"}, {"eval/loss": "min"}),
        ({"metric": "eval/accuracy", "goal": ["min"]}, {"eval/accuracy": "min"}),
    ],
)
def test_each_metric_has_the_goal_that_is_typed_or_known(options, wanted):
    found = objectives_of(Local(**options), ACCURACY)
    assert {each.tag: each.goal for each in found} == wanted
    assert [each.best for each in found] == [not options] * len(wanted), "the last values of the tags that are named"


TWO = ["eval/accuracy", "eval/loss"]


@pytest.mark.parametrize(
    ("options", "key", "why"),
    [
        ({"metric": []}, "sweep.metric", "it has no tag"),
        ({"metric": ["eval/loss", ""]}, "sweep.metric", "an empty one"),
        ({"metric": ["eval/loss", "eval/loss"], "goal": ["min", "min"]}, "sweep.metric", "twice"),
        ({"metric": TWO}, "sweep.metric", "larger or smaller values of eval/loss are better"),
        ({"metric": [*TWO, "time/samples_per_secnd"]}, "sweep.metric", "smaller values of eval/loss are"),
        ({"metric": "time/samples_per_secnd", "goal": "max"}, "sweep.metric", "mean time/samples_per_second"),
        ({"metric": TWO, "goal": "min"}, "sweep.goal", "has 2 metrics"),
        ({"metric": TWO, "goal": ["max", "min", "min"]}, "sweep.goal", "has 2 metrics"),
        ({"goal": "max"}, "sweep.goal", "has no metrics"),
        ({"metric": TWO, "goal": ["max", "min"], "search": "tpe", "prune": "median"}, "sweep.prune", "several metrics"),
    ],
)
def test_metrics_that_cannot_be_compared_are_refused(options, key, why):
    with pytest.raises(ConfigError, match=why) as refused:
        objectives_of(Local(**options), ACCURACY)
    assert refused.value.key == key
