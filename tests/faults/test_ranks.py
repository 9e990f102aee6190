"""Tests in which one rank is killed, stopped or fails: the other ranks end, and the error names the rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.faults import (
    Fault,
    FaultTrial,
    ReferenceRun,
    only_in_make_faults,
    run_all_faults,
)

pytestmark = only_in_make_faults  # tests/parallel/launch/test_faults.py stops and restarts ranks in `make test`

TIMEOUT = 15
"""`parallel.timeout` in seconds. It also limits the start of a rank, which may be slow on a busy machine."""

MOMENTS = {
    "starting": ("before preparation", 1),
    "training": ("after step", 4),
    "logging": ("before log", 1),
    "evaluating": ("in evaluation", 1),
    "about to save": ("before save", 1),
    "saving its state": ("before fsync rank_N.pt.part", 1),
    "saving the weights": ("after fsync model.safetensors", 1),
    "committing": ("before rename step_N", 1),
    "having saved": ("after save", 1),
}
"""Points at which a fault happens, and at which visit in the session (1 is the first). Some only rank 0 reaches."""

SAYS = {
    "kill": r"^rank {rank} was killed by SIGKILL \(the kernel does that where memory runs out\)$",
    "raise": r"^rank {rank} failed: InjectedError: planted by a test$",
    "stop": r"^rank {rank} did not reach the collective that the others waited in: it is stopped, or hangs "
    rf"\(parallel\.timeout={TIMEOUT}\)$",
}
SAYS["hang"] = SAYS["stop"]

MODES = ("ddp", "fsdp", "pipeline", "hogwild", "ensemble")
KINDS = {"kill": "killed", "raise": "failing", "stop": "stopped", "hang": "hanging"}


def fault(do: str, rank: int, moment: str) -> Fault:
    at, count = MOMENTS[moment]
    at = at.replace("rank_N", f"rank_{rank}")
    says = SAYS[do].format(rank=rank)
    return Fault(do, at, count, f"rank {rank}", codes=(1,), console_pattern=says, traceback=do == "raise")


def assert_named_once(console: str) -> None:
    """Fail unless exactly one line names a rank, and the console says after which step the run crashed."""
    assert len(re.findall(r"^rank \d+ ", console, re.MULTILINE)) == 1, console
    assert re.search(r"^crashed after step \d+/\d+", console, re.MULTILINE), console


@pytest.mark.parametrize("do", ["kill", "raise"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_after_ranks_that_died_at_any_point(
    do: str, mode: str, reference: Callable[[str], ReferenceRun], trial: Callable[..., FaultTrial]
) -> None:
    faults = [fault(do, rank, moment) for moment in MOMENTS for rank in (0, 1)]
    reached = [each for each in faults if f"{each.process}: {each.at_point}" in reference(mode).points]
    run_all_faults(reached, lambda number: trial(mode, f"a rank {KINDS[do]}", number=number), assert_named_once)


@pytest.mark.parametrize("do", ["stop", "hang"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_after_ranks_that_stopped(do: str, mode: str, trial: Callable[..., FaultTrial]) -> None:
    run = trial(mode, f"a rank {KINDS[do]}", f"parallel.timeout={TIMEOUT}")
    for rank, moment in ((1, "training"), (0, "training"), (1, "about to save"), (0, "committing")):
        assert run.run_with_fault(fault(do, rank, moment)), "the run was done before"
        assert_named_once(run.console)
    run.finish()


RESTARTED = [("kill", 1, "training"), ("raise", 0, "evaluating"), ("kill", 0, "committing"), ("raise", 1, "starting")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("do", "rank", "moment"), RESTARTED)
def test_all_ranks_restart_from_the_last_checkpoint(
    do: str, rank: int, moment: str, mode: str, trial: Callable[..., FaultTrial]
) -> None:
    """The ranks restart within the same command, which has the same results as an undisturbed run."""
    run, one = trial(mode, "a rank restarted", "parallel.max_restarts=1"), fault(do, rank, moment)
    says = rf"{one.console_pattern[:-1]}\n(?:.*\n)*all ranks restart from the last checkpoint \(restart 1 of 1\)"
    assert run.run_with_fault(replace(one, codes=(0,), console_pattern=says))
    run.assert_done()
