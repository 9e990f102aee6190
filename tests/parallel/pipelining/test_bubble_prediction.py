"""Tests of the predicted time and bubble (the idle fraction) of a pipeline."""

from __future__ import annotations

import pytest

from runner.parallel.pipelining.bubble_prediction import bubbles, pipeline_time


@pytest.mark.parametrize(
    ("schedule", "stages", "workers", "micros"),
    [
        *[("gpipe", n, n, m) for n, m in ((2, 1), (2, 8), (3, 5), (4, 4))],
        *[("1f1b", n, n, m) for n, m in ((2, 2), (2, 8), (3, 5), (4, 12))],
        *[("interleaved_1f1b", n, w, m) for n, w, m in ((4, 2, 4), (6, 2, 8), (8, 4, 8))],
    ],
)
def test_the_bubble_of_equal_stages_equals_the_theory(schedule: str, stages: int, workers: int, micros: int) -> None:
    row = bubbles([schedule], workers, micros, lambda size: [3.0] * stages, stages)[-1]
    rounds = stages // workers * micros + workers - 1
    assert row["num_micro_batches"] == micros
    assert row[schedule]["bubble"] == pytest.approx((workers - 1) / rounds)
    assert row[schedule] == {"bubble": row[schedule]["bubble"], "time": pytest.approx(3 * rounds), "rounds": rounds}


def test_zero_bubble_has_less_than_half_the_bubble_of_1f1b() -> None:
    row = bubbles(["1f1b", "zero_bubble"], 4, 8, lambda size: [1.0] * 4)[-1]
    assert row["zero_bubble"]["bubble"] == pytest.approx(1 / 9)
    assert row["1f1b"]["bubble"] == pytest.approx(3 / 11)


def test_the_slowest_stage_determines_the_time_of_a_step() -> None:
    assert pipeline_time("gpipe", [3.0, 9.0], 2, 8) == 1 + 72 + 2
    assert pipeline_time("interleaved_1f1b", [3.0, 9.0, 3.0, 3.0], 2, 4) == 4 * 12 + 9
