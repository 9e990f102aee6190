"""Means over tokens, several inputs and samples of unequal lengths: in every mode, as a plain loop on whole batches."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers.events import scalar_curves
from helpers.plain_loop import largest_difference, weights_at
from helpers.sequences import (
    CASES,
    IMAGES,
    KINDS,
    LOSSES,
    ROWS,
    ImageAndTable,
    Masked,
    Padded,
    PerToken,
    collate,
    config_of,
    sum_over_tokens,
    tokens,
    trained,
    two_tasks,
)
from helpers.strange_networks import CPU, PLAIN
from torch.nn.functional import cross_entropy

import runner
from runner.seeds import derive

STEPS = 4


def plain(make: Any, batch_of: Any, loss: Any) -> tuple[dict[str, torch.Tensor], list[float], float]:
    """Train in plain PyTorch, in float64, on whole batches.

    Returns:
        The weights, the loss of each step, and at last that of all samples. `batch_of` returns (arguments, targets) for
        rows, and `loss` is a function of (outputs, targets).
    """
    torch.manual_seed(derive(0, "weights"))
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for rows in torch.randperm(48, generator=torch.Generator().manual_seed(derive(0, "order", 0))).split(12):
        optimizer.zero_grad()
        arguments, targets = batch_of(rows)
        value = loss(model(*arguments), targets)
        value.backward()
        losses.append(value.item())
        optimizer.step()
    with torch.no_grad():
        arguments, targets = batch_of(torch.arange(48))
        return model.state_dict(), losses, loss(model(*arguments), targets).item()


def train(name: str, mode: str, ranks: Any, directory: Any) -> Any:
    several = any(word in mode for word in ("ddp", "fsdp", "pipeline", "hogwild", "ensemble"))
    count = 2 if several and "streams" not in mode and "processes=1" not in mode else 1
    config = config_of(name, *PLAIN, "log_every=1", *mode.split())
    return ranks(count).call_on_all(trained, name, config, directory)[0]


def check(name: str, mode: str, ranks: Any, directory: Any, reference: Any) -> None:
    result = train(name, mode, ranks, directory)
    assert not isinstance(result, str), result
    weights, losses, evaluated = reference
    assert largest_difference(weights_at(directory, STEPS), weights) < 1e-12
    curves = scalar_curves(directory)
    assert [value for _, value in curves["train/loss"]] == pytest.approx(losses, rel=1e-6)
    assert curves["eval/loss"][-1][1] == pytest.approx(evaluated, rel=1e-6)


@functools.cache
def of_tokens(name: str) -> Any:
    make, _, loss = LOSSES[name]
    inputs, targets = CASES[name]["data"][0]
    return plain(make, lambda rows: ((inputs[rows],), targets[rows]), loss)


MODES = [
    "accumulation=4",
    "parallel=ddp",
    "parallel=ddp accumulation.steps=3",
    "parallel=fsdp accumulation=2",
    "parallel=dp accumulation=2",
    "parallel=pipeline parallel.split_size=3",
    "parallel=pipeline parallel.split_size=2 parallel.schedule=1f1b accumulation=2",
    "parallel=pipeline parallel.split_size=3 parallel.schedule=interleaved_1f1b",
    "parallel=pipeline parallel.split_size=3 parallel.schedule=zero_bubble",
    "parallel=pipeline parallel.split_size=4 parallel.engine=streams",
    "compile=step accumulation=4",
]
PAIRS = [("default", mode) for mode in MODES]
PAIRS += [
    (name, "parallel=ddp accumulation.steps=3") for name in LOSSES if name not in ("default", "several values", "sum")
]
PAIRS += [
    ("several values", mode) for mode in ("parallel=pipeline parallel.split_size=3", "compile=step accumulation=4")
]
PAIRS += [
    ("tied", f"parallel=pipeline parallel.split_size=3 {words}".strip()) for words in ("", "parallel.engine=streams")
]
PAIRS += [
    ("sum", "parallel=pipeline parallel.split_size=2 parallel.schedule=1f1b accumulation=2"),
    ("sum", "compile=step accumulation=4"),
    ("gpt", "parallel=fsdp accumulation=2"),
    ("gpt", "parallel=pipeline parallel.split_size=3 parallel.schedule=interleaved_1f1b"),
    ("gpt", "parallel=pipeline parallel.split_size=3 parallel.schedule=zero_bubble"),
    ("gpt recomputed", "parallel=fsdp"),
    ("gpt recomputed", "parallel=pipeline parallel.split_size=2 parallel.schedule=1f1b accumulation=2"),
]
SLOW = [pytest.param("gpt", "compile=step accumulation=4", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "mode"), PAIRS + SLOW)
def test_a_mean_over_tokens_is_that_of_the_whole_batch(name, mode, ranks, tmp_path):
    check(name, mode, ranks, tmp_path, of_tokens(name))


@pytest.mark.parametrize("name", ["tied", "gpt"])
def test_a_parameter_of_two_stages_counts_once_in_the_norm_and_the_state_of_the_optimizer(name, ranks, tmp_path):
    """Of three processes, the one in the middle does not have it."""
    found = []
    for count, mode in ((1, ()), (3, ("parallel=pipeline", "parallel.processes=3", "parallel.split_size=4"))):
        words = ("precision=64", "optimizer=adamw", "optimizer.lr=0.01", "max_grad_norm=0.02", "log_every=1", *mode)
        (directory := tmp_path / str(count)).mkdir()
        result = ranks(count).call_on_all(trained, name, config_of(name, *words), directory)[0]
        assert not isinstance(result, str), result
        norms = [norm for _, norm in scalar_curves(directory)["train/gradient_norm"]]
        assert min(norms) > 0.02
        state = torch.load(directory / "checkpoints" / f"step_{STEPS:08d}" / "state.pt", weights_only=True)
        moments = {parameter: each["exp_avg"] for parameter, each in state["optimizer"].items()}
        found.append((norms, weights_at(directory, STEPS), moments))
    (norms, weights, moments), (norms_of_pipeline, *of_pipeline) = found
    assert norms_of_pipeline == pytest.approx(norms, rel=1e-6)
    for got, expected in zip(of_pipeline, (weights, moments), strict=True):
        assert largest_difference(got, expected) < 1e-12


def test_integers_of_a_user_are_the_tokens_of_a_language_model_and_numbers_are_not(tmp_path, monkeypatch):
    """The vocabulary is that of the inputs and the targets."""
    monkeypatch.chdir(tmp_path)
    words = [*CPU, "model=gpt_tiny", "model.layers=1", "model.width=8", "steps=1", "eval_every=1"]
    inputs, targets = tokens()
    result = runner.train(words, data=((inputs, targets), (inputs, targets)), loss=sum_over_tokens)
    assert result.directory is not None
    assert len(weights_at(result.directory, 1)["wte.weight"]) == 20 == 1 + int(inputs.max()) > 1 + int(targets.max())
    with pytest.raises(runner.ConfigError, match=r"^model: got 'gpt_tiny': .* no indices of tokens"):
        runner.train(words, data=(inputs.float(), targets), loss=sum_over_tokens)


def test_the_first_member_of_an_ensemble_divides_by_its_own_counts(ranks, tmp_path):
    result = train("default", "parallel=ensemble", ranks, tmp_path)
    assert not isinstance(result, str), result
    assert largest_difference(weights_at(tmp_path, STEPS), of_tokens("default")[0]) < 1e-12


def test_a_worker_of_hogwild_divides_by_its_own_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*CPU, *PLAIN, "parallel=hogwild", "parallel.processes=1", "accumulation=2"]
    result = runner.train(words, model=PerToken, data=(tokens(), tokens()))
    assert result.directory is not None
    assert largest_difference(weights_at(result.directory, STEPS), of_tokens("default")[0]) < 1e-12


def test_a_loss_that_is_a_dict_is_that_of_a_plain_loop_and_its_other_values_have_curves(ranks, tmp_path):
    check("several values", "parallel=ddp accumulation.steps=3", ranks, tmp_path, of_tokens("several values"))
    curves = scalar_curves(tmp_path)
    make, *_ = LOSSES["several values"]
    inputs, targets = tokens()
    model = make().double()
    model.load_state_dict(weights_at(tmp_path, STEPS))
    outputs = model(inputs)
    right, valid = (outputs.argmax(1) == targets).double(), targets != -100
    assert curves["eval/right"][-1][1] == pytest.approx(right[valid].mean().item())
    assert curves["eval/size"][-1][1] == pytest.approx(outputs.square().mean().item(), rel=1e-6)
    assert len(curves["train/right"]) == len(curves["train/size"]) == STEPS


def of_inputs(name: str) -> Any:
    if name == "several targets":
        return plain(
            ImageAndTable,
            lambda rows: ((IMAGES[rows].double(), ROWS[rows].double()), {"class": KINDS[rows], "value": ROWS[rows, 0]}),
            lambda outputs, targets: two_tasks(outputs, targets)["loss"],
        )
    return plain(ImageAndTable, lambda rows: ((IMAGES[rows].double(), ROWS[rows].double()), KINDS[rows]), cross_entropy)


PIPELINE = "parallel=pipeline parallel.split_size=3"


@pytest.mark.cases(
    *[("tuple", mode) for mode in ("accumulation=2", "parallel=fsdp", PIPELINE, f"{PIPELINE} parallel.engine=streams")],
    *[("dict", mode) for mode in ("parallel=ddp", PIPELINE, f"{PIPELINE} parallel.engine=streams", "compile=step")],
)
def test_several_inputs_are_those_of_a_plain_loop(name, mode, ranks, tmp_path):
    check(name, mode, ranks, tmp_path, of_inputs(name))


@pytest.mark.parametrize("name", ["labels", "samples", "several targets"])
def test_the_forms_of_samples_are_those_of_a_plain_loop(name, ranks, tmp_path):
    check(name, "parallel=ddp accumulation=2", ranks, tmp_path, of_inputs(name))


@functools.cache
def of_padded() -> Any:
    samples = Padded()

    def batch(rows: torch.Tensor) -> Any:
        collated = collate([samples[row] for row in rows.tolist()])
        return (collated["ids"], collated["mask"]), collated["labels"]

    return plain(Masked, batch, cross_entropy)


@pytest.mark.parametrize("mode", ["accumulation=4", "parallel=ddp accumulation=2", "data.workers=1"])
def test_samples_of_unequal_lengths_that_are_padded_batch_by_batch_are_those_of_a_plain_loop(mode, ranks, tmp_path):
    check("padded", mode, ranks, tmp_path, of_padded())


def test_a_network_that_sees_the_padding_is_refused_where_a_batch_is_divided(ranks, tmp_path):
    refusal = train("sees padding", "parallel=ddp", ranks, tmp_path)
    assert isinstance(refusal, str)
    assert "depends on how it is divided" in refusal
