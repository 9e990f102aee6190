"""Tests of the check that there is enough memory for a candidate."""

from __future__ import annotations

import pytest
from helpers.compose import TINY_CPU, build_composed_run

from runner.planning import choice
from runner.planning.candidates import Candidate
from runner.planning.tuning import Row


@pytest.mark.parametrize(
    ("typed", "has_room"),
    [
        ("accumulation=4", True),
        ("accumulation=4 channels_last=false", True),
        ("accumulation=2 parallel=ddp parallel.processes=2", True),
        ("accumulation=2", False),
    ],
)
def test_memory_is_predicted_only_for_larger_micro_batches(
    typed: str, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "available_bytes", lambda process: 3e9)
    monkeypatch.setattr(choice, "trace", lambda session: [])
    monkeypatch.setattr(choice, "needed_bytes", lambda device, ranks: 4e9)
    default = Row(Candidate((), build_composed_run(*TINY_CPU, "accumulation=4")), memory_bytes=1e9)
    assert (
        choice._has_room(Candidate(("candidate",), build_composed_run(*TINY_CPU, *typed.split())), default, [default])
        == has_room
    )
