"""Tests of the Gantt chart of a step, with a box for each computation in the color of its kind."""

from __future__ import annotations

import torch

from runner.parallel.pipelining import gantt

WORK = [
    (0, "forward", 0, 0.0, 0.1),
    (1, "forward", 0, 0.1, 0.2),
    (1, "backward", 0, 0.2, 0.4),
    (0, "backward", 0, 0.4, 0.6),
    (0, "weights", 0, 0.6, 1.0),
]


def color_at(picture: torch.Tensor, second: float, row: int) -> tuple[int, ...]:
    """Return the color at time `second` near the upper edge of a row, where there is no text."""
    x = gantt._MARGIN + second * (gantt._WIDTH - gantt._MARGIN - 16)
    return tuple(picture[:, gantt._TOP + row * gantt._ROW + 5, round(x)].tolist())


def test_computations_are_boxes_and_idle_time_is_gray() -> None:
    picture = gantt.gantt(WORK, 2, "a step")
    assert picture.dtype == torch.uint8
    assert picture.shape == (3, gantt._TOP + 2 * gantt._ROW + gantt._BOTTOM, gantt._WIDTH)
    for second, kinds in ((0.05, ("forward", None)), (0.15, (None, "forward")), (0.3, (None, "backward"))):
        for row, kind in enumerate(kinds):
            assert color_at(picture, second, row) == (gantt.COLORS[kind][0] if kind else gantt._IDLE)
    assert color_at(picture, 0.5, 0) == gantt.COLORS["backward"][0]
    assert color_at(picture, 0.8, 0) == gantt.COLORS["weights"][0]
    assert color_at(picture, 0.8, 1) == gantt._IDLE


def test_further_stages_of_a_worker_are_lighter() -> None:
    picture = gantt.gantt([(0, "forward", 0, 0.0, 0.5), (2, "forward", 0, 0.5, 1.0)], 2, "two stages each")
    assert color_at(picture, 0.25, 0) == gantt.COLORS["forward"][0]
    assert color_at(picture, 0.75, 0) == gantt.COLORS["forward"][1]
