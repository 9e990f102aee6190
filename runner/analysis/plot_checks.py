"""Checks of the files of a run before the run is plotted or compared.

The checks are necessary because the files may be damaged, or somebody else may have written them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.analysis.output import one_line

_COUNTS = ("batch_size", "accumulation.steps")
_COUNTS_OR_WORDS = ("parallel.split_size", "parallel.num_micro_batches", "parallel.stages")
"""Config keys whose values are positive integers, like those of the keys in `_COUNTS`, or words such as `auto`."""


def damage(labels: dict[str, Any], result: dict[str, Any]) -> str:
    """Return a description of what is wrong with the files of a run; an empty string if the run can be plotted.

    Args:
        labels: the values in the run's config by dotted key.
        result: the result of the run, as `read_result` returns it.
    """
    return next(_damages(labels, result), "")


def _damages(labels: dict[str, Any], result: dict[str, Any]) -> Iterator[str]:
    for key in (*_COUNTS, *_COUNTS_OR_WORDS):
        value = labels.get(key, 1 if key != "batch_size" else None)
        is_count = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**12
        if not is_count and (key in _COUNTS or isinstance(value, int | float)):
            yield f"{key} in its config.yaml is not a positive integer, but {_shown(value)}"
    times, metrics = result.get("step_seconds", {}), result.get("metrics", {})
    numbers = {f"step_seconds.{name}": number for name, number in times.items()}
    numbers |= {f"metrics.{tag}": number for tag, number in metrics.items()}
    numbers |= {key: result[key] for key in ("peak_memory_bytes", "world_size", "samples_per_second") if key in result}
    for key, number in numbers.items():
        if not is_finite(number):
            yield f"{key} in its result.json is not a finite number, but {_shown(number)}"
    if times and not (is_finite(times.get("median")) and times["median"] > 1e-12):
        yield f"step_seconds.median in its result.json is not a duration, but {_shown(times.get('median'))}"


def is_finite(value: object) -> bool:
    """Return whether `value` is a finite number with an absolute value below 1e300."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # false for NaN


def _shown(value: object) -> str:
    return one_line("null" if value is None else repr(value)[:200])[:60]
