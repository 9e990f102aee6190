"""Tests that kill all processes of a run, at named points and at random times, and then resume the run."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from helpers.faults import RUNS, Fault, FaultTrial, ReferenceRun, only_in_make_faults, run_all_faults

pytestmark = only_in_make_faults

NUM_KILLS = dict.fromkeys(RUNS, 15) | {"single": 100, "workers": 20, "dqn": 30, "dqn ddp": 30}
"""How often `make faults` kills each run at a random moment."""


@pytest.mark.parametrize("run", RUNS)
def test_runs_killed_at_each_point_resume_bitwise(
    run: str, reference: Callable[[str], ReferenceRun], trial: Callable[..., FaultTrial]
) -> None:
    """The run is killed at each point that a process reaches, at its second visit if there is one."""
    faults, points = [], reference(run).points
    for line in dict.fromkeys(points):
        process, _, point = line.partition(": ")
        faults.append(Fault(at_point=point, process=process, visit_number=min(2, points.count(line))))
    run_all_faults(faults, lambda number: trial(run, "killed at a named point", number=number))


@pytest.mark.parametrize("run", RUNS)
def test_runs_killed_at_random_moments_resume_bitwise(
    run: str, reference: Callable[[str], ReferenceRun], trial: Callable[..., FaultTrial], rng: random.Random
) -> None:
    """The time of a kill is drawn between the start of a command and the duration of an undisturbed run."""
    kills, number = NUM_KILLS[run], 0
    while kills > 0:
        number += 1
        killed = trial(run, "killed at a random moment", number=number)
        while kills > 0 and killed.run_with_fault(Fault(after=rng.uniform(0, reference(run).seconds))):
            kills -= 1
        killed.finish()
