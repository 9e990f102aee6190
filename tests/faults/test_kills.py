"""Runs that are killed, with all of their processes, at named points and at random moments."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.faults import ALL, RUNS, Fault, Reference, Tally, Trial, trainer

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
    "ddp": [
        Fault(at="after rename step_N", count=2, process="rank 0"),
        Fault(at="after fsync rank_1.pt", process="rank 1"),
    ],
    "streams": [Fault(at="before fsync manifest.json", count=2)],
    "dqn": [Fault(at="after fsync state.pt", count=2), Fault(at="after step", count=9)],
}
"""What `make test` tries: a run of each kind, and the moments that differ most."""


@pytest.mark.parametrize("run", SELECTED)
def test_runs_killed_at_selected_points_resume_bitwise(
    run: str, tmp_path: Path, reference: Callable[[str], Reference], tally: Tally
) -> None:
    trial = Trial(tmp_path, run, reference(run), tally, "killed at a named point")
    for fault in SELECTED[run]:
        assert trial.strike(fault), f"{fault}: the run was done before"
    trial.finish()


everything = pytest.mark.skipif(not ALL, reason="part of `make faults`")


def killed_at_each_point(reference: Reference) -> list[Fault]:
    """Of each point of an undisturbed run: killed where a process comes there first, and where it does again."""
    faults = []
    for line in sorted(set(reference.points)):
        process, _, point = line.partition(": ")
        often = reference.points.count(line)
        faults += [Fault(at=point, process=process, count=count) for count in (1, 2) if count <= often]
    return faults


@everything
@pytest.mark.parametrize("run", RUNS)
def test_runs_killed_at_each_point_resume_bitwise(
    run: str, tmp_path: Path, reference: Callable[[str], Reference], tally: Tally
) -> None:
    """One run after another, each killed at one point after another until it is done."""
    left = killed_at_each_point(reference(run))
    number = 0
    while left:
        number += 1
        trial = Trial(tmp_path / str(number), run, reference(run), tally, "killed at a named point")
        postponed = []
        for fault in left:
            # A run that is nearly done has no second save or evaluation to come: those are left to the next run.
            if not trial.strike(fault):
                postponed.append(fault)
                break
        assert trial.struck, f"never come to: {left[0]}"
        if not postponed:
            trial.finish()
        left = left[trial.struck :]
        trial.assert_done()


@everything
@pytest.mark.parametrize("run", RUNS)
def test_runs_killed_at_random_moments_resume_bitwise(
    run: str, tmp_path: Path, reference: Callable[[str], Reference], tally: Tally, rng: random.Random
) -> None:
    """Anywhere between the start of a command and its end."""
    kills, number = 16, 0
    while kills > 0:
        number += 1
        trial = Trial(tmp_path / str(number), run, reference(run), tally, "killed at a random moment")
        while kills > 0:
            if not trial.strike(Fault(after=rng.uniform(0, reference(run).seconds), process=trainer(run))):
                break
            kills -= 1
        else:
            trial.finish()
        trial.assert_done()
