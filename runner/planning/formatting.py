"""Numbers as text, with units."""

from __future__ import annotations

import math


def significant(value: float, digits: int = 4) -> str:
    """Return `value` as text rounded to `digits` significant digits, but keep all digits before the decimal point.

    Zeros at the end of a fraction are left out. Examples: `12.35`, `1,234,567`, `0.0012`, `inf`.
    """
    if not math.isfinite(value):
        return str(value)
    power = math.floor(math.log10(abs(value))) if value else 0
    text = f"{value:,.{max(0, digits - 1 - power)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def milliseconds(seconds: float) -> str:
    """Return `seconds` in milliseconds, such as `12.3 ms`."""
    return f"{significant(seconds * 1e3)} ms"


def size(num_bytes: float) -> str:
    """Return `num_bytes` as text with a decimal unit, such as `12.4 MB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor * 0.9995:
            return f"{num_bytes / factor:,.{1 if num_bytes < factor * 100 else 0}f} {unit}"
    return f"{num_bytes:.0f} B"


def flops(count: float) -> str:
    """Return `count`, a number of floating-point operations, as text with a unit, such as `4.1 GFLOP`."""
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= factor:
            return f"{significant(count / factor, 3)} {unit}FLOP"
    return f"{count:,.0f} FLOP"
