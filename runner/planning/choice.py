"""Chooses how a run is trained on this machine: the candidates of a config are measured against each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from runner.config.errors import ConfigError
from runner.planning.candidates import RESULTS, Candidate, Candidates, Compose
from runner.planning.device_memory import available_bytes, needed_bytes
from runner.planning.fake_step import trace
from runner.planning.planned_session import first_process, prepared
from runner.planning.trial import Trial
from runner.planning.tuning import Row, Search, as_plain
from runner.run import Session


def measured_choice(
    compose: Compose,
    typed: Sequence[str],
    budget: float,
    allowed: Iterable[str] = (),
    report: Callable[[str], None] = lambda line: None,
    config_dir: str | None = None,
    budget_for: Callable[[Session, float], float] | None = None,
) -> dict[str, Any]:
    """Measure the candidates of a run, and return the result as plain values.

    Args:
        compose: function that takes further overrides, and returns the run with them; it may raise ConfigError.
        typed: the overrides of the run. No candidate changes the options that they set.
        budget: maximum duration of the search in seconds. If `budget_for` is given, `budget` limits only the
            measurement of the run as it is, without further overrides.
        allowed: the kinds of effect that the choice may have on the results (see `RESULTS`), in addition to `ALLOWED`.
        report: function that is called with a line about each candidate that has been tried.
        config_dir: a directory with the user's own option files, which may define parallel modes; None if there is
            none.
        budget_for: function that returns the seconds that all other candidates together may take, or 0 to measure no
            other candidate. It is called after the measurement of the run as it is, with the session of this run and
            the measured seconds per step. If `budget_for` is None, `budget` applies to the whole search.

    Returns:
        The dict of `runner.planning.tuning.as_plain`, with the additional key `seconds`: how long this call took.

    Raises:
        ConfigError: if the run is refused.
        TrialError: if the run cannot train, or its first steps take longer than the budget.
    """
    began = time.perf_counter()
    candidates = Candidates(compose, typed, config_dir)
    session = candidates.session
    search = Search(_start, budget - (time.perf_counter() - began), allowed, _has_room, report=report)
    chosen = search.run(
        candidates.judged(()),
        candidates.groups(),
        lambda row: None if budget_for is None else budget_for(session, row.step_seconds),
    )
    return as_plain(search, chosen, session.run.batch_size) | {"seconds": time.perf_counter() - began}


def measured_modes(
    compose: Compose, modes: Iterable[str], budget: float, report: Callable[[str], None] = lambda line: None
) -> dict[str, dict[str, Any]]:
    """Measure a run in several parallel modes against the run as it is.

    Args:
        compose: function that takes further overrides, and returns the run with them; it may raise ConfigError.
        modes: names of the parallel modes.
        budget: seconds that the measurement may take.
        report: function that is called with a line about each mode that has been tried.

    Returns:
        A dict from the name of each mode to its row, which is a dict as in `rows` of `measured_choice`. If a mode was
        not measured, the `speedup` in its row is None.

    Raises:
        ConfigError: if the run is refused.
        TrialError: if the run cannot train, or its first steps take longer than the budget.
    """
    candidates = Candidates(compose, ())
    others = {mode: candidates.judged((f"parallel={mode}",)) for mode in modes}
    search = Search(_start, budget, RESULTS, _has_room, report=report)
    chosen = search.run(candidates.judged(()), [lambda fastest: others.values()])
    rows = as_plain(search, chosen, candidates.base.batch_size)["rows"]
    return {mode: next(row for row in rows if row["overrides"] == list(others[mode].overrides)) for mode in others}


def _start(candidate: Candidate, seconds: float) -> Trial:
    assert candidate.run is not None
    return Trial(candidate.run.config, seconds)


def _has_room(candidate: Candidate, default: Row, waiting: Sequence[Row]) -> bool:
    """Return whether there is enough memory for the trial of a candidate.

    The first estimate is that each process of the candidate needs the memory that was measured for the run as it is. If
    this is more than the available memory, or if the candidate has larger micro-batches than the run as it is, the
    memory of the candidate is predicted instead.

    Args:
        candidate: the candidate.
        default: the row of the run as it is.
        waiting: the rows whose trials have been started and still hold memory. On CUDA, this memory is subtracted from
            the available memory. On a CPU, the available memory already excludes it.
    """
    if candidate.run is None or candidate is default.candidate:
        return True
    process = first_process(candidate.run)
    available = available_bytes(process)
    if process.devices[0].type == "cuda":
        available -= sum(row.memory_bytes for row in waiting)
    is_larger = _samples_per_pass(candidate) > _samples_per_pass(default.candidate)
    if not is_larger and default.memory_bytes * process.rank_info.world_size < available:
        return True  # assumes that no process needs more than the run as it is: a prediction reads the data again
    try:
        session = prepared(candidate.run)
    except ConfigError:
        return True  # its trial says why it is refused
    return needed_bytes(session.device, trace(session)) < available


def _samples_per_pass(candidate: Candidate) -> int:
    """Return the number of samples in a micro-batch of each process."""
    assert candidate.run is not None
    plan = candidate.run.context(first_process(candidate.run)).plan
    return plan.batch_size // plan.data_shard[1] // plan.accumulation
