"""Tunes a run: the search for the fastest candidate on this machine, and its result as plain values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from runner.planning.candidates import Candidate, Candidates, Compose
from runner.planning.device_memory import available_bytes
from runner.planning.search import Row, Search, ratio
from runner.planning.trial import Trial


def tune(
    compose: Compose,
    typed: Sequence[str],
    budget: float,
    allowed: Iterable[str] = (),
    report: Callable[[str], None] = lambda line: None,
    config_dir: str | None = None,
) -> dict[str, Any]:
    """Measure the candidates of a run, and return the result as plain values.

    Args:
        compose: function that takes further overrides, and returns the run with them; it may raise ConfigError.
        typed: the overrides of the run. No candidate changes the options that they set.
        budget: maximum duration in seconds.
        allowed: the kinds of effect that the choice may have on the results (see `RESULTS`), in addition to `ALLOWED`.
        report: function that is called with a line about each candidate that has been tried.
        config_dir: a directory with the user's option files, which may define parallel modes; None if there is none.

    Returns:
        A dict: `chosen`, the chosen overrides; `speedup`, the step time of the baseline divided by that of the choice;
        `noise`, as in `Search`; `seconds`, how long the call took; and `rows`, a dict for each candidate (see `plain`),
        those that were measured first, from the fastest to the slowest.

    Raises:
        ConfigError: if the run is refused.
        TrialError: if the run cannot train, or its first steps take longer than the budget.
    """
    began = time.perf_counter()
    candidates = Candidates(compose, typed, config_dir)
    left = budget - (time.perf_counter() - began)
    search = Search(candidates.judged, _start, left, allowed, _has_room, report=report)
    chosen = search.run(candidates.groups())
    rows = [*search.measured(), *(row for row in search.rows if not row.bursts)]
    return {
        "chosen": list(chosen.candidate.overrides),
        "speedup": 1 / ratio(chosen, search.base).value,
        "noise": search.noise,
        "rows": [plain(row, search.base, candidates.base.batch_size) for row in rows],
        "seconds": time.perf_counter() - began,
    }


def _start(candidate: Candidate, seconds: float) -> Trial:
    assert candidate.run is not None
    return Trial(candidate.run.config, seconds)


def _has_room(candidate: Candidate, base: Row, waiting: Sequence[Row]) -> bool:
    """Return whether there is enough memory for the trial of a candidate.

    Each process is assumed to need the memory that was measured for a process of the baseline, or in proportion more
    if its micro-batches are larger.
    """
    now, before = candidate.session, base.candidate.session
    if now is None or before is None or candidate is base.candidate:
        return True
    per_process = base.memory_bytes / before.world_size
    needed = per_process * max(1.0, now.plan.micro_size / before.plan.micro_size) * now.world_size
    on_gpu = now.device.type == "cuda"  # elsewhere, what is available excludes the memory of waiting trials
    return needed < available_bytes(now.collectives) - sum(row.memory_bytes for row in waiting if on_gpu)


def plain(row: Row, base: Row, samples: int) -> dict[str, Any]:
    """Return a row as plain values, in which what was not measured is None.

    Args:
        row: the row.
        base: the row of the baseline.
        samples: number of samples in an optimizer step.

    Returns:
        A dict: `overrides`, `results`, `status` and `reason`, as in `Row` and `Candidate`; `rounds`, the number of
        rounds in which the row was measured; `samples_per_second`, and `spread`, the first and the third quartile of
        this number; `speedup` over the baseline, and the `uncertainty` of this ratio; `ties`, whether the row cannot be
        told apart from the baseline; `memory_bytes`; `startup_seconds`; and `break_even_steps`, the number of steps
        after which the row has made up for a slower start, None if it never does.
    """
    candidate = row.candidate
    found: dict[str, Any] = {"overrides": list(candidate.overrides), "results": candidate.results}
    found |= {"status": row.status, "reason": row.reason, "rounds": len(row.bursts)}
    measured = ("samples_per_second", "spread", "speedup", "uncertainty", "ties")
    found |= dict.fromkeys((*measured, "memory_bytes", "startup_seconds", "break_even_steps"))
    if not row.bursts:
        return found
    compared, (first, third) = ratio(row, base), row.quartiles()
    saved = base.step_seconds * (1 - compared.value)
    return found | {
        "samples_per_second": samples / row.step_seconds,
        "spread": [samples / third, samples / first],
        "speedup": 1 / compared.value,
        "uncertainty": compared.uncertainty / compared.value**2,
        "ties": row is not base and not compared.is_clear,
        "memory_bytes": row.memory_bytes,
        "startup_seconds": row.startup_seconds,
        "break_even_steps": max(0.0, (row.startup_seconds - base.startup_seconds) / saved) if saved > 0 else None,
    }
