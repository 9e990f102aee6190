"""Tests of `accumulation=auto`, which chooses the fewest micro-batches that fit into memory.

If the predicted memory does not show clearly whether a number of micro-batches fits, a trial decides.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers.compose import build_composed_run

from runner.config.errors import ConfigError
from runner.planning.auto_accumulation import fitting_accumulation
from runner.planning.fake_step import trace
from runner.planning.planned_session import needed_bytes, prepared
from runner.planning.trial import Burst, TrialError
from runner.run import Run

TYPED = ("model=tiny", "data.size=8", "device=cpu", "batch_size=512")


class FakeTrials:
    """A replacement for `Trial` that raises `error`, or an error for fewer than `least` micro-batches."""

    def __init__(self, least: int = 1, error: TrialError | None = None):
        self.least, self.error = least, error
        self.counts: list[int] = []

    def __call__(self, config: dict[str, Any], seconds: float) -> FakeTrials:
        self.counts.append(config["accumulation"]["steps"])
        if self.error:
            raise self.error
        if self.counts[-1] < self.least:
            raise TrialError("CUDA out of memory", out_of_memory=True)
        return self

    def burst(self, seconds: float) -> Burst:
        return Burst(1.0, 1.0)

    def close(self) -> None: ...


def fitting(memory: float, attempts: FakeTrials, *typed: str) -> tuple[int, list[str]]:
    def compose(count: int) -> Run:
        return build_composed_run(*TYPED, *typed, "accumulation=1", f"accumulation.steps={count}")

    said: list[str] = []
    found = fitting_accumulation(compose, said.append, lambda session: memory, attempts)  # type: ignore[arg-type]
    return found, said


def needed(count: int, *typed: str) -> float:
    run = build_composed_run(*TYPED, *typed, f"accumulation.steps={count}")
    session = prepared(run)
    return needed_bytes(session.device, [rank.peak_bytes for rank in trace(run, session)])


def test_what_clearly_fits_or_is_predicted_not_to_fit_is_not_tried() -> None:
    attempts = FakeTrials()
    assert fitting(100e9, attempts)[0] == 1
    assert attempts.counts == []
    between = (needed(2) + needed(4)) / 2
    found, said = fitting(between, attempts)
    assert (found, attempts.counts) == (4, [4])
    assert [line.split(":")[0] for line in said] == ["1 micro-batch", "2 micro-batches", "4 micro-batches"]


def test_micro_batches_are_divided_further_after_running_out_of_memory() -> None:
    attempts = FakeTrials(least=8)
    assert fitting(1.5 * needed(1), attempts)[0] == 8
    assert attempts.counts == [1, 2, 4, 8]  # none is skipped, because the prediction was wrong


def test_another_error_of_an_attempt_is_raised() -> None:
    attempts = FakeTrials(error=TrialError("RuntimeError: something else"))
    with pytest.raises(TrialError, match="something else"):
        fitting(1.5 * needed(1), attempts)
    assert attempts.counts == [1]


def test_a_run_that_does_not_fit_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="accumulation") as caught:
        fitting(1e6, FakeTrials(), "batch_size=8")
    assert "fsdp" in str(caught.value)


def test_the_processes_share_the_batch() -> None:
    found, _ = fitting(1.5 * needed(1, "parallel=ddp"), FakeTrials(least=6), "parallel=ddp", "batch_size=12")
    assert found == 6
    with pytest.raises(ConfigError, match="batch_size"):
        fitting(100e9, FakeTrials(), "parallel=ddp", "batch_size=13")


def test_counts_that_a_pipeline_cannot_split_are_skipped() -> None:
    typed = ("parallel=pipeline", "parallel.num_micro_batches=4", "batch_size=24")
    found, said = fitting(1.5 * needed(1, *typed), FakeTrials(least=3), *typed)
    # Not 3, which is less than twice 2, and not 4, whose micro-batches of 6 samples cannot be split into 4.
    assert found == 6
    assert len(said) == 3


def test_smaller_batches_of_batch_normalization_are_reported() -> None:
    resnet = ("model=resnet18", "data=synthetic", "data.size=8", "data.num_samples=64", "batch_size=16")
    _, said = fitting(1.2 * needed(1, *resnet), FakeTrials(least=2), *resnet)
    assert said[-1].endswith("batch normalization sees smaller batches (model.norm=group avoids this)")
    assert "batch normalization" not in said[0]
