"""Tests that a run resumes in any other mode, with another number of processes, also after it stops within an epoch."""

import itertools
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import plain_loop as loops
from helpers.compose import TINY_CPU, build_composed_run, compose_config, train_in
from helpers.events import scalar_curves
from helpers.rank_functions import sigterm_at
from helpers.ranks import Ranks
from helpers.runs import assert_bitwise_equal, assert_checkpoint_bitwise_equal, checkpoint_tensors

STEPS = 36
COMMON = ("schedule=constant", f"steps={STEPS}", "batch_size=48", "accumulation=2", "optimizer.lr=0.05")
SCHEDULE = ("log_every=5", "eval_every=9", "save_every=0")
"""No log, evaluation or end of an epoch (30 batches of 1,438 samples) is due where a run stops, at step 16 or 17."""

BEGUN = {"single": 1, "ddp": 2, "fsdp": 3}
GOES_ON = {"single": 1, "ddp": 3, "fsdp": 2}
"""The modes in which a run begins (`BEGUN`) and resumes (`GOES_ON`), with their numbers of processes."""


STOP_AT_16 = partial(sigterm_at, 16, -1)
"""A change of the session: the last rank gets SIGTERM at the end of step 16."""


def train_or_resume(ranks: Ranks, mode: str, processes: int, directory: Path, change: Any = None) -> Any:
    """Begin or resume the run in `directory`."""
    overrides = (*TINY_CPU, *COMMON, *SCHEDULE, f"parallel={mode}")
    return ranks(processes).train(compose_config(*overrides), directory, change)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, ranks: Ranks) -> Path:
    directory = tmp_path_factory.mktemp("uninterrupted")
    train_or_resume(ranks, "single", 1, directory)
    return directory


@pytest.fixture(scope="module")
def begun(tmp_path_factory, ranks: Ranks) -> dict[str, Path]:
    """A stopped run of each mode."""
    directories = {mode: tmp_path_factory.mktemp(mode) for mode in BEGUN}
    for mode, processes in BEGUN.items():
        result = train_or_resume(ranks, mode, processes, directories[mode], STOP_AT_16)
        # Several processes stop a step later, because `any_rank` returns the result of the previous call.
        assert (result.status, result.steps) == ("stopped", 16 if processes == 1 else 17)
    return directories


DEFAULT = (("single", "fsdp"), ("ddp", "single"), ("fsdp", "ddp"))
OTHERS = [each for each in itertools.product(BEGUN, GOES_ON) if each not in DEFAULT]


