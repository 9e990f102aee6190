"""Tests of `runner.cli.preload_options`, which composes options in a sweep's fork server before the jobs run."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import pytest

from runner.api.composing import compose, compose_run, composer_of
from runner.cli import config_loader
from runner.sweep.engines import local
from runner.sweep.engines.local import FIRST_JOB, Local

CHOICES = ["model=tiny", "data=digits", "precision='16'"]


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_loader, "_kept", {})


def preload(monkeypatch: pytest.MonkeyPatch, overrides: list[str], config_dir: str | None = None) -> None:
    monkeypatch.setenv(FIRST_JOB, json.dumps([overrides, config_dir]))
    runpy.run_module("runner.cli.preload_options")


def test_a_job_with_the_same_options_uses_the_cached_config(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*CHOICES, "seed=1", "optimizer.lr=0.5"]
    expected = compose(words)
    config_loader._kept.clear()
    preload(monkeypatch, [*CHOICES, "seed=0"])
    [kept] = config_loader._kept
    job = compose_run(composer_of(words, None), words)  # as the command composes it
    assert job.config == expected
    assert list(config_loader._kept) == [kept]


def test_options_from_a_config_dir_are_cached_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("defaults: [tiny]\nwidth: 3\n")
    preload(monkeypatch, ["model=small", "seed=0"], str(tmp_path))
    [kept] = config_loader._kept
    words = ["model=small", "seed=1"]
    job = compose_run(composer_of(words, str(tmp_path)), words)
    assert job.config["model"]["width"] == 3
    assert list(config_loader._kept) == [kept]


@pytest.mark.parametrize("overrides", [["model=nope"], ["seed="], ["--cfg", "job"], ["optimizer.lr=1,2"]])
def test_an_error_in_composing_is_silent_because_the_job_reports_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], overrides: list[str]
) -> None:
    preload(monkeypatch, overrides)
    assert capfd.readouterr() == ("", "")


def test_an_experiment_with_sweep_params_is_composed_silently(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    preload(monkeypatch, ["experiment=split_size"])
    assert len(config_loader._kept) == 1
    assert capfd.readouterr() == ("", "")


def test_the_overrides_are_in_the_environment_of_the_fork_server_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(local, "start_server", lambda *modules: seen.append(os.environ[FIRST_JOB]))
    Local().prepare(["model=tiny"], "mine")
    assert json.loads(*seen) == [["model=tiny"], "mine"]
    assert FIRST_JOB not in os.environ
