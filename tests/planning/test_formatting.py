"""Numbers as text: digits, units, and no exponents."""

from __future__ import annotations

import pytest

from runner.planning.formatting import flops, milliseconds, significant, size

INF = float("inf")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12.345, "12.35"),
        (12.0, "12"),
        (100, "100"),
        (15_230, "15,230"),
        (0.001234567, "0.001235"),
        (float("inf"), "inf"),
    ],
)
def test_four_digits_are_written_without_an_exponent(value: float, text: str) -> None:
    assert significant(value) == text


def test_times_are_written_in_milliseconds() -> None:
    assert [milliseconds(n) for n in (0.0123, 3.7612, 12.0)] == ["12.3 ms", "3,761 ms", "12,000 ms"]


def test_sizes_are_written_with_units() -> None:
    assert [size(n) for n in (0, 999, 1_000, 1_234_567, 999_990_000, 80e9)] == [
        *("0 B", "999 B", "1.0 kB", "1.2 MB"),
        *("1.0 GB", "80.0 GB"),
    ]
    assert [flops(n) for n in (12, 4.1e9, 2.5e15, 1.234e18)] == ["12 FLOP", "4.1 GFLOP", "2.5 PFLOP", "1,234 PFLOP"]
