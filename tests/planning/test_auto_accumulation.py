"""Tests of `accumulation=auto`: the fewest micro-batches that fit, by a plan or, if it is unclear, by a trial."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.compose import TINY_CPU, build_composed_run, compose_config
from helpers.handmade_runs import write_config

from runner.config.composition import Job
from runner.config.errors import ConfigError
from runner.planning import auto_accumulation
from runner.planning.auto_accumulation import fitting_accumulation, needed_bytes
from runner.planning.fake_step import prepared, trace_ranks
from runner.planning.trial import Burst, TrialError
from runner.run import Run
from runner.storage import run_directory

TYPED = ("model=tiny", "data.size=8", "device=cpu", "batch_size=512")
AUTO = "accumulation=auto"


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


def fit(memory: float, attempts: FakeTrials, *typed: str) -> tuple[int, list[str]]:
    def compose(count: int) -> Run:
        return build_composed_run(*TYPED, *typed, "accumulation=1", f"accumulation.steps={count}")

    said: list[str] = []
    found = fitting_accumulation(compose, said.append, lambda session: memory, attempts)  # type: ignore[arg-type]
    return found, said


def needed(count: int, *typed: str) -> float:
    run = build_composed_run(*TYPED, *typed, f"accumulation.steps={count}")
    session = prepared(run)
    return needed_bytes(session.device, [rank.peak_bytes for rank in trace_ranks(run, session)])


def test_what_clearly_fits_or_is_predicted_not_to_fit_is_not_tried():
    attempts = FakeTrials()
    assert fit(100e9, attempts)[0] == 1
    assert attempts.counts == []
    between = (needed(2) + needed(4)) / 2
    found, said = fit(between, attempts)
    assert (found, attempts.counts) == (4, [4])
    assert [line.split(":")[0] for line in said] == ["1 micro-batch", "2 micro-batches", "4 micro-batches"]


def test_micro_batches_are_divided_further_after_running_out_of_memory_but_not_after_another_error():
    memory, attempts = 1.5 * needed(1), FakeTrials(least=8)
    assert fit(memory, attempts)[0] == 8
    assert attempts.counts == [1, 2, 4, 8]  # none is skipped, because the prediction was wrong
    attempts = FakeTrials(error=TrialError("RuntimeError: something else"))
    with pytest.raises(TrialError, match="something else"):
        fit(memory, attempts)
    assert attempts.counts == [1]


def test_a_run_that_does_not_fit_at_all_is_refused():
    with pytest.raises(ConfigError, match="accumulation") as caught:
        fit(1e6, FakeTrials(), "batch_size=2")
    assert "fsdp" in str(caught.value)


def test_the_processes_share_the_batch():
    found, _ = fit(1e9, FakeTrials(least=6), "parallel=ddp", "batch_size=12")
    assert found == 6
    with pytest.raises(ConfigError, match="batch_size"):
        fit(100e9, FakeTrials(), "parallel=ddp", "batch_size=13")


def test_counts_that_a_pipeline_cannot_split_are_skipped():
    typed = ("parallel=pipeline", "parallel.num_micro_batches=2", "batch_size=12")
    found, said = fit(1e9, FakeTrials(least=3), *typed)
    # Not 3, which is less than twice 2, and not 4, whose micro-batches of 3 samples cannot be split into 2.
    assert found == 6
    assert len(said) == 3


def test_smaller_batches_of_batch_normalization_are_reported():
    resnet = ("model=resnet18", "data=synthetic", "data.size=8", "data.num_samples=64", "batch_size=16")
    _, said = fit(0.7e9, FakeTrials(least=2), *resnet)
    assert said[-1].endswith("batch normalization sees smaller batches (model.norm=group avoids this)")
    assert "batch normalization" not in said[0]


@pytest.fixture
def chosen(monkeypatch) -> list[int]:
    """A list with the number of micro-batches that fit."""
    found = [4]
    monkeypatch.setattr(auto_accumulation, "fitting_accumulation", lambda compose, report: found[0])
    return found


def choose(*typed: str, directory: Path | None = None) -> Job:
    def compose(words: Sequence[str]) -> Job:
        return Job(compose_config(*words), list(words))

    return auto_accumulation.resolve_auto_accumulation(compose(typed), compose, directory)


def steps(*typed: str, directory: Path | None = None) -> object:
    return choose(*typed, directory=directory).config["accumulation"]["steps"]


def begun(job: Job, parent: Path) -> Path:
    """Create a run directory in `parent` with the config of `job`, and return its path."""
    directory = run_directory.create(parent)
    write_config(directory, job.config, job.overrides)
    return directory


def test_the_number_that_fits_becomes_part_of_the_config(chosen):
    job = choose(*TINY_CPU, AUTO)
    assert job.overrides == [*TINY_CPU, "accumulation=1", "accumulation.steps=4"]
    assert job.config == compose_config(*TINY_CPU, "accumulation=4")
    assert choose(*TINY_CPU, "accumulation=2").overrides == [*TINY_CPU, "accumulation=2"]


def test_a_resumed_run_keeps_its_number_of_micro_batches(chosen, tmp_path):
    typed = (*TINY_CPU, f"output_root={tmp_path / 'runs'}", AUTO)
    first = choose(*typed)
    directory = begun(first, tmp_path / "runs" / "test")
    chosen[0] = 8  # as if another program now used more memory
    assert choose(*typed, "resume=auto").config == first.config | {"resume": "auto"}
    assert steps(*typed, "resume=auto", directory=directory) == 4
    assert steps(*typed) == 8
    assert steps(*typed, "resume=auto", "seed=5") == 8, "there is no run with this config"
    (directory / run_directory.RESULT).write_text(json.dumps({"status": "done", "steps": 1_000_000}))
    assert steps(*typed, "resume=auto") == 8


@pytest.mark.parametrize("forged", ["seed=5", 0, 3, True, [4], 10**30])
def test_a_number_that_cannot_be_is_not_taken_from_a_run_directory(forged, chosen, tmp_path):
    """A run directory may come from an untrusted source."""
    config = compose_config(*TINY_CPU)
    directory = begun(Job(config | {"accumulation": config["accumulation"] | {"steps": forged}}, []), tmp_path)
    assert steps(*TINY_CPU, "batch_size=64", "resume=auto", AUTO, directory=directory) == 4


def test_a_trial_that_fails_is_a_config_error(monkeypatch):
    def fail(*_: object) -> int:
        raise TrialError("batch_size: got 63", "refused")

    monkeypatch.setattr(auto_accumulation, "fitting_accumulation", fail)
    with pytest.raises(ConfigError, match="batch_size: got 63"):
        choose(*TINY_CPU, AUTO)


def test_auto_is_refused_under_torchrun(chosen, monkeypatch):
    started = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (started | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="accumulation"):
        choose(*TINY_CPU, AUTO)


def test_auto_counts_as_one_until_it_is_replaced():
    assert build_composed_run(*TINY_CPU, AUTO).accumulation.count == 1
    with pytest.raises(ConfigError, match="accumulation"):
        build_composed_run(*TINY_CPU, "accumulation.steps=many")
