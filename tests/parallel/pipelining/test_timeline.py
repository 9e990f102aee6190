"""Tests of the bubble (the idle fraction) of known spans, and of the spans that a `Timeline` records."""

from __future__ import annotations

import pytest
import torch

from runner.parallel.pipelining.timeline import Span, Timeline, bubble

CPU = torch.device("cpu")


def gpipe(num_stages: int, num_micros: int, forward: list[float], backward: list[float]) -> list[Span]:
    """Return the spans of a GPipe schedule in which each span starts as early as possible.

    Args:
        num_stages: number of stages.
        num_micros: number of micro-batches.
        forward: for each stage, the seconds of the forward pass of one micro-batch.
        backward: for each stage, the seconds of the backward pass of one micro-batch.
    """
    spans: list[Span] = []
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * num_stages
    for kind, seconds, order in (
        ("forward", forward, range(num_stages)),
        ("backward", backward, range(num_stages)[::-1]),
    ):
        before = 0 if kind == "forward" else 1
        for micro in range(num_micros):
            for stage in order:
                needs = done.get((kind, stage - 1 + 2 * before, micro), 0.0)
                start = max(free[stage], needs)
                free[stage] = done[kind, stage, micro] = start + seconds[stage]
                spans.append(Span(stage, kind, micro, start, free[stage]))
    return spans


@pytest.mark.parametrize(("stages", "micros"), [(2, 1), (2, 8), (3, 5), (4, 4)])
def test_the_bubble_of_equal_stages_equals_the_theory(stages: int, micros: int) -> None:
    found = bubble(gpipe(stages, micros, [1.0] * stages, [2.0] * stages), stages)
    assert found.theory == (stages - 1) / (micros + stages - 1)
    assert found.share == pytest.approx(found.theory)
    assert found.bound == pytest.approx(found.theory), "no schedule does better with stages that are whole"
    assert found.seconds == pytest.approx(3 * (micros + stages - 1))
    assert found.busy == [3.0 * micros] * stages


def test_the_slowest_stage_determines_the_bound() -> None:
    found = bubble(gpipe(2, 4, [1.0, 3.0], [2.0, 4.0]), 2)
    assert found.busy == [12.0, 28.0]
    assert found.least == 1 + 28 + 2, "the second stage's work, behind the first's and before it"
    assert found.seconds >= found.least
    assert found.share == pytest.approx(1 - 40 / (2 * found.seconds))
    assert found.bound == pytest.approx(1 - 40 / 62)


def test_the_bound_assumes_that_gradients_of_weights_are_computed_last() -> None:
    spans = [
        Span(0, "forward", 0, 0, 1),
        Span(1, "forward", 0, 1, 2),
        Span(1, "backward", 0, 2, 3),
        Span(0, "backward", 0, 3, 4),
        Span(1, "weights", 0, 3, 5),
        Span(0, "weights", 0, 4, 5),
    ]
    found = bubble(spans, 2)
    assert found.least == 5.0, "1 before, 4 of its own; the other's backward pass is meanwhile"
    assert found.seconds == 5.0
    assert found.bound == found.share == pytest.approx(0.3)


def test_the_busy_time_of_a_worker_includes_all_of_its_stages() -> None:
    spans = [Span(stage, "forward", micro, stage + micro, stage + micro + 1) for stage in range(4) for micro in (0, 2)]
    found = bubble([*spans, Span(0, "forward", 3, 9, 10)], 2)
    assert found.busy == [5.0, 4.0]
    assert found.theory == 1 / (2 * 4 + 1)


def test_scalars_name_every_worker() -> None:
    found = bubble(gpipe(2, 4, [1.0, 3.0], [2.0, 4.0]), 2)
    scalars = found.scalars()
    assert scalars["pipeline/worker_0_idle"] == pytest.approx(found.seconds - 12)
    assert scalars.keys() == {
        *("pipeline/bubble", "pipeline/bubble_theory", "pipeline/bubble_bound"),
        *("pipeline/worker_0_busy", "pipeline/worker_0_idle", "pipeline/worker_1_busy", "pipeline/worker_1_idle"),
    }


def test_a_timeline_records_while_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((10.0, 10.5, 12.0))  # time zero, and the start and stop of a computation
    monkeypatch.setattr("runner.parallel.pipelining.timeline.time.perf_counter", lambda: next(seconds))
    timeline, waited = Timeline([CPU, CPU]), []
    with timeline.span(0, "forward", 0, CPU):
        pass
    assert timeline.take() == []

    timeline.begin(lambda: waited.append(True))
    with timeline.span(1, "backward", 3, CPU):
        pass
    timeline.end()
    with timeline.span(0, "forward", 0, CPU):
        pass
    assert timeline.take() == [Span(1, "backward", 3, 0.5, 2.0)]
    assert waited == [True]
    assert timeline.take() == [], "once"
