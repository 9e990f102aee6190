"""Tests of pipelines against one process: what `test_parity_modes` does not cover."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.compose import TINY_CPU, build_composed_run, compose_config, train_in
from helpers.events import scalar_curves
from helpers.narrow_resnet import use_narrow_resnet
from helpers.plain_loop import PLAIN_LOOP_OVERRIDES, largest_difference, weights_at
from helpers.rank_functions import overflow_at

from runner.parallel.session import Session
from runner.run import Run, build_run
from runner.training import prepare

COMMON = (*TINY_CPU, *PLAIN_LOOP_OVERRIDES, "steps=3", "optimizer.lr=0.05")
PIPELINE = (*COMMON, "parallel=pipeline")


def run_here(directory: Path, *overrides: str, change: Any = None) -> None:
    train_in(directory, build_composed_run(*overrides), change)


def test_middle_stages_read_no_samples_and_only_the_first_one_evaluates(ranks, tmp_path):
    result = ranks(3).train(compose_config(*PIPELINE), tmp_path / "three", read_as_little_as_possible)
    assert (result.status, result.steps) == ("done", 3)
    run_here(tmp_path / "one", *COMMON)
    assert largest_difference(weights_at(tmp_path / "three", 3), weights_at(tmp_path / "one", 3)) <= 1e-6


def read_as_little_as_possible(run: Run, session: Session) -> None:
    read = mock.Mock(side_effect=AssertionError("reads samples"))
    if session.rank == 1:
        session.workload.batches = read
    if session.rank > 0:
        session.workload.evaluate = read


@pytest.mark.parametrize("log_every", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_all_stages_skip_an_update_if_a_gradient_of_one_stage_overflows(log_every, ranks, tmp_path):
    overrides = (*COMMON, "steps=10", "precision=16", f"log_every={log_every}", "schedule=onecycle")
    run_here(tmp_path / "one", *overrides, "accumulation=8", change=partial(overflow_at, 2))
    config = compose_config(*overrides, "parallel=pipeline", "parallel.num_micro_batches=8")
    ranks(2).train(config, tmp_path / "two", partial(overflow_at, 2))
    assert largest_difference(weights_at(tmp_path / "two", 10), weights_at(tmp_path / "one", 10)) <= 1e-6
    for tag, last in (("train/skipped_steps", 1.0), ("train/loss_scale", 512.0)):
        logged = [scalar_curves(tmp_path / name)[tag] for name in ("one", "two")]
        assert logged[0] == logged[1]
        assert logged[0][-1][1] == last


BATCH_NORM = (*COMMON, "model=resnet18", "data.size=16", "data.holdout=0.02", "batch_size=12", "optimizer.lr=0.002")
BATCH_NORM += ("precision=64", "steps=2")


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory) -> Path:
    """The run directory of one device that accumulates over three micro-batches."""
    directory = tmp_path_factory.mktemp("accumulated")
    run_here(directory, *BATCH_NORM, "accumulation.steps=3", change=use_narrow_resnet)
    return directory


@pytest.mark.parametrize("engine", ["processes", "streams"])
def test_batch_normalization_uses_the_statistics_of_each_micro_batch(engine, accumulated, ranks, tmp_path):
    """Running statistics are compared too, also after a resume in stages that are cut elsewhere."""
    overrides = (*BATCH_NORM, "parallel=pipeline", "parallel.split_size=4", f"parallel.engine={engine}")
    if engine == "streams":
        run_here(tmp_path, *overrides, change=use_narrow_resnet)
    else:
        for more in (("parallel.cuts=[layer2.0]", "steps=1"), ("parallel.cuts=[layer3.1]",)):
            ranks(2).train(compose_config(*overrides, *more), tmp_path, use_narrow_resnet)
    assert largest_difference(weights_at(tmp_path, 2), weights_at(accumulated, 2)) <= 1e-13


def test_deferred_statistics_are_those_of_the_whole_batch(ranks, tmp_path):
    """Running statistics are compared in the first layer, whose inputs do not depend on micro-batches."""
    short = ("data.size=32", "steps=1")  # with smaller images, two samples have too few values in the last layers
    run_here(tmp_path / "one", *BATCH_NORM, *short, change=use_narrow_resnet)
    options = (*short, "parallel=pipeline", "parallel.batch_norm=defer", "accumulation=2", "parallel.split_size=2")
    more = ("model.checkpoint_activations=true",)  # the forward pass runs twice, but counts once
    for name, steps, cut in (("whole", 2, "layer2.0"), ("recut", 1, "layer2.0"), ("recut", 2, "layer3.1")):
        config = compose_config(*BATCH_NORM, *options, *more, f"steps={steps}", f"parallel.cuts=[{cut}]")
        ranks(2).train(config, tmp_path / name, use_narrow_resnet)
    assert largest_difference(*(weights_at(tmp_path / name, 2) for name in ("recut", "whole"))) <= 1e-13
    whole, parts = (weights_at(tmp_path / name, 1) for name in ("one", "recut"))
    for name in ("bn1.running_mean", "bn1.running_var"):
        assert parts[name].numpy() == pytest.approx(whole[name].numpy(), rel=1e-12, abs=1e-15)
    assert parts.keys() == whole.keys()
    assert {int(tensor) for name, tensor in parts.items() if name.endswith("num_batches_tracked")} == {1}


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b"])
def test_each_process_holds_only_its_own_stages(schedule, ranks, tmp_path):
    names = ranks(2).call_on_all(names_held, compose_config(*PIPELINE, f"parallel.schedule={schedule}"), tmp_path)
    build = build_composed_run(*TINY_CPU).workload.model.build
    everything = {name for name, _ in build((1, 8, 8), 10).named_parameters()}
    assert set(names[0]) | set(names[1]) == everything
    assert not set(names[0]) & set(names[1])
    assert all(names)


def names_held(config: dict[str, Any], directory: Path) -> list[str]:
    """Return the names of this process's parameters, after asserting that its optimizer updates the same parameters."""
    run = build_run(config)
    with run.parallel.launcher(run.device).connect() as process:
        state = prepare(run, run.prepare(process), directory)
    held = dict(state.model.named_parameters())
    assert {id(p) for group in state.optimizer.param_groups for p in group["params"]} == {id(p) for p in held.values()}
    return list(held)


def test_a_loss_that_is_not_finite_stops_all_processes(ranks, tmp_path):
    result = ranks(2).train(compose_config(*PIPELINE, "optimizer.lr=1000", "steps=30"), tmp_path)
    assert result.status == "diverged"
    assert "is not finite at step" in result.error
