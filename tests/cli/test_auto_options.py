"""Tests of `how=auto` and `accumulation=auto`: what is chosen, when it is measured, and that resumed runs reuse it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.compose import TINY_CPU, compose_config, prepare_session
from helpers.permissions import enforced_permissions

from runner.cli import auto_options
from runner.cli.composition import Job
from runner.config.errors import ConfigError
from runner.planning.choice_cache import Choice, ChoiceCache
from runner.planning.trial import TrialError
from runner.run import build_run, config_hash
from runner.storage import run_directory

DDP = ["parallel=ddp", "parallel.processes=2"]
LONG = (*TINY_CPU, "steps=1000000")


class Measured:
    """A replacement for `measured_choice`: a step takes `step_seconds`, and the fastest overrides are `overrides`.

    Args:
        step_seconds: the time of a step with the config as typed, in seconds.
        overrides: the overrides that are chosen, unless the budget is 0.
    """

    def __init__(self, step_seconds: float, overrides: list[str]):
        self.step_seconds, self.overrides = step_seconds, overrides
        self.budgets: list[float] = []
        self.error: TrialError | None = None

    def __call__(
        self,
        compose: Callable[[Sequence[str]], Any],
        typed: Sequence[str],
        budget: float,
        allowed: Sequence[str],
        report: Callable[[str], None],
        config_dir: str | None,
        budget_for: Callable[[Any, float], float],
    ) -> dict[str, Any]:
        if self.error:
            raise self.error
        self.budgets.append(budget_for(prepare_session(compose(())), self.step_seconds))
        return {"chosen": self.overrides if self.budgets[-1] else [], "speedup": 1.5}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measured:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = Measured(0.01, DDP)
    monkeypatch.setattr(auto_options, "measured_choice", found)
    return found


def choose(*typed: str, auto: Sequence[str] = ("how=auto",), directory: Path | None = None) -> Job:
    def compose(words: Sequence[str]) -> Job:
        return Job(compose_config(*words), list(words))

    return auto_options.with_choices(compose([*typed, *auto]), compose, directory)


def begun(job: Job, parent: Path) -> Path:
    """Create a run directory in `parent` with the config of `job`, and return its path."""
    directory = run_directory.create(parent)
    run_directory.write_config(directory, job.config, job.overrides)
    return directory


def test_a_long_run_is_measured_once(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    job = choose(*LONG)
    assert job.config == compose_config(*LONG, *DDP) | {"how": DDP}
    assert job.overrides == [*LONG, *DDP]
    assert "1.50 ×" in capsys.readouterr().err
    assert choose(*LONG, "seed=3").config["how"] == DDP
    assert len(measured.budgets) == 1


def test_a_short_run_is_trained_with_the_config_as_typed(
    measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    job = choose(*TINY_CPU, "steps=100")
    assert job.config == compose_config(*TINY_CPU, "steps=100") | {"how": []}
    assert measured.budgets == [0]
    assert "too short" in capsys.readouterr().err
    assert choose(*LONG).config["how"] == DDP  # for the short run, no choice was cached


@pytest.mark.parametrize(("step_seconds", "budget"), [(0.001, 60.0), (0.01, 500.0), (1.0, 600.0)])
def test_measuring_takes_5_percent_of_the_run_within_limits(
    measured: Measured, step_seconds: float, budget: float
) -> None:
    measured.step_seconds = step_seconds
    choose(*LONG)
    assert measured.budgets == [pytest.approx(budget)]


def test_the_result_that_nothing_is_faster_is_cached_too(measured: Measured) -> None:
    measured.overrides = []
    assert choose(*LONG).config["how"] == []
    assert choose(*LONG).config["how"] == []
    assert len(measured.budgets) == 1


def test_a_choice_cached_by_another_torch_version_is_measured_again(
    measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    choose(*LONG)
    entry = ChoiceCache(compose_config(*LONG), LONG)
    entry.path.write_text(entry.path.read_text().replace('"torch": "', '"torch": "0'))
    choose(*LONG)
    assert len(measured.budgets) == 2
    assert "another machine or version (torch) and is ignored" in capsys.readouterr().err


def test_a_run_that_cannot_be_measured_is_trained_with_the_config_as_typed(measured: Measured) -> None:
    measured.error = TrialError("its process ended: SIGKILL")
    assert choose(*LONG).config == compose_config(*LONG) | {"how": []}


def test_a_config_that_is_refused_during_measuring_is_a_config_error(measured: Measured) -> None:
    measured.error = TrialError("batch_size: got 63", refused=True)
    with pytest.raises(ConfigError, match="batch_size: got 63"):
        choose(*LONG)


OTHER = ["parallel=fsdp"]
"""The choice that `other_choice` writes to the cache."""


def other_choice(typed: Sequence[str]) -> None:
    ChoiceCache(compose_config(*typed), typed).write(Choice(OTHER, 1.1, "2026-01-31"))


def test_a_resumed_run_keeps_its_choice(measured: Measured, tmp_path: Path) -> None:
    directory = begun(choose(*LONG), tmp_path)
    other_choice(LONG)
    job = choose(*LONG, "resume=auto", directory=directory)
    assert (job.config["how"], job.overrides) == (DDP, [*LONG, "resume=auto", *DDP])
    assert job.config == compose_config(*LONG, "resume=auto", *DDP) | {"how": DDP}
    assert choose(*LONG).config["how"] == OTHER


def test_resume_auto_finds_the_unfinished_run_and_reuses_its_choice(measured: Measured, tmp_path: Path) -> None:
    typed = (*LONG, f"output_root={tmp_path / 'runs'}")
    directory = begun(choose(*typed), tmp_path / "runs" / "test")
    other_choice(typed)
    assert choose(*typed, "resume=auto").config["how"] == DDP
    assert choose(*typed, "resume=never").config["how"] == OTHER
    assert choose(*typed, "resume=auto", "seed=5").config["how"] == OTHER  # there is no run with this config
    (directory / run_directory.RESULT).write_text(json.dumps({"status": "done", "steps": 1_000_000}))
    assert choose(*typed, "resume=auto").config["how"] == OTHER


def test_resume_auto_is_refused_if_the_runs_cannot_be_listed(measured: Measured, tmp_path: Path) -> None:
    (tmp_path / "runs" / "test").mkdir(parents=True)
    with enforced_permissions(tmp_path / "runs", 0), pytest.raises(ConfigError) as refusal:
        choose(*LONG, f"output_root={tmp_path / 'runs'}", "resume=auto")
    assert refusal.value.key == "output_root"


@pytest.mark.parametrize("forged", ["seed=5", "hydra.searchpath=[/tmp]", "parallel=../x", "data.size='9'", 3])
def test_choices_in_a_run_directory_that_set_other_options_are_ignored(
    forged: object, measured: Measured, tmp_path: Path
) -> None:
    """A run directory may come from an untrusted source."""
    seen: list[object] = []

    def compose(words: Sequence[str]) -> Job:
        seen.extend(words)
        return Job(compose_config(*words), list(words))

    directory = begun(Job(compose_config(*LONG, "seed=5") | {"how": [forged]}, []), tmp_path)
    job = auto_options.with_choices(compose([*LONG, "resume=auto", "how=auto"]), compose, directory)
    assert job.config == compose_config(*LONG, "resume=auto", *DDP) | {"how": DDP}
    assert forged not in seen


@pytest.mark.parametrize("how", [(), ("how=auto",)], ids=["accumulation", "both"])
def test_a_resumed_run_keeps_its_number_of_micro_batches(
    how: tuple[str, ...], measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed, auto = (*LONG, f"output_root={tmp_path / 'runs'}"), ("accumulation=auto", *how)
    fitting = [4]
    monkeypatch.setattr(auto_options, "fitting_accumulation", lambda compose, report: fitting[0])
    first = choose(*typed, auto=auto)
    assert first.config["accumulation"]["steps"] == 4
    begun(first, tmp_path / "runs" / "test")
    fitting[0] = 8  # as if another program now used more memory
    again = choose(*typed, "resume=auto", auto=auto)
    assert again.config == first.config | {"resume": "auto"}
    assert choose(*typed, auto=auto).config["accumulation"]["steps"] == 8
    assert choose(*typed, "resume=auto", "seed=5", auto=auto).config["accumulation"]["steps"] == 8


def test_how_auto_is_refused_under_torchrun(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="how"):
        choose(*LONG)


def test_the_choice_does_not_change_the_config_hash() -> None:
    typed = compose_config(*TINY_CPU, *DDP)
    assert config_hash(typed | {"how": DDP}) == config_hash(typed)
    assert build_run(typed | {"how": DDP}).how == DDP


@pytest.mark.parametrize("how", ["fast", "3", "[[a]]", "null"])
def test_other_values_are_refused(how: str) -> None:
    with pytest.raises(ConfigError, match="how"):
        build_run(compose_config(*TINY_CPU, f"how={how}"))
