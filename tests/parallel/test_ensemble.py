"""Tests of ensembles: members that differ in their seed, the vote of the members, and resume."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, compose_config, prepare_session, train_in
from helpers.events import scalar_curves
from helpers.plain_loop import weights_at
from helpers.rank_functions import sigterm_at
from helpers.ranks import Ranks
from helpers.runs import assert_bitwise_equal, run_outcome

from runner.config.errors import ConfigError
from runner.device import Device
from runner.parallel.ensemble import Ensemble

STEPS = 12
HARD = ("data.crop=2", "model.dropout=0.2", "accumulation=2", "batch_size=32", "schedule=constant", "optimizer.lr=0.1")
OVERRIDES = (*HARD, f"steps={STEPS}", "log_every=3", "eval_every=6", "save_every=6", "seed=5")


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory) -> Path:
    """The run directory of an ensemble of three members, in processes that the mode starts."""
    run = build_composed_run(*TINY_CPU, *OVERRIDES, "parallel=ensemble", "parallel.processes=3")
    return train_in(tmp_path_factory.mktemp("ensemble"), run).directory


@pytest.fixture(scope="module")
def single_runs(tmp_path_factory) -> list[Path]:
    """The run directories of three single runs, each with the seed of a member."""
    runs = [build_composed_run(*TINY_CPU, *OVERRIDES[:-1], f"seed={5 + member}") for member in range(3)]
    return [train_in(tmp_path_factory.mktemp("solo"), run).directory for run in runs]


def members(directory: Path, step: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """Return the weights of each member in a checkpoint."""
    path = directory / "checkpoints" / f"step_{step:08d}"
    others = [torch.load(path / f"rank_{rank}.pt", weights_only=True)["parallel"]["tensors"] for rank in (1, 2)]
    return [weights_at(directory, step), *others]


def test_each_member_is_bitwise_equal_to_a_single_run_with_its_seed(ensemble, single_runs):
    for step in (6, STEPS):
        assert_bitwise_equal(members(ensemble, step), [weights_at(solo, step) for solo in single_runs])
    shared = torch.load(ensemble / "checkpoints" / f"step_{STEPS:08d}" / "state.pt", weights_only=True)
    assert_bitwise_equal(shared["optimizer"], run_outcome(single_runs[0])["state"]["optimizer"])


def test_the_ensemble_predicts_by_its_mean_probability(ensemble, single_runs):
    run, logged = build_composed_run(*TINY_CPU, *OVERRIDES), scalar_curves(ensemble)
    prepare_session(run)
    held_out = run.workload.held_out
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
    for member, solo in enumerate(single_runs):
        own = scalar_curves(solo)
        for name in ("loss", "accuracy"):
            assert logged[f"eval/member_{member}/{name}"] == own[f"eval/{name}"]


def test_tags_are_those_of_a_single_run_and_of_the_members(ensemble, single_runs):
    own = {f"eval/member_{member}/{name}" for member in range(3) for name in ("loss", "accuracy")}
    assert scalar_curves(ensemble).keys() - scalar_curves(single_runs[0]).keys() == own | {"eval/disagreement"}
    means = [sum(points) / 3 for points in zip(*(values(solo, "train/loss") for solo in single_runs), strict=True)]
    assert values(ensemble, "train/loss") == pytest.approx(means, rel=1e-6), "training curves are the members' means"


def values(directory: Path, tag: str) -> list[float]:
    return [value for _, value in scalar_curves(directory)[tag]]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, ranks: Ranks) -> Path:
    """A run in which rank 1 gets SIGTERM in step 7: between two checkpoints and two logs, and within an epoch."""
    directory, stop_at_7 = tmp_path_factory.mktemp("stopped"), partial(sigterm_at, 7, 1)
    result = ranks(3).train(compose_config(*TINY_CPU, *OVERRIDES, "parallel=ensemble"), directory, stop_at_7)
    assert (result.status, result.steps) == ("stopped", 8)
    return directory


@pytest.fixture
def at_8(stopped: Path, tmp_path) -> Path:
    """A copy of the stopped run."""
    return Path(shutil.copytree(stopped, tmp_path / "resumed"))


def test_resume_of_an_ensemble_is_bitwise_exact(at_8, ensemble, ranks):
    ranks(3).train(compose_config(*TINY_CPU, *OVERRIDES, "parallel=ensemble"), at_8)
    assert_bitwise_equal(members(at_8), members(ensemble))
    got, wanted = run_outcome(at_8), run_outcome(ensemble)
    assert_bitwise_equal(got["curves"], wanted["curves"])
    assert_bitwise_equal(got["state"], wanted["state"])


def mean_of_shares(totals: torch.Tensor) -> torch.Tensor:
    with Ensemble().launcher(Device(kind="cpu")).connect() as collectives:
        return collectives.all_reduce({"train": collectives.local_share(totals)})["train"]


def test_sums_of_before_a_resume_are_the_same_after_it(ranks):
    totals = torch.rand(2000, generator=torch.Generator().manual_seed(0))
    assert (totals + totals + totals).div(3).ne(totals).any(), "float32 rounds"
    assert_bitwise_equal(ranks(3).call_on_all(mean_of_shares, totals), [totals] * 3)


def test_a_single_process_resumes_the_first_member(at_8, single_runs):
    train_in(at_8, build_composed_run(*TINY_CPU, *OVERRIDES))
    assert_bitwise_equal(weights_at(at_8, STEPS), weights_at(single_runs[0], STEPS))


@pytest.mark.parametrize(("begun", "why"), [("ensemble", "3 members"), ("single", "1 member")])
def test_another_number_of_members_is_refused(begun, why, at_8, single_runs):
    overrides = (*TINY_CPU, *OVERRIDES, "parallel=ensemble", "parallel.processes=2")
    directory = at_8 if begun == "ensemble" else Path(shutil.copytree(single_runs[0], at_8.parent / "single"))
    with pytest.raises(ConfigError) as refused:
        train_in(directory, build_composed_run(*overrides))
    assert (refused.value.key, refused.value.got) == ("parallel.processes", 2)
    assert refused.value.why.endswith(why)
    assert refused.value.remedy == f"parallel.processes={why[0]}, or start anew"
