"""Tests of simulated pipelines: the order of the computations, and the bubble (the idle fraction)."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from runner.parallel.pipelining.simulation import simulate
from runner.parallel.pipelining.timeline import bubble

CASES = [
    *[("gpipe", n, n, m) for n, m in ((2, 1), (2, 8), (3, 5), (4, 4))],
    *[("1f1b", n, n, m) for n, m in ((2, 2), (2, 8), (3, 5), (4, 12))],
    *[("interleaved_1f1b", n, w, m) for n, w, m in ((4, 2, 4), (6, 2, 8), (8, 4, 8))],
    *[("zero_bubble", n, w, m) for n, w, m in ((2, 2, 4), (4, 2, 4), (4, 4, 8))],
]


def unit(schedule: str) -> dict[str, float]:
    return {"forward": 1.0, "backward": 1.0 if schedule == "zero_bubble" else 2.0, "weights": 1.0}


@pytest.mark.parametrize(("schedule", "stages", "workers", "micros"), CASES)
def test_each_stage_computes_each_micro_batch_once_and_in_order(
    schedule: str, stages: int, workers: int, micros: int
) -> None:
    spans = simulate(schedule, stages, workers, micros, lambda _, kind: unit(schedule)[kind])
    kinds = ("forward", "backward", "weights") if schedule == "zero_bubble" else ("forward", "backward")
    assert Counter((s.stage, s.kind, s.micro) for s in spans) == {
        (stage, kind, micro): 1 for stage in range(stages) for kind in kinds for micro in range(micros)
    }
    at = {(s.stage, s.kind, s.micro): s for s in spans}
    for (stage, kind, micro), span in at.items():
        if kind == "forward" and stage:
            assert span.start >= at[stage - 1, "forward", micro].stop
        if kind == "backward":
            after = (stage + 1, "backward", micro) if stage < stages - 1 else (stage, "forward", micro)
            assert span.start >= at[after].stop
        if kind == "weights":
            assert span.start >= at[stage, "backward", micro].stop
    for worker in range(workers):
        own = sorted((s.start, s.stop) for s in spans if s.stage % workers == worker)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(own)), "one thing at a time"


@pytest.mark.parametrize(("schedule", "stages", "workers", "micros"), [c for c in CASES if c[0] != "zero_bubble"])
def test_the_bubble_of_equal_stages_equals_the_theory(schedule: str, stages: int, workers: int, micros: int) -> None:
    rounds = stages // workers
    spans = simulate(schedule, stages, workers, micros, lambda _, kind: unit(schedule)[kind])
    found = bubble(spans, workers)
    assert found.theory == (workers - 1) / (rounds * micros + workers - 1)
    assert found.share == pytest.approx(found.theory)


def test_zero_bubble_has_less_than_half_the_bubble_of_1f1b() -> None:
    both = {
        name: bubble(simulate(name, 4, 4, 8, lambda _, kind, name=name: unit(name)[kind]), 4).share
        for name in ("1f1b", "zero_bubble")
    }
    assert both["zero_bubble"] < both["1f1b"] / 2


def test_the_slowest_stage_determines_the_time_of_a_step() -> None:
    slow = bubble(simulate("gpipe", 2, 2, 8, lambda stage, kind: unit("gpipe")[kind] * (1 + 2 * stage)), 2)
    assert slow.busy == [24.0, 72.0]
    assert slow.seconds == pytest.approx(1 + 72 + 2)
