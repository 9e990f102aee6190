"""Tests of the bubble (the idle fraction) and the picture of known spans, and of what a `Timeline` records."""

import itertools

import pytest
import torch

from runner.parallel.pipelining.timeline import COLORS, Span, Timeline, bubble, gantt

CPU = torch.device("cpu")


def gpipe(num_stages: int, num_micros: int, forward: list[float], backward: list[float]) -> list[Span]:
    """Return the spans of a GPipe schedule whose stages start as early as they can, given the seconds of each."""
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
def test_the_bubble_of_equal_stages_equals_the_theory(stages, micros):
    found = bubble(gpipe(stages, micros, [1.0] * stages, [2.0] * stages), stages)
    theory = (stages - 1) / (micros + stages - 1)
    for which in ("", "_theory", "_bound"):  # no schedule does better with stages that are whole
        assert found.pop(f"pipeline/bubble{which}") == pytest.approx(theory)
    for worker in range(stages):
        assert found.pop(f"pipeline/worker_{worker}_busy") == 3 * micros
        assert found.pop(f"pipeline/worker_{worker}_idle") == pytest.approx(3 * (stages - 1))
    assert not found


def test_the_slowest_stage_determines_the_bound():
    found = bubble(gpipe(2, 4, [1.0, 3.0], [2.0, 4.0]), 2)
    assert [found[f"pipeline/worker_{worker}_busy"] for worker in (0, 1)] == [12.0, 28.0]
    seconds = 12.0 + found["pipeline/worker_0_idle"]
    assert found["pipeline/bubble"] == pytest.approx(1 - 40 / (2 * seconds))
    least = 1 + 28 + 2  # the second stage's work, behind the first's and before it
    assert seconds >= least
    assert found["pipeline/bubble_bound"] == pytest.approx(1 - 40 / (2 * least))


def test_the_bound_assumes_that_gradients_of_weights_are_computed_last():
    """The bound is 1 s before the second worker's work, and 4 s of its work; the other's backward pass is meanwhile."""
    forward, backward = [(0, 0, 1), (1, 1, 2)], [(1, 2, 3), (0, 3, 4)]
    spans = [Span(stage, "forward", 0, start, stop) for stage, start, stop in forward]
    spans += [Span(stage, "backward", 0, start, stop) for stage, start, stop in backward]
    found = bubble([*spans, Span(1, "weights", 0, 3, 5), Span(0, "weights", 0, 4, 5)], 2)
    assert found["pipeline/bubble_bound"] == found["pipeline/bubble"] == pytest.approx(0.3)


def test_the_busy_time_of_a_worker_includes_all_of_its_stages():
    spans = [Span(stage, "forward", micro, stage + micro, stage + micro + 1) for stage in range(4) for micro in (0, 2)]
    found = bubble([*spans, Span(0, "forward", 3, 9, 10)], 2)
    assert [found[f"pipeline/worker_{worker}_busy"] for worker in (0, 1)] == [5.0, 4.0]
    assert found["pipeline/bubble_theory"] == 1 / (2 * 4 + 1)


def test_a_timeline_records_while_it_is_on(monkeypatch):
    seconds = iter((10.0, 10.5, 12.0))  # time zero, and the start and stop of a computation
    monkeypatch.setattr("runner.parallel.pipelining.timeline.time.perf_counter", lambda: next(seconds))
    timeline, waited = Timeline([CPU, CPU]), []
    with timeline.span(0, "forward", 0, CPU):
        pass
    assert timeline.take() == []

    timeline.begin(lambda: waited.append(True))
    with timeline.span(1, "backward", 3, CPU):
        pass
    timeline.on = False
    with timeline.span(0, "forward", 0, CPU):
        pass
    assert timeline.take() == [Span(1, "backward", 3, 0.5, 2.0)]
    assert waited == [True]
    assert timeline.take() == [], "once"


def test_the_picture_has_a_box_for_each_computation_in_the_color_of_its_kind():
    spans = [(0, "forward", 0, 0.0, 0.1), (1, "forward", 0, 0.1, 0.2), (1, "backward", 0, 0.2, 0.4)]
    spans += [(2, "forward", 0, 0.4, 0.5), (0, "weights", 0, 0.6, 1.0)]
    picture = gantt(list(itertools.starmap(Span, spans)), 2, "a step")
    assert (picture.dtype, picture.shape[0]) == (torch.uint8, 3)
    known = {color for pair in COLORS.values() for color in pair}
    rows = [set(map(tuple, picture[:, y].T.tolist())) & known for y in (49, 95)]  # just below the upper edges of boxes
    forward, backward, weights = COLORS.values()
    assert rows[0] == {forward[0], forward[1], weights[0]}, "further stages of a worker are lighter"
    assert rows[1] == {forward[0], backward[0]}
