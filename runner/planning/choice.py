"""Chooses how a run is trained on this machine: the candidates of a config are measured against each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from runner.config.errors import ConfigError
from runner.planning.candidates import Candidate, Candidates, Compose
from runner.planning.session import prepared
from runner.planning.trace import trace
from runner.planning.trial import Trial
from runner.planning.tuning import Row, Search, as_plain
from runner.run import Session
from runner.system.memory import host_memory

_PROCESS_BYTES = 0.4e9
"""What a process takes in addition to its tensors."""


def measured_choice(
    compose: Compose,
    typed: Sequence[str],
    budget: float,
    allowed: Iterable[str] = (),
    report: Callable[[str], None] = lambda line: None,
    budget_for: Callable[[Session, float], float] | None = None,
) -> dict[str, Any]:
    """Measure the candidates of a run, and return the result as plain values.

    Args:
        compose: function that returns the run with further overrides; it may raise ConfigError.
        typed: the overrides of the run; what they set is kept.
        budget: seconds that the search may take.
        allowed: the kinds of results that the choice may have, in addition to those that need no permission.
        report: function that is called with a line about each candidate that has been tried.
        budget_for: function that returns the budget for the other candidates, given the prepared run and the seconds
            of its step; 0 to measure none of them. None: the budget is for all candidates.

    Raises:
        ConfigError: if the run is refused.
        TrialError: if the run cannot train, or its first steps take longer than the budget.
    """
    began = time.perf_counter()
    candidates = Candidates(compose, typed)
    session = candidates.session
    memory = _Memory(session.device)
    search = Search(_start, budget - (time.perf_counter() - began), allowed, memory.has_room, report=report)
    chosen = search.run(
        map(candidates.judged, candidates.layouts()),
        candidates.refinements(),
        lambda row: None if budget_for is None else budget_for(session, row.step_seconds),
    )
    return as_plain(search, chosen, session.run.batch_size) | {"seconds": time.perf_counter() - began}


def _start(candidate: Candidate, seconds: float) -> Trial:
    assert candidate.run is not None
    return Trial(candidate.run.config, seconds)


class _Memory:
    """The memory of the device, which trials share with those that wait."""

    def __init__(self, device: torch.device):
        self._device = device

    def has_room(self, candidate: Candidate, default: Row, waiting: Sequence[Row]) -> bool:
        """Return whether the device has enough memory for a candidate.

        Args:
            candidate: the candidate.
            default: the row of the run as it is, whose processes are those that take most if a batch is divided.
            waiting: the rows whose trials are waiting.
        """
        if candidate.run is None or candidate is default.candidate:
            return True
        available = self._available(waiting)
        world_size = len(candidate.run.parallel.launcher(candidate.run.device).devices)
        if default.memory_bytes * world_size < available:
            return True
        try:
            ranks = trace(prepared(candidate.run))
        except ConfigError:
            return True  # its trial says why it is refused
        return sum(rank.peak_bytes + _PROCESS_BYTES for rank in ranks) * world_size / len(ranks) < available

    def _available(self, waiting: Sequence[Row]) -> float:
        """Return the bytes that are available."""
        if self._device.type == "cuda":  # without a CUDA context, which would itself take memory
            total = torch.cuda.get_device_properties(self._device).total_memory * torch.cuda.device_count()
            return total - sum(row.memory_bytes for row in waiting)
        machine = host_memory()
        return min(limit for limit in (machine["available_bytes"], machine["limit_bytes"]) if limit is not None)
