"""The predicted bubbles, and the shorter times of moments in which not all workers compute."""

from runner.parallel.pipelining.bubble_prediction import bubbles, with_contention
from runner.parallel.pipelining.timeline import Span


def test_a_worker_that_computes_alone_is_faster() -> None:
    spans = [Span(0, "forward", 0, 0, 3), Span(1, "forward", 0, 2, 5), Span(0, "backward", 0, 6, 9)]
    found = with_contention(spans, num_workers=2, contention=1.5)
    # Alone for 2 s (of which 4/3 s are left), together for 1 s, alone for 2 s, idle for 1 s, and alone for 3 s.
    together, second, third = 4 / 3, 4 / 3 + 1 + 4 / 3, 4 / 3 + 1 + 4 / 3 + 2 / 3
    assert _rounded(found) == _rounded(
        [
            Span(0, "forward", 0, 0, together + 1),
            Span(1, "forward", 0, together, second),
            Span(0, "backward", 0, third, third + 2),
        ]
    )


def test_of_four_workers_two_share_the_machine_with_fewer() -> None:
    spans = [Span(0, "forward", 0, 0, 4), Span(1, "forward", 0, 0, 4)]
    found = with_contention(spans, num_workers=4, contention=2.5)
    # Two of four workers: 1 + (2.5 - 1) / 3 = 1.5 times as long as alone, where all four together take 2.5 times.
    assert [round(span.stop, 9) for span in found] == [2.4, 2.4]


def test_without_contention_nothing_changes() -> None:
    spans = [Span(0, "forward", 0, 0, 3), Span(1, "forward", 0, 3, 5)]
    assert with_contention(spans, 2, 1.0) == spans
    assert with_contention(spans, 1, 2.0) == spans


def test_contention_shortens_the_predicted_time_of_the_bubble_only() -> None:
    def predicted(contention: float) -> dict[int, tuple[float, float]]:
        rows = bubbles(["gpipe"], 2, 8, lambda size: [size * 3.0, size * 3.0], contention=contention)
        return {row["num_micro_batches"]: (row["gpipe"]["time"], row["gpipe"]["bubble"]) for row in rows}

    # Two equal stages, m micro-batches of 24 / m s a stage: of m + 1 turns, the first and the last have one worker.
    plain, contended = predicted(1.0), predicted(1.5)
    for count, (seconds, share) in plain.items():
        turn = 24 / count
        assert round(seconds, 9) == round((count + 1) * turn, 9)
        assert round(share, 9) == round(1 / (count + 1), 9)
        alone = turn / 1.5
        assert round(contended[count][0], 9) == round((count - 1) * turn + 2 * alone, 9)


def _rounded(spans: list[Span]) -> list[Span]:
    return [span._replace(start=round(span.start, 9), stop=round(span.stop, 9)) for span in spans]