@pytest.mark.parametrize(
    ("first", "then"), [*DEFAULT, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_a_run_begun_in_one_mode_resumes_in_another(first, then, begun, uninterrupted, ranks, tmp_path):
    directory = Path(shutil.copytree(begun[first], tmp_path / "run"))
    result = train_or_resume(ranks, then, GOES_ON[then], directory)
    assert (result.status, result.steps) == ("done", STEPS)
    assert loops.largest_difference(loops.weights_at(directory, STEPS), loops.weights_at(uninterrupted, STEPS)) <= 1e-6
    got, wanted = momentum(directory), momentum(uninterrupted)
    assert loops.largest_difference(got, wanted) <= 1e-5, "momentum goes on too"
    assert_same_curves(scalar_curves(directory), scalar_curves(uninterrupted))


def momentum(directory: Path) -> dict[str, torch.Tensor]:
    state = torch.load(directory / "checkpoints" / f"step_{STEPS:08d}" / "state.pt", weights_only=True)
    return {name: own["momentum_buffer"] for name, own in state["optimizer"].items()}


def assert_same_curves(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Fail unless curves have the same points: none is missing, repeated or at another step after a resume."""
    assert got.keys() == wanted.keys()
    for tag in wanted:
        assert [step for step, _ in got[tag]] == [step for step, _ in wanted[tag]], tag
        if not tag.startswith(("time/", "memory/", "hparam")):
            assert [value for _, value in got[tag]] == pytest.approx([value for _, value in wanted[tag]], rel=1e-4), tag


@pytest.mark.cases(
    ("ddp", 2, 3),
    ("fsdp", 2, 0),
    ("pipeline", 2, 0),
    pytest.param("fsdp", 3, 2, marks=pytest.mark.slow),
)
def test_resume_with_the_same_number_of_processes_is_bitwise_exact(mode, processes, others, ranks, tmp_path):
    """Not with three processes of ddp: DDP reorders its buckets after the first step, and so what gloo adds up."""
    overrides = (*COMMON, "steps=24", "model.dropout=0.2", "save_every=0", "eval_every=0", f"parallel={mode}")
    overrides += ("parallel.cuts=[conv2]", "parallel.num_micro_batches=2") if mode == "pipeline" else ()
    config = compose_config(*TINY_CPU, *overrides)
    ranks(processes).train(config, tmp_path / "whole")
    result = ranks(processes).train(config, tmp_path / "stopped", STOP_AT_16)
    assert (result.status, result.steps) == ("stopped", 17)
    other = Path(shutil.copytree(tmp_path / "stopped", tmp_path / "other"))
    ranks(processes).train(config, tmp_path / "stopped")
    assert_checkpoint_bitwise_equal(tmp_path / "stopped", checkpoint_tensors(tmp_path / "whole"))
    if others:
        ranks(others).train(config, other)
        difference = loops.largest_difference(loops.weights_at(other, 24), loops.weights_at(tmp_path / "whole", 24))
        assert 1e-6 < difference < 1, "dropped elsewhere, and no more than that"
    if others > processes:
        assert "rank 2 saved nothing in this checkpoint" in (other / "log_rank_2.txt").read_text()


MODES = {
    "single": (),
    "ddp": ("parallel=ddp",),
    "fsdp": ("parallel=fsdp",),
    "pipeline": ("parallel=pipeline",),
    "interleaved": ("parallel=pipeline", "parallel.schedule=interleaved_1f1b", "parallel.batch_norm=defer"),
    "streams": ("parallel=pipeline", "parallel.engine=streams"),
}
CHAINS = [
    ("adamw", "pipeline", "ddp", "single", "pipeline", "interleaved"),
    ("kinds", "ddp", "interleaved", "streams", "fsdp", "pipeline"),
    pytest.param(("adamw", "fsdp", "streams", "pipeline", "fsdp"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("chain", CHAINS, ids=" ".join)
def test_a_run_resumes_in_any_mode(chain, ranks, tmp_path):
    case, *modes = chain
    exact = (
        *TINY_CPU,
        *loops.PLAIN_LOOP_OVERRIDES,
        *loops.ALL_OPTIMIZER_CASES[case][0],
        "precision=64",
        "accumulation=2",
    )
    for step, mode in enumerate(modes, start=1):
        overrides = (*exact, *MODES[mode], f"steps={step}")
        ranks(1 if mode in ("single", "streams") else 2).train(compose_config(*overrides), tmp_path)
    settings = loops.PlainSettings(len(modes), torch.float64)
    wanted = loops.plain_loop(build_composed_run(*exact), loops.ALL_OPTIMIZER_CASES[case][1], settings)
    assert loops.largest_difference(loops.weights_at(tmp_path, len(modes)), wanted.weights) <= 1e-13


def test_the_rates_of_a_plateau_follow_its_evaluations_from_mode_to_mode(ranks, tmp_path):
    plateau = "schedule=plateau schedule.metric=eval/loss schedule.patience=1 schedule.gamma=0.8"
    plateau += " schedule.threshold_mode=abs schedule.threshold=0.016 eval_every=1 log_every=1 precision=64"
    words = (*TINY_CPU, *loops.PLAIN_LOOP_OVERRIDES, *plateau.split())
    ranks(1).train(compose_config(*words, "steps=16"), tmp_path / "whole")
    for steps, mode in ((4, "ddp"), (8, "fsdp"), (12, "pipeline"), (16, "single")):
        options = ("accumulation=2", f"parallel={mode}", f"steps={steps}")
        ranks(1 if mode == "single" else 2).train(compose_config(*words, *options), tmp_path / "chain")
    got, wanted = (scalar_curves(tmp_path / name)["lr"] for name in ("chain", "whole"))
    assert got == wanted
    assert len({rate for _, rate in got}) == 5, "the rate falls after other steps than those at which the mode changes"


# Hogwild; for ensembles, see test_ensemble.py
def train_from(directory: Path, *overrides: str) -> Any:
    """Begin or resume the run in `directory`, in processes that the mode starts, and return the result."""
    return train_in(directory, build_composed_run(*TINY_CPU, *COMMON, "data.crop=0", *SCHEDULE, *overrides)).result


def test_a_single_process_resumes_two_hogwild_workers(tmp_path):
    """It continues with the optimizer state of the first worker, like a plain loop from the same checkpoint."""
    train_from(tmp_path, "parallel=hogwild", "steps=16", "precision=64")  # float64, so that rounding errors are small
    plain = build_composed_run(*TINY_CPU, *COMMON, "data.crop=0")
    checkpoint = tmp_path / "checkpoints" / "step_00000016"
    wanted = loops.plain_loop_from(
        checkpoint, plain, loops.OPTIMIZER_CASES["sgd"][1], loops.PlainSettings(STEPS, torch.float64)
    ).weights
    result = train_from(tmp_path, "parallel=single", "precision=64")
    assert (result.status, result.steps) == ("done", STEPS)
    assert loops.largest_difference(loops.weights_at(tmp_path, STEPS), wanted) <= 1e-12


def test_hogwild_workers_resume_a_single_process(uninterrupted, begun, tmp_path):
    one, three = (Path(shutil.copytree(begun["single"], tmp_path / name)) for name in ("one", "three"))
    train_from(one, "data.crop=2", "parallel=hogwild", "parallel.processes=1")
    assert_bitwise_equal(loops.weights_at(one, STEPS), loops.weights_at(uninterrupted, STEPS))
    result = train_from(three, "data.crop=2", "parallel=hogwild", "parallel.processes=3")
    assert (result.status, result.steps) == ("done", STEPS)
    assert sum(value for _, value in scalar_curves(three)["hogwild/updates"]) == STEPS - 16
    assert [step for step, _ in scalar_curves(three)["train/loss"]][:3] == [5, 10, 15]
