"""Training steps of a user and phases with several networks: in every mode, as a plain loop with plain optimizers."""

from __future__ import annotations

import functools
import shutil
from typing import Any

import pytest
import torch
from helpers.command import ROOT
from helpers.events import scalar_curves
from helpers.plain_loop import largest_difference, weights_at
from helpers.steps import (
    CASES,
    CLASSES,
    INPUTS,
    OPTIONS,
    STEPS,
    Layers,
    config_of,
    networks,
    parts_of,
    plain,
    trained,
    trained_on_samples_of_rank,
)
from helpers.strange_networks import trained_with
from torch import nn

import runner
from runner.config.errors import ConfigError, shown

MODES = ["accumulation=4", "parallel=ddp accumulation.steps=3", "parallel=fsdp accumulation=2"]
PAIRS = [(name, mode) for name in CASES for mode in MODES]
PAIRS += [("critic", "parallel=ddp parallel.static_graph=true")]


@functools.cache
def reference(name: str) -> Any:
    return plain(name)


def train(name: str, mode: str, ranks: Any, directory: Any) -> Any:
    several = ("ddp" in mode or "fsdp" in mode) and "processes" not in mode
    config = config_of(name, *OPTIONS, *mode.split())
    result = ranks(1 + several).call_on_all(trained, name, config, directory)[0]
    assert not isinstance(result, str), result
    return result


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_a_step_is_that_of_a_plain_loop_on_the_whole_batch(name, mode, ranks, tmp_path):
    train(name, mode, ranks, tmp_path)
    weights, losses = reference(name)
    assert largest_difference(weights_at(tmp_path, STEPS), weights) < 1e-12
    curves = scalar_curves(tmp_path)
    for (phase, _, every), expected in zip(CASES[name].phases, losses, strict=True):
        curve = curves[f"train/{phase}/loss" if phase else "train/loss"]
        assert [step for step, _ in curve] == [*range(every, STEPS + 1, every)]
        assert [value for _, value in curve] == pytest.approx(expected, rel=1e-6)


def test_the_first_member_of_an_ensemble_takes_the_steps_of_a_plain_loop(ranks, tmp_path):
    config = config_of("critic", *OPTIONS, "parallel=ensemble")
    result = ranks(2).call_on_all(trained, "critic", config, tmp_path)[0]
    assert not isinstance(result, str), result
    assert largest_difference(weights_at(tmp_path, STEPS), reference("critic")[0]) < 1e-12


def test_autocast_and_the_average_of_weights_are_those_of_a_plain_loop(ranks, tmp_path):
    train("gan", "precision=bf16", ranks, tmp_path)
    weights, _ = plain("gan", torch.float32, autocast=True)
    assert largest_difference(weights_at(tmp_path, STEPS), weights) < 1e-7


@pytest.mark.parametrize("mode", ["parallel=single", "parallel=fsdp"])
def test_a_run_of_phases_that_is_stopped_goes_on_in_another_mode_as_if_it_had_not_been(mode, ranks, tmp_path):
    train("critic", "parallel=ddp steps=3", ranks, tmp_path)
    train("critic", mode, ranks, tmp_path)
    weights, losses = reference("critic")
    assert largest_difference(weights_at(tmp_path, STEPS), weights) < 1e-12
    assert [value for _, value in scalar_curves(tmp_path)["train/generator/loss"]] == pytest.approx(losses[1], rel=1e-6)


def test_evaluations_measure_what_the_evaluation_step_returns_each_sample_once(ranks, tmp_path):
    """Of 48 samples in batches of 20, with the sum over counts."""

    def evaluation_step(model: Any, batch: Any) -> dict[str, Any]:
        inputs, classes = batch
        assert not model.training
        wrong = (model.head(model.encoder(inputs)).argmax(1) != classes).sum()
        return {"loss": inputs.square().mean(), "wrong": (wrong, len(classes)), "ones": (classes.sum(), classes.sum())}

    parts = parts_of("parts") | {"evaluation_step": evaluation_step}
    words = ["device=cpu", "steps=1", "batch_size=12", "workload.eval_batch_size=20", f"output_root={tmp_path}"]
    result = runner.train(words, **parts)
    model = runner.load(result.directory, **parts).model("last")
    wrong = (model.head(model.encoder(INPUTS)).argmax(1) != CLASSES).double().mean()
    assert result.metrics["eval/wrong"] == pytest.approx(float(wrong))
    assert result.metrics["eval/loss"] == pytest.approx(float(INPUTS.square().mean()), rel=1e-6)
    assert result.metrics["eval/ones"] == 1


