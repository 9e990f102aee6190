"""Tests that kill all processes of a run, at named points and at random times, and then resume the run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.faults import ALL, RUNS, Fault, Reference, Tally, Trial, strike_all

DELETED = 9
"""Number of checkpoints that an undisturbed run deletes. No checkpoint is saved after the last deletion."""

SELECTED = {
    "single": [
        Fault(at="before rename config.yaml"),
        Fault(at="after fsync model.safetensors", count=2),
        Fault(at="before rename step_N"),
        Fault(at="after rename step_N", count=2),
        Fault(at="in evaluation", count=2),
        Fault(at="after event", count=4),
        Fault(at="before rename result.json"),
    ],
    "dp": [Fault(at="after rename step_N.pruned", count=DELETED)],
    "ddp": [
        Fault(at="after rename step_N", count=2, process="rank 0"),
        Fault(at="before rename rank_1.pt", process="rank 1"),
    ],
    "streams": [Fault(at="before fsync manifest.json", count=2)],
    "dqn": [Fault(at="after fsync state.pt", count=2), Fault(at="after step", count=9)],
}
"""The faults of `make test`: a few kinds of runs, each killed at points that have little in common."""


@pytest.mark.parametrize("run", SELECTED)
def test_runs_killed_at_selected_points_resume_bitwise(
    run: str, tmp_path: Path, reference: Callable[[str], Reference], tally: Tally
) -> None:
    trial = Trial(tmp_path, run, reference(run), tally, "killed at a named point")
    for fault in SELECTED[run]:
        assert trial.strike(fault), f"{fault}: the run was done before"
    trial.finish()


everything = pytest.mark.skipif(not ALL, reason="part of `make faults`")


def faults_at_each_point(points: list[str]) -> list[Fault]:
    """Return a kill for each point of an undisturbed run: when a process reaches it the second time, if it does."""
    faults = []
    for line in dict.fromkeys(points):
        process, _, point = line.partition(": ")
        faults.append(Fault(at=point, process=process, count=min(2, points.count(line))))
    return faults


@everything
@pytest.mark.parametrize("run", RUNS)
def test_runs_killed_at_each_point_resume_bitwise(
    run: str, tmp_path: Path, reference: Callable[[str], Reference], tally: Tally
) -> None:
    def begin(number: int) -> Trial:
        return Trial(tmp_path / str(number), run, reference(run), tally, "killed at a named point")

    strike_all(faults_at_each_point(reference(run).points), begin)


@everything
@pytest.mark.parametrize("run", RUNS)
def test_runs_killed_at_random_moments_resume_bitwise(
    run: str, tmp_path: Path, reference: Callable[[str], Reference], tally: Tally, rng: random.Random
) -> None:
    """The time of a kill is drawn between the start of a command and the duration of an undisturbed run."""
    kills, number = 15, 0
    while kills > 0:
        number += 1
        trial = Trial(tmp_path / str(number), run, reference(run), tally, "killed at a random moment")
        while kills > 0 and trial.strike(Fault(after=rng.uniform(0, reference(run).seconds))):
            kills -= 1
        trial.assert_done() if trial.done else trial.finish()
