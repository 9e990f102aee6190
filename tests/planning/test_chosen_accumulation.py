"""Tests of `accumulation=auto` in the config of a run: what replaces it, and that a resumed run keeps its number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.compose import TINY_CPU, build_composed_run, compose_config
from helpers.handmade_runs import write_config
from helpers.permissions import enforced_permissions

from runner.config.composition import Job
from runner.config.errors import ConfigError
from runner.planning import auto_accumulation
from runner.planning.trial import TrialError
from runner.storage import run_directory

AUTO = "accumulation=auto"


@pytest.fixture
def fitting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list with the number of micro-batches that fit."""
    found = [4]
    monkeypatch.setattr(auto_accumulation, "fitting_accumulation", lambda compose, report: found[0])
    return found


def choose(*typed: str, directory: Path | None = None) -> Job:
    def compose(words: Sequence[str]) -> Job:
        return Job(compose_config(*words), list(words))

    return auto_accumulation.with_accumulation(compose(typed), compose, directory)


def steps(*typed: str, directory: Path | None = None) -> object:
    return choose(*typed, directory=directory).config["accumulation"]["steps"]


def begun(job: Job, parent: Path) -> Path:
    """Create a run directory in `parent` with the config of `job`, and return its path."""
    directory = run_directory.create(parent)
    write_config(directory, job.config, job.overrides)
    return directory


def test_the_number_that_fits_becomes_part_of_the_config(fitting: list[int]) -> None:
    job = choose(*TINY_CPU, AUTO)
    assert job.overrides == [*TINY_CPU, "accumulation=1", "accumulation.steps=4"]
    assert job.config == compose_config(*TINY_CPU, "accumulation=4")
    assert choose(*TINY_CPU, "accumulation=2").overrides == [*TINY_CPU, "accumulation=2"]


def test_a_resumed_run_keeps_its_number_of_micro_batches(fitting: list[int], tmp_path: Path) -> None:
    typed = (*TINY_CPU, f"output_root={tmp_path / 'runs'}", AUTO)
    first = choose(*typed)
    directory = begun(first, tmp_path / "runs" / "test")
    fitting[0] = 8  # as if another program now used more memory
    assert choose(*typed, "resume=auto").config == first.config | {"resume": "auto"}
    assert steps(*typed, "resume=auto", directory=directory) == 4
    assert steps(*typed) == 8
    assert steps(*typed, "resume=auto", "seed=5") == 8, "there is no run with this config"
    (directory / run_directory.RESULT).write_text(json.dumps({"status": "done", "steps": 1_000_000}))
    assert steps(*typed, "resume=auto") == 8


@pytest.mark.parametrize("forged", ["seed=5", 0, 3, True, [4], 10**30])
def test_a_number_that_cannot_be_is_not_taken_from_a_run_directory(
    forged: object, fitting: list[int], tmp_path: Path
) -> None:
    """A run directory may come from an untrusted source."""
    config = compose_config(*TINY_CPU)
    directory = begun(Job(config | {"accumulation": config["accumulation"] | {"steps": forged}}, []), tmp_path)
    assert steps(*TINY_CPU, "batch_size=64", "resume=auto", AUTO, directory=directory) == 4


def test_resume_auto_is_refused_if_the_runs_cannot_be_listed(fitting: list[int], tmp_path: Path) -> None:
    (tmp_path / "runs" / "test").mkdir(parents=True)
    with enforced_permissions(tmp_path / "runs", 0), pytest.raises(ConfigError) as refusal:
        choose(*TINY_CPU, f"output_root={tmp_path / 'runs'}", "resume=auto", AUTO)
    assert refusal.value.key == "output_root"


def test_a_trial_that_fails_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise TrialError("batch_size: got 63", "refused")

    monkeypatch.setattr(auto_accumulation, "fitting_accumulation", fail)
    with pytest.raises(ConfigError, match="batch_size: got 63"):
        choose(*TINY_CPU, AUTO)


def test_auto_is_refused_under_torchrun(fitting: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    started = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (started | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="accumulation"):
        choose(*TINY_CPU, AUTO)


def test_auto_counts_as_one_until_it_is_replaced() -> None:
    assert build_composed_run(*TINY_CPU, AUTO).accumulation.count == 1
    with pytest.raises(ConfigError, match="accumulation"):
        build_composed_run(*TINY_CPU, "accumulation.steps=many")