def lists_of_tensors(samples: list[Any]) -> tuple[list[torch.Tensor], list[int]]:
    """A batch as detectors take it: a list of tensors of several shapes."""
    return [inputs[: 2 + label] for inputs, label in samples], [label for _, label in samples]


def step_on_lists(model: Any, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return torch.stack([model(x.mean()[None]).squeeze() * (1 + y) for x, y in zip(inputs, labels, strict=True)]).mean()


def test_a_batch_may_be_a_list_of_tensors_of_several_shapes(tmp_path):
    samples = [(x, int(y)) for x, y in zip(INPUTS, CLASSES, strict=True)]
    parts = {"model": lambda: nn.Linear(1, 1), "data": (samples, samples), "collate": lists_of_tensors}
    words = ["device=cpu", "steps=2", "batch_size=12", "workload.eval_batch_size=10", f"output_root={tmp_path}"]
    result = runner.train([*words, "accumulation.steps=3", "data.workers=1"], **parts, training_step=step_on_lists)
    model = runner.load(result.directory, **parts, training_step=step_on_lists).model("last")
    expected = step_on_lists(model, lists_of_tensors(samples))
    assert result.metrics["eval/loss"] == pytest.approx(expected.item(), rel=1e-5)


def of_rows(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch["x"]) * batch["weight"]).mean()


