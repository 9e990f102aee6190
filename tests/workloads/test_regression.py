"""Tests of regression: losses and metrics equal their formulas, and every mode equals a plain PyTorch loop."""

import functools
import math
from typing import Any

import pytest
import torch
from helpers.compose import build_composed_run, compose_config, prepare_session, train_in
from helpers.events import scalar_curves
from helpers.plain_loop import STEPS, Function, PlainResult, PlainSettings, largest_difference, plain_loop, weights_at
from helpers.runs import assert_bitwise_equal, run_outcome
from torch.nn import functional

import runner
from runner.config.errors import ConfigError
from runner.data.tabular import Table, TableSamples
from runner.storage.signature import saved_signature

SMALL = (
    *("workload=regression", "device=cpu", "device.threads=1", "model.hidden=[16,16,8]", "data.num_samples=300"),
    *("optimizer=sgd", "optimizer.lr=0.05", "schedule=constant", "precision=64"),
    *(f"steps={STEPS}", "batch_size=48", "log_every=1", "eval_every=0", "workload.eval_batch_size=25"),
)
LOSSES: dict[str, Function] = {"mse": functional.mse_loss, "mae": functional.l1_loss, "huber": functional.huber_loss}
MODES = {
    "single": (1, ()),
    "accumulation": (1, ("accumulation=4",)),
    "dp": (1, ("parallel=dp",)),
    "model": (1, ("parallel=model",)),
    "ddp": (2, ("parallel=ddp", "accumulation=2")),
    "fsdp": (2, ("parallel=fsdp",)),
    "pipeline": (2, ("parallel=pipeline", "parallel.split_size=12")),
}


@functools.cache
def plain(loss_function: str) -> tuple[PlainResult, dict[str, float]]:
    """Return what a plain loop computes, whose metrics are mean absolute errors, and the evaluation."""
    run, loss_of = build_composed_run(*SMALL), LOSSES[loss_function]
    settings = PlainSettings(dtype=torch.float64, loss=loss_of, metric=functional.l1_loss)
    result = plain_loop(run, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), settings)
    workload: Any = run.workload
    [std] = workload.train.target_std
    model = workload.build_model().double()
    model.load_state_dict(result.weights)
    with torch.no_grad():
        outputs, targets = model(workload.held_out.inputs.double()), workload.held_out.targets.double()
    evaluation = {
        "eval/loss": loss_of(outputs, targets).item(),
        "eval/mae": functional.l1_loss(outputs, targets).item() * std,
        "eval/r2": 1 - ((outputs - targets).square().sum() / (targets - targets.mean()).square().sum()).item(),
    }
    return result._replace(metrics=[each * std for each in result.metrics]), evaluation


@pytest.mark.parametrize(("processes", "mode"), MODES.values(), ids=MODES)
def test_every_mode_equals_a_plain_loop(processes, mode, ranks, tmp_path):
    result = ranks(processes).train(compose_config(*SMALL, *mode), tmp_path)
    wanted, evaluation = plain("mse")
    assert largest_difference(weights_at(tmp_path, STEPS), wanted.weights) <= 1e-12
    logged = scalar_curves(tmp_path)
    assert [value for _, value in logged["train/loss"]] == pytest.approx(wanted.losses, rel=1e-6)  # sums are float32
    assert [value for _, value in logged["train/mae"]] == pytest.approx(wanted.metrics, rel=1e-6)
    for tag, value in evaluation.items():
        assert result.metrics[tag] == pytest.approx(value, rel=1e-9), "every held-out sample, once"


def test_an_ensemble_predicts_the_mean_of_its_members_without_disagreement(ranks, tmp_path):
    metrics = ranks(2).train(compose_config(*SMALL, "parallel=ensemble"), tmp_path).metrics
    assert {tag for tag in metrics if tag.startswith("eval/")} == {
        f"eval/{member}{name}" for member in ("", "member_0/", "member_1/") for name in ("loss", "mae", "r2")
    }
    assert metrics["eval/loss"] <= (metrics["eval/member_0/loss"] + metrics["eval/member_1/loss"]) / 2


@pytest.mark.parametrize("loss_function", ["mae", "huber"])
def test_the_other_losses_are_those_of_torch(loss_function, tmp_path):
    run = train_in(tmp_path, build_composed_run(*SMALL, f"workload.loss_function={loss_function}", "accumulation=2"))
    wanted, evaluation = plain(loss_function)
    assert largest_difference(weights_at(tmp_path, STEPS), wanted.weights) <= 1e-12
    assert [value for _, value in scalar_curves(tmp_path)["train/loss"]] == pytest.approx(wanted.losses, rel=1e-6)
    assert run.result.metrics["eval/loss"] == pytest.approx(evaluation["eval/loss"], rel=1e-9)


