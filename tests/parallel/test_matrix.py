"""Tests of the README's matrix: runs with all pairs of mode, precision and accumulation; all triples are slow."""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
from helpers.compose import TINY_CPU, build_composed_run, compose_config, train_in
from helpers.ranks import train_on_rank as train_in_rank

from runner.config.options import option_files
from runner.parallel.collectives import Collectives
from runner.run import build_run
from runner.training import train

MODES = ("single", "dp", "ddp", "fsdp", "ensemble", "hogwild")
PRECISIONS = sorted(option_files()["precision"])
ACCUMULATIONS = sorted({*option_files()["accumulation"]} - {"auto"})  # `auto` becomes a number before a run begins
OVERRIDES = (*TINY_CPU, "steps=2", "batch_size=32", "schedule=constant", "log_every=2", "eval_every=0")
OVERRIDES += ("data.holdout=0.01",)

TOLERANCES = {"16": 0.01, "bf16": 0.01}
"""Relative tolerances of the mean loss of two steps for precisions that round to 16 bits; otherwise 1e-5."""

MODE_TOLERANCES = {"hogwild": 0.02, "ensemble": 0.05}
"""Relative tolerances for modes whose second step starts from other weights, or that average over models."""


def cell(mode: str, precision: str, accumulation: str) -> tuple[str, ...]:
    return (*OVERRIDES, f"parallel={mode}", f"precision={precision}", f"accumulation={accumulation}")


def accumulations(mode: str, precision: str, every: bool) -> list[str]:
    """Return all accumulations, or one: another for each mode and precision, so that all pairs are tested."""
    place = MODES.index(mode) + PRECISIONS.index(precision)
    return ACCUMULATIONS if every else [ACCUMULATIONS[place % len(ACCUMULATIONS)]]


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["selected", "all"])
def every(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def baseline(tmp_path_factory) -> float:
    """The mean training loss of a single process in float32."""
    run = build_composed_run(*cell("single", "32", "1"))
    return train_in(tmp_path_factory.mktemp("single"), run).result.metrics["train/loss"]


def check(result: Any, mode: str, precision: str, baseline: float) -> None:
    assert (result.status, result.steps) == ("done", 2)
    tolerance = max(TOLERANCES.get(precision, 1e-5), MODE_TOLERANCES.get(mode, 0))
    assert result.metrics["train/loss"] == pytest.approx(baseline, rel=tolerance)


@pytest.mark.parametrize(("mode", "precision"), list(itertools.product(MODES[:-1], PRECISIONS)))
def test_in_one_or_two_processes(mode, precision, every, baseline, ranks, tmp_path):
    configs = {each: compose_config(*cell(mode, precision, each)) for each in accumulations(mode, precision, every)}
    in_one = mode in ("single", "dp")
    for result in train_all(configs, tmp_path) if in_one else ranks(2).call_on_all(train_all, configs, tmp_path)[0]:
        check(result, mode, precision, baseline)


def train_all(configs: dict[str, dict[str, Any]], root: Path) -> list[Any]:
    return [train_in_rank(config, root / name) for name, config in configs.items()]


def test_in_two_workers_that_share_one_model(every, baseline, tmp_path):
    """All cells run in the same two workers, whose shared memory is large enough for a model in float64."""
    cells = [(precision, each) for precision in PRECISIONS for each in accumulations("hogwild", precision, every)]
    configs = {"_".join(names): compose_config(*cell("hogwild", *names)) for names in cells}
    work = functools.partial(train_all_together, configs)
    results: Any = train_in(tmp_path, build_composed_run(*cell("hogwild", "64", "1")), train_rank=work).result
    for (precision, _), result in zip(cells, results, strict=True):
        check(result, "hogwild", precision, baseline)


def train_all_together(
    configs: dict[str, dict[str, Any]], _: dict[str, Any], directory: Path, process: Collectives
) -> list[Any]:
    """In a worker: train all `configs`, and return their results."""
    results = []
    for name, config in configs.items():
        (directory / name).mkdir(exist_ok=True)
        run = build_run(config)
        results.append(train(run, run.prepare(process), directory / name))
    return results


def test_every_mode_is_in_the_matrix():
    """The modes that split the network are excepted; they are tested in tests/parallel/pipelining."""
    assert set(option_files()["parallel"]) - {"model", "pipeline"} == set(MODES)
