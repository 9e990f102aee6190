"""A checkpoint has no mode: begun in one, stopped within an epoch, and resumed in another with other processes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compose import FAST, built, composed
from helpers.events import curves
from helpers.plain_loop import CASES, largest_difference, plain_loop, weights_at
from helpers.ranks import Ranks, prepared
from test_resume import assert_same

from runner.run import Run
from runner.train import train

STEPS = 36
COMMON = ("schedule=constant", f"steps={STEPS}", "batch_size=48", "accumulation=2", "optimizer.lr=0.05")
SCHEDULE = ("log_every=5", "eval_every=9", "save_every=0")
"""1,438 samples make 30 batches an epoch. Where a run stops (16 or 17), no log, evaluation or epoch ends."""

BEGUN = {"single": 1, "dp": 1, "ddp": 2, "fsdp": 3}
GOES_ON = {"single": 1, "dp": 1, "ddp": 3, "fsdp": 2}
"""Modes, and with how many processes."""


def stop_at_16(run: Run) -> None:
    """The last process is asked to stop as it ends step 16."""

    def after_step(_: torch.nn.Module, step: int) -> None:
        if step == 16 and run.parallel.rank == run.parallel.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    run.workload.after_step = after_step


def do(
    ranks: Callable[[int], Ranks],
    mode: str,
    processes: int,
    directory: Path,
    change: Callable[[Run], None] | None = None,
) -> Any:
    """Begin or resume the run in `directory`."""
    config = composed(*FAST, *COMMON, *SCHEDULE, f"parallel={mode}")
    if processes > 1:
        return ranks(processes).train(config, directory, change)
    directory.mkdir(exist_ok=True)
    return train(prepared(config, directory, change))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, ranks: Callable[[int], Ranks]) -> Path:
    directory = tmp_path_factory.mktemp("uninterrupted")
    do(ranks, "single", 1, directory)
    return directory


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, ranks: Callable[[int], Ranks]) -> dict[str, Path]:
    """A stopped run of each mode."""
    directories = {mode: tmp_path_factory.mktemp(mode) for mode in BEGUN}
    for mode, processes in BEGUN.items():
        result = do(ranks, mode, processes, directories[mode], stop_at_16)
        # Processes hear of it a step later: the question travels while they compute.
        assert (result.status, result.steps) == ("stopped", 16 if processes == 1 else 17)
    return directories


@pytest.mark.parametrize("then", GOES_ON)
@pytest.mark.parametrize("first", BEGUN)
def test_begun_in_one_mode_resumed_in_another(
    first: str, then: str, begun: dict[str, Path], uninterrupted: Path, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(begun[first], tmp_path / "run"))
    result = do(ranks, then, GOES_ON[then], directory)
    assert (result.status, result.steps) == ("done", STEPS)
    assert largest_difference(weights_at(directory, STEPS), weights_at(uninterrupted, STEPS)) <= 1e-6
    got, wanted = moments(directory), moments(uninterrupted)
    assert largest_difference(got, wanted) <= 1e-5, "momentum goes on too"
    assert_same_curves(curves(directory), curves(uninterrupted))


def moments(directory: Path) -> dict[str, torch.Tensor]:
    state = torch.load(directory / "checkpoints" / f"step_{STEPS:08d}" / "state.pt", weights_only=True)
    return {name: moments["momentum_buffer"] for name, moments in state["optimizer"].items()}


def assert_same_curves(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Without a gap and without a point twice: the window that was open at the stop is closed where it would be."""
    assert got.keys() == wanted.keys()
    for tag in wanted:
        assert [step for step, _ in got[tag]] == [step for step, _ in wanted[tag]], tag
        if not tag.startswith(("time/", "memory/", "hparam")):
            assert [value for _, value in got[tag]] == pytest.approx([value for _, value in wanted[tag]], rel=1e-4), tag


@pytest.mark.parametrize(("mode", "processes", "others"), [("ddp", 2, 3), ("fsdp", 3, 2)])
def test_random_numbers_go_on_or_begin_anew(
    mode: str, processes: int, others: int, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """With as many processes a run that draws some ends where one left in peace ends, to the last bit.

    Three ddp processes do so to a rounding: which of them gloo begins a sum with changes as DDP orders its buckets anew
    after the first step of a session. Two numbers have one sum.
    """
    overrides = (*COMMON, "steps=24", "model.dropout=0.2", "save_every=0", "eval_every=0", f"parallel={mode}")
    config = composed(*FAST, *overrides)
    ranks(processes).train(config, tmp_path / "whole")
    ranks(processes).train(config, tmp_path / "stopped", stop_at_16)
    other = Path(shutil.copytree(tmp_path / "stopped", tmp_path / "other"))
    ranks(processes).train(config, tmp_path / "stopped")
    wanted = weights_at(tmp_path / "whole", 24)
    assert_same(weights_at(tmp_path / "stopped", 24), wanted)
    ranks(others).train(config, other)
    assert 1e-6 < largest_difference(weights_at(other, 24), wanted) < 1, "dropped elsewhere, and no more than that"
    if others > processes:
        told = "rank 2 was not there when this was saved: its random numbers begin anew"
        assert told in (other / "log_rank_2.txt").read_text()


# ---------------------------------------------------------------------------------------------------------------------
# Of hogwild; an ensemble's are in test_ensemble.py


def launched(directory: Path, *overrides: str) -> Any:
    directory.mkdir(exist_ok=True)
    run = built(*FAST, *COMMON, "data.crop=0", *SCHEDULE, *overrides)
    run.prepare()
    run.directory = directory
    return run.parallel.launch(train, run)


def test_what_two_hogwild_workers_left_goes_on_alone(tmp_path: Path) -> None:
    """With the first worker's moments: a plain loop that begins with them ends there too."""
    launched(tmp_path, "parallel=hogwild", "steps=16", "precision=64")  # where no rounding sends a gradient elsewhere
    plain = built(*FAST, *COMMON, "data.crop=0")
    checkpoint = tmp_path / "checkpoints" / "step_00000016"
    wanted = plain_loop(plain, CASES["sgd"][1], steps=STEPS, after=checkpoint, dtype=torch.float64).weights
    result = launched(tmp_path, "parallel=single", "precision=64")
    assert (result.status, result.steps) == ("done", STEPS)
    assert largest_difference(weights_at(tmp_path, STEPS), wanted) <= 1e-12


def test_a_single_run_goes_on_as_hogwild(uninterrupted: Path, begun: dict[str, Path], tmp_path: Path) -> None:
    one, three = (Path(shutil.copytree(begun["single"], tmp_path / name)) for name in ("one", "three"))
    launched(one, "data.crop=2", "parallel=hogwild", "parallel.processes=1")
    assert_same(weights_at(one, STEPS), weights_at(uninterrupted, STEPS))
    result = launched(three, "data.crop=2", "parallel=hogwild", "parallel.processes=3")
    assert (result.status, result.steps) == ("done", STEPS)
    assert sum(value for _, value in curves(three)["hogwild/updates"]) == STEPS - 16
    assert [step for step, _ in curves(three)["train/loss"]][:3] == [5, 10, 15]