def unlabeled(model: Any, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize(
    ("data", "step"),
    [({"x": INPUTS, "weight": INPUTS[:, :1]}, of_rows), (INPUTS, unlabeled), (INPUTS.numpy(), unlabeled)],
)
def test_samples_need_no_targets(data, step, tmp_path):
    words = ["device=cpu", "steps=1", "batch_size=12", f"output_root={tmp_path}", "workload.eval_batch_size=7"]
    parts = {"model": lambda: nn.Linear(6, 1), "data": data, "training_step": step}
    result = runner.train(words, **parts)
    assert result.status == "done", result


def two_numbers(model: Any) -> float:
    return 0.0


def of_networks(change: Any) -> dict[str, Any]:
    """Return a step whose loss is changed before it is returned, with a right evaluation."""
    return {
        "training_step": lambda model, batch: change(unlabeled(model["discriminator"], batch[0])),
        "evaluation_step": lambda model, batch: unlabeled(model["discriminator"], batch[0]),
    }


def with_backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward(retain_graph=True)
    return loss


WRONG = {
    "nothing of this name": ({"phases": {"generators": of_rows}}, "phases: got 'generators': no trained parameter"),
    "overlap": (
        {"phases": {"a": {"step": of_rows, "parameters": "generator"}, "b": {"step": of_rows, "parameters": "*"}}},
        "is trained in a, too",
    ),
    "never": ({"phases": {"generator": {"step": of_rows, "every": 2}}}, "no phase trains in the first step"),
    "every": ({"phases": {"generator": {"step": of_rows, "every": 0}}}, "phases.generator.every: got 0"),
    "an option": ({"phases": {"generator": {"step": of_rows, "evry": 2}}}, "did you mean every"),
    "a pattern of several": (
        {"phases": {"generator": {"step": of_rows, "parameters": ["generator", "decoder"]}}},
        "phases: got 'decoder': no trained parameter",
    ),
    "no patterns": ({"phases": {"generator": {"step": of_rows, "parameters": [1]}}}, "it is no pattern of names"),
    "no step": ({"phases": {"generator": {"every": 1}}}, "it has no step"),
    "no dict": ({"phases": [of_rows]}, "no dict from the names of phases"),
    "arguments": ({"training_step": two_numbers}, "it is no function of (model, batch)"),
    "both": ({"training_step": of_rows, "phases": {"generator": of_rows}}, "there is a training_step, too"),
    "a loss, too": ({"training_step": of_rows, "loss": unlabeled}, "loss"),
    "no loss": ({"training_step": lambda model, batch: None}, "it returns a NoneType, and no scalar"),
    "its own backward": (of_networks(with_backward), "training_step: it calls backward() ("),
    "complex": (of_networks(lambda loss: loss * 1j), "training_step: it returns a complex number ("),
    "integer": (of_networks(torch.Tensor.long), "it returns a torch.int64 that does not depend on the weights ("),
    "detached": (of_networks(torch.Tensor.detach), "it returns a torch.float32 that does not depend on the weights ("),
    "alone": ({"evaluation_step": of_rows}, "evaluation_step"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_step_is_refused_before_the_first_one(name, tmp_path):
    parts, message = WRONG[name]
    given = parts_of("gan")
    del given["phases"]
    with pytest.raises(ConfigError) as refused:
        runner.train(["device=cpu", "steps=1", "batch_size=12", f"output_root={tmp_path}"], **given, **parts)
    assert message in str(refused.value)
    assert not message.endswith("(") or f"{message}{shown(__file__)}:" in str(refused.value)
    assert not any(tmp_path.rglob("checkpoints"))


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("parallel=pipeline", "all that a split network can compute"),
        ("compile=step", "compile=true"),
        ("workload.best_metric=fid", "evaluations do not measure it"),
        ("workload.metrics=[f1]", "metrics"),
    ],
)
def test_a_mode_that_needs_outputs_and_a_loss_says_so(mode, message, tmp_path):
    words = ["device=cpu", "steps=1", "batch_size=12", f"output_root={tmp_path}", *mode.split()]
    with pytest.raises(ConfigError) as refused:
        runner.train(words, **parts_of("gan"))
    assert message in str(refused.value)


def test_processes_whose_code_returns_other_samples_are_refused(ranks, tmp_path):
    """As where an order depends on the hashes of a process."""
    found = ranks(2).call_on_all(trained_on_samples_of_rank, config_of("parts", *OPTIONS, "parallel=ddp"), tmp_path)
    assert all("process 1 has other samples than process 0" in each for each in found), found


class Normalized(nn.Sequential):
    def __init__(self, num_inputs: int, num_outputs: int):
        super().__init__(nn.Linear(num_inputs, 8), nn.BatchNorm1d(8), nn.Linear(8, num_outputs))


def normalized() -> nn.Module:
    return nn.ModuleDict({"generator": Layers(3, 6), "discriminator": Normalized(6, 1)})


def test_phases_with_batch_normalization_train_in_several_processes(ranks, tmp_path):
    parts = parts_of("gan") | {"model": normalized}
    result = ranks(2).call_on_all(trained_with, parts, config_of("gan", *OPTIONS, "parallel=ddp"), tmp_path)[0]
    assert not isinstance(result, str), result


def tied() -> nn.Module:
    model = networks()
    model["generator"][0].weight = model["discriminator"][2].weight = nn.Parameter(torch.randn(1, 8))
    return model


class Grows(nn.Module):
    """It makes a layer in its first forward pass, which no optimizer knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "last"):
            self.last = nn.Linear(8, 2).to(inputs)
        return self.last(self.first(inputs))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (parts_of("gan") | {"model": tied}, "is trained in discriminator, too"),
        ({"model": Grows, "data": parts_of("gan")["data"]}, "training makes or removes last.bias"),
    ],
)
def test_parameters_that_would_be_trained_twice_or_never_are_refused(parts, message, tmp_path):
    with pytest.raises(ConfigError) as refused:
        runner.train(["device=cpu", "steps=1", "batch_size=12", f"output_root={tmp_path}"], **parts)
    assert message in str(refused.value)


def test_what_a_file_draws_at_its_top_level_is_the_same_in_each_run(tmp_path):
    losses = []
    for name in ("one", "other"):
        torch.manual_seed(len(losses))
        shutil.copy(ROOT / "tests" / "helpers" / "drawing_file.py", tmp_path / f"{name}.py")
        words = [f"workload={tmp_path / name}.py", "device=cpu", "steps=2", "batch_size=8", f"output_root={tmp_path}"]
        losses.append(runner.train(words).metrics["train/loss"])
    assert losses[0] == losses[1]
