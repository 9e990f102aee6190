"""Members that differ by their seed alone, and what they say together."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.compose import FAST, built, composed
from helpers.events import curves
from helpers.plain_loop import weights_at
from helpers.ranks import Ranks
from test_resume import assert_same, outcome

from runner.config.errors import ConfigError
from runner.run import Run
from runner.train import train

STEPS = 12
HARD = ("data.crop=2", "model.dropout=0.2", "accumulation=2", "batch_size=32", "schedule=constant", "optimizer.lr=0.1")
OVERRIDES = (*HARD, f"steps={STEPS}", "log_every=3", "eval_every=6", "save_every=6", "seed=5")


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three members that the mode started."""
    return whole_ensemble(tmp_path_factory.mktemp("ensemble"))


def whole_ensemble(directory: Path) -> Path:
    run = built(*FAST, *OVERRIDES, "parallel=ensemble", "parallel.processes=3")
    run.prepare()
    run.directory = directory
    run.parallel.launch(train, run)
    return directory


@pytest.fixture(scope="module")
def solos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The three runs that the members are."""
    directories = []
    for member in range(3):
        run = built(*FAST, *OVERRIDES[:-1], f"seed={5 + member}")
        run.prepare()
        run.directory = tmp_path_factory.mktemp("solo")
        train(run)
        directories.append(run.directory)
    return directories


def members(directory: Path, step: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """Every member's weights in a checkpoint."""
    path = directory / "checkpoints" / f"step_{step:08d}"
    others = [torch.load(path / f"rank_{rank}.pt", weights_only=True)["parallel"]["tensors"] for rank in (1, 2)]
    return [weights_at(directory, step), *others]


def test_each_member_is_its_solo_run_to_the_last_bit(ensemble: Path, solos: list[Path]) -> None:
    for step in (6, STEPS):
        assert_same(members(ensemble, step), [weights_at(solo, step) for solo in solos])
    shared = torch.load(ensemble / "checkpoints" / f"step_{STEPS:08d}" / "state.pt", weights_only=True)
    assert_same(shared["optimizer"], outcome(solos[0])["state"]["optimizer"])


def test_the_ensemble_answers_by_its_mean_probability(ensemble: Path, solos: list[Path]) -> None:
    run, logged = built(*FAST, *OVERRIDES), curves(ensemble)
    run.prepare()
    held_out = run.workload.held_out  # pyright: ignore[reportAttributeAccessIssue]
    for point, step in enumerate((6, STEPS)):
        outputs = []
        for weights in members(ensemble, step):
            model = run.workload.build_model()
            model.load_state_dict(weights)
            with torch.no_grad():
                outputs.append(model.eval()(held_out.inputs).double())
        probabilities = torch.stack([output.softmax(1) for output in outputs]).mean(0)
        answers = probabilities.argmax(1)
        chosen = probabilities[torch.arange(len(answers)), held_out.targets]
        wanted = {
            "eval/loss": -chosen.log().mean(),
            "eval/accuracy": (answers == held_out.targets).double().mean(),
            "eval/disagreement": torch.stack([(o.argmax(1) != answers).double().mean() for o in outputs]).mean(),
        }
        assert {tag: logged[tag][point] for tag in wanted} == {
            tag: (step, pytest.approx(float(value), rel=1e-5)) for tag, value in wanted.items()
        }
    assert float(wanted["eval/disagreement"]) > 0.01
    for member, solo in enumerate(solos):
        own = curves(solo)
        for name in ("loss", "accuracy"):
            assert logged[f"eval/member_{member}/{name}"] == own[f"eval/{name}"]


def test_tags_are_those_of_a_single_run_and_the_members(ensemble: Path, solos: list[Path]) -> None:
    own = {f"eval/member_{member}/{name}" for member in range(3) for name in ("loss", "accuracy")}
    assert curves(ensemble).keys() - curves(solos[0]).keys() == own | {"eval/disagreement"}
    means = [sum(points) / 3 for points in zip(*(values(solo, "train/loss") for solo in solos), strict=True)]
    assert values(ensemble, "train/loss") == pytest.approx(means, rel=1e-6), "training curves are the members' means"


def values(directory: Path, tag: str) -> list[float]:
    return [value for _, value in curves(directory)[tag]]


# ---------------------------------------------------------------------------------------------------------------------
# Resumed


def stop_at_7(run: Run) -> None:
    """One of the members is asked to stop as it ends step 7: between two checkpoints, two logs and two epochs."""

    def after_step(_: torch.nn.Module, step: int) -> None:
        if step == 7 and run.parallel.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    run.workload.after_step = after_step


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, ranks: Callable[[int], Ranks]) -> Path:
    directory = tmp_path_factory.mktemp("stopped")
    result = ranks(3).train(composed(*FAST, *OVERRIDES, "parallel=ensemble"), directory, stop_at_7)
    assert (result.status, result.steps) == ("stopped", 8)
    return directory


@pytest.fixture
def at_8(stopped: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run."""
    import shutil

    return Path(shutil.copytree(stopped, tmp_path / "resumed"))


def test_a_resumed_ensemble_ends_where_one_left_in_peace_ends(
    at_8: Path, ensemble: Path, ranks: Callable[[int], Ranks]
) -> None:
    ranks(3).train(composed(*FAST, *OVERRIDES, "parallel=ensemble"), at_8)
    assert_same(members(at_8), members(ensemble))
    got, wanted = outcome(at_8), outcome(ensemble)
    assert_same(got["curves"], wanted["curves"])
    assert_same(got["state"], wanted["state"])


def test_its_checkpoint_goes_on_alone_as_the_first_member(at_8: Path, solos: list[Path]) -> None:
    run = built(*FAST, *OVERRIDES)
    run.prepare()
    run.directory = at_8
    train(run)
    assert_same(weights_at(at_8, STEPS), weights_at(solos[0], STEPS))


@pytest.mark.parametrize("processes", [1, 2])
def test_fewer_members_are_refused(processes: int, at_8: Path) -> None:
    refuse(at_8, processes, "the checkpoint holds 3 members", "parallel.processes=3")


def test_more_members_are_refused(at_8: Path) -> None:
    refuse(at_8, 4, "the checkpoint holds 3 members", "parallel.processes=3")


def test_the_checkpoint_of_a_single_run_is_no_ensembles(solos: list[Path], tmp_path: Path) -> None:
    import shutil

    refuse(Path(shutil.copytree(solos[0], tmp_path / "solo")), 2, "the checkpoint holds 1 member", "start anew")


def refuse(directory: Path, processes: int, why: str, remedy: str) -> None:
    run = built(*FAST, *OVERRIDES, "parallel=ensemble", f"parallel.processes={processes}")
    run.prepare()
    run.directory = directory
    with pytest.raises(ConfigError) as refusal:
        run.parallel.launch(train, run)
    assert str(refusal.value).startswith(f"parallel.processes: got {processes}: {why}")
    assert remedy in str(refusal.value)