def test_resume_is_bitwise_exact(tmp_path):
    whole = train_in(tmp_path / "whole", build_composed_run(*SMALL, "save_every=4", "precision=32"))
    train_in(tmp_path / "parts", build_composed_run(*SMALL, "save_every=4", "precision=32", "steps=4"))
    parts = train_in(tmp_path / "parts", build_composed_run(*SMALL, "save_every=4", "precision=32"))
    assert_bitwise_equal(run_outcome(parts.directory)["weights"], run_outcome(whole.directory)["weights"])
    assert parts.result.evaluation == whole.result.evaluation


def evaluated(inputs: torch.Tensor, targets: torch.Tensor, outputs: torch.Tensor, *options: str) -> dict[str, float]:
    """Evaluate a network that returns `outputs` for `inputs`, in two shards, and return the metrics."""
    workload: Any = build_composed_run(*SMALL, "workload.eval_batch_size=2", *options).workload
    zero, one = torch.zeros(targets.shape[1]), torch.full((targets.shape[1],), 2.0)
    table = Table(inputs, targets * 2, ["a", "b", "c"][: targets.shape[1]])
    samples = TableSamples(table, torch.arange(len(inputs)), (torch.zeros(1), torch.ones(1)), (zero, one))
    workload.use(samples, samples)
    answers = {tuple(row.tolist()): output for row, output in zip(inputs, outputs, strict=True)}

    def infer(batch: torch.Tensor) -> torch.Tensor:
        return torch.stack([answers[tuple(row.tolist())] for row in batch])

    shards = [workload.evaluate(infer, (index, 2), torch.device("cpu")) for index in range(2)]
    return workload.summarize({name: shards[0][name] + shards[1][name] for name in shards[0]})


def test_metrics_are_means_over_samples_and_targets():
    inputs = torch.arange(5.0)[:, None]
    targets = torch.tensor([[1.0, 0], [2, 0], [3, 1], [4, 0], [5, 1]])
    outputs = targets + torch.tensor([[1.0, 0], [-1, 0], [0, 0.5], [0, 0], [0, 0]])
    got = evaluated(inputs, targets, outputs)
    assert got["loss"] == pytest.approx((1 + 1 + 0.25) / 10)
    assert got["mae"] == pytest.approx(2 * (1 + 1 + 0.5) / 10), "in the units of the data, twice as large"
    assert got["r2"] == pytest.approx(((1 - 2 / 10) + (1 - 0.25 / 1.2)) / 2)


@pytest.mark.parametrize(("error", "r2"), [(0.0, 1.0), (0.1, 0.0)])
def test_r2_of_equal_targets_is_that_of_scikit_learn(error, r2):
    inputs, targets = torch.arange(3.0)[:, None], torch.full((3, 1), 0.1)
    assert evaluated(inputs, targets, targets + error)["r2"] == r2


def test_metrics_that_compare_with_the_variation_of_targets_are_nan_if_these_are_equal():
    names = ["pearson", "spearman", "concordance", "rmse"]
    inputs, targets = torch.arange(3.0)[:, None], torch.full((3, 1), 0.1)
    found = evaluated(inputs, targets, targets + inputs, f"workload.metrics=[{','.join(names)}]")
    assert all(math.isnan(found[name]) for name in names[:-1])
    assert found["rmse"] == pytest.approx(2 * (5 / 3) ** 0.5)


def test_the_model_of_a_run_predicts_in_the_units_of_the_file(tmp_path):
    rows = "\n".join(f"{x},{3 * x + 1000}" for x in range(200))
    (tmp_path / "line.csv").write_text(f"x,y\n{rows}\n")
    words = ["workload=regression", f"data.file={tmp_path}/line.csv", "model.hidden=[]", "optimizer=sgd"]
    words += ["optimizer.lr=0.1", "epochs=40", "schedule=constant", "batch_size=32", "device=cpu", "tracking=none"]
    words += ["eval_every=0", "save_every=0"]
    result = runner.train([*words, f"output_root={tmp_path}/outputs"])
    run = runner.load(result.directory)
    signature = saved_signature(run.checkpoint("last"))
    assert (signature["targets"], signature["inputs"]) == (["y"], [1])
    scale = signature["scale"]
    x, y = ({name: torch.tensor(scale[key][name]) for name in ("mean", "std")} for key in ("inputs", "targets"))
    model = run.model("last")
    with torch.no_grad():
        got = model((torch.tensor([[50.0], [300.0]]) - x["mean"]) / x["std"]) * y["std"] + y["mean"]
    torch.testing.assert_close(got, torch.tensor([[1150.0], [1900.0]]), rtol=1e-3, atol=0)
    assert run.evaluate("last") == result.evaluation, "to the last bit"
    with pytest.raises(ConfigError, match="how images are read"):
        run.image_input()


@pytest.mark.cases(
    (("data=digits",), "data", "data=tabular"),
    (("model=convnet",), "model", "model=qnet"),
    (("workload.loss_function=msle",), "workload.loss_function", "mse"),
)
def test_configs_that_cannot_be_trained_are_refused_by_key(words, key, word):
    with pytest.raises(ConfigError) as refused:
        prepare_session(build_composed_run("workload=regression", "device=cpu", *words))
    assert refused.value.key == key
    assert word in refused.value.remedy
