"""The faults that `make test` tries: each kind once per kind of run; `make faults` tries them everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from helpers.faults import Fault, FaultTrial

STOPPED, INTERRUPTED = 75, 130


def rank(action: str, number: int, at: str, visit_number: int = 1) -> Fault:
    """A rank that is killed or fails, which ends the command with exit code 1."""
    says = r"was killed by SIGKILL \(" if action == "kill" else "failed: InjectedError: planted by a test$"
    role, pattern = f"rank {number}", rf"^rank {number} {says}"
    return Fault(action, at, visit_number, role, codes=(1,), console_pattern=pattern, traceback=action == "raise")


SELECTED = {
    "single": [
        Fault(at_point="before rename config.yaml"),
        Fault(
            "SIGTERM", "before rename config.yaml", codes=(STOPPED,), console_pattern="^SIGTERM: stopped before the fi"
        ),
        Fault(at_point="after fsync model.safetensors", visit_number=2),
        Fault(at_point="after rename step_N", visit_number=2),
        Fault(at_point="in evaluation", visit_number=2),
        Fault("SIGUSR2", "before rename step_N", codes=(STOPPED,), console_pattern="^SIGUSR2: finishing the step"),
        Fault("SIGINT SIGINT", "after step", 3, codes=(INTERRUPTED,), console_pattern="^interrupted$"),
        Fault(at_point="before rename result.json"),
    ],
    "ddp": [
        rank("raise", 1, "before preparation"),
        rank("kill", 0, "after fsync model.safetensors"),
        Fault(at_point="before rename rank_1.pt", process="rank 1"),
        Fault("SIGTERM SIGINT", "after step", 3, "rank 0", codes=(INTERRUPTED,), console_pattern="^interrupted$"),
    ],
    "pipeline": [rank("kill", 1, "after step", 4)],
    "hogwild": [rank("kill", 1, "after save")],
    "dqn": [Fault(at_point="after step", visit_number=9)],
}


@pytest.mark.parametrize("run", SELECTED)
def test_a_run_with_faults_ends_as_one_without(run: str, trial: Callable[..., FaultTrial]) -> None:
    faulty = trial(run, f"a selected fault of {run}")
    for fault in SELECTED[run]:
        assert faulty.run_with_fault(fault), f"{fault}: the run was done before"
        if fault.codes == (1,):
            assert len(re.findall(r"^rank \d+ ", faulty.console, re.MULTILINE)) == 1, faulty.console
            assert re.search(r"^crashed after step \d+/\d+", faulty.console, re.MULTILINE), faulty.console
    faulty.finish()
