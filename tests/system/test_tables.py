"""Tests of `runner.system.tables`: numbers as text, with units and without exponents."""

from runner.system.tables import flops, milliseconds, significant, size


def test_numbers_are_written_with_units_and_without_exponents():
    values = {0: "0", 12.345: "12.35", 12.0: "12", 100: "100", 15_230: "15,230", 0.001234567: "0.001235"}
    assert {value: significant(value) for value in values} == values
    assert significant(float("inf")) == "inf"
    assert [milliseconds(n) for n in (0.0123, 3.7612, 12.0)] == ["12.3 ms", "3,761 ms", "12,000 ms"]
    sizes = {0: "0 B", 999: "999 B", 1_000: "1.0 kB", 1_234_567: "1.2 MB", 999_990_000: "1.0 GB", 80e9: "80.0 GB"}
    assert {n: size(n) for n in sizes} == sizes
    assert [flops(n) for n in (12, 4.1e9, 2.5e15, 1.234e18)] == ["12 FLOP", "4.1 GFLOP", "2.5 PFLOP", "1,234 PFLOP"]
