"""Tests that kill all processes of a run, at named points and at random times, and then resume the run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.faults import RUN_ALL_FAULTS, RUNS, Fault, FaultCounter, FaultTrial, ReferenceRun, run_all_faults

DELETED = 9
"""Number of checkpoints that an undisturbed run deletes. No checkpoint is saved after the last deletion."""

SELECTED = {
    "single": [
        Fault(at_point="before rename config.yaml"),
        Fault(at_point="after fsync model.safetensors", visit_number=2),
        Fault(at_point="before rename step_N"),
        Fault(at_point="after rename step_N", visit_number=2),
        Fault(at_point="in evaluation", visit_number=2),
        Fault(at_point="after event", visit_number=4),
        Fault(at_point="before rename result.json"),
    ],
    "dp": [Fault(at_point="after rename step_N.pruned", visit_number=DELETED)],
    "ddp": [
        Fault(at_point="after rename step_N", visit_number=2, process="rank 0"),
        Fault(at_point="before rename rank_1.pt", process="rank 1"),
    ],
    "streams": [Fault(at_point="before fsync manifest.json", visit_number=2)],
    "dqn": [Fault(at_point="after fsync state.pt", visit_number=2), Fault(at_point="after step", visit_number=9)],
}
"""The faults of `make test`: a few kinds of runs, each killed at points that have little in common."""


@pytest.mark.parametrize("run", SELECTED)
def test_runs_killed_at_selected_points_resume_bitwise(
    run: str, tmp_path: Path, reference: Callable[[str], ReferenceRun], count_fault: FaultCounter
) -> None:
    trial = FaultTrial(tmp_path, run, reference(run), count_fault, "killed at a named point")
    for fault in SELECTED[run]:
        assert trial.run_with_fault(fault), f"{fault}: the run was done before"
    trial.finish()


only_in_make_faults = pytest.mark.skipif(not RUN_ALL_FAULTS, reason="part of `make faults`")


def faults_at_each_point(points: list[str]) -> list[Fault]:
    """Return a fault for each point that a process of an undisturbed run reaches.

    The fault kills the run when the process reaches the point for the second time, or for the first time if the process
    reaches the point only once.

    Args:
        points: all points that the undisturbed run reached, as `process: point`, in order.
    """
    faults = []
    for line in dict.fromkeys(points):
        process, _, point = line.partition(": ")
        faults.append(Fault(at_point=point, process=process, visit_number=min(2, points.count(line))))
    return faults


@only_in_make_faults
@pytest.mark.parametrize("run", RUNS)
def test_runs_killed_at_each_point_resume_bitwise(
    run: str, tmp_path: Path, reference: Callable[[str], ReferenceRun], count_fault: FaultCounter
) -> None:
    def begin(number: int) -> FaultTrial:
        return FaultTrial(tmp_path / str(number), run, reference(run), count_fault, "killed at a named point")

    run_all_faults(faults_at_each_point(reference(run).points), begin)


@only_in_make_faults
@pytest.mark.parametrize("run", RUNS)
def test_runs_killed_at_random_moments_resume_bitwise(
    run: str, tmp_path: Path, reference: Callable[[str], ReferenceRun], count_fault: FaultCounter, rng: random.Random
) -> None:
    """The time of a kill is drawn between the start of a command and the duration of an undisturbed run."""
    kills, number = 15, 0
    while kills > 0:
        number += 1
        trial = FaultTrial(tmp_path / str(number), run, reference(run), count_fault, "killed at a random moment")
        while kills > 0 and trial.run_with_fault(Fault(after=rng.uniform(0, reference(run).seconds))):
            kills -= 1
        trial.assert_done() if trial.done else trial.finish()
