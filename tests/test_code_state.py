"""What code of a user keeps outside of modules: training is that of a plain loop, however it is interrupted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import code_with_state
from helpers.code_with_state import CASES, Harder, fresh
from helpers.plain_loop import largest_difference, weights_at
from helpers.strange_networks import CPU, PLAIN, numbers, tanh
from torch import nn
from torch.nn.functional import cross_entropy

import runner
from runner.config.errors import ConfigError
from runner.seeds import derive

STEPS, BATCH = 6, 12
SHORT = [*CPU, *PLAIN, f"steps={STEPS}", "eval_every=0", "save_every=0"]
SAMPLES = numbers()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows_of_steps() -> list[torch.Tensor]:
    epochs = [torch.Generator().manual_seed(derive(0, "order", epoch)) for epoch in range(2)]
    return [*torch.cat([torch.randperm(48, generator=each) for each in epochs]).split(BATCH)][:STEPS]


def plain_loop(
    model: nn.Module,
    step: Callable[..., torch.Tensor],
    after: Callable[[Any], None] = lambda optimizer: None,
    weight_decay: float = 0.0,
) -> dict[str, torch.Tensor]:
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=weight_decay)
    for rows in rows_of_steps():
        optimizer.zero_grad()
        step(model, (SAMPLES[0][rows].double(), SAMPLES[1][rows])).backward()
        optimizer.step()
        after(optimizer)
    return model.state_dict()


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(derive(0, "weights"))
    return make()


def entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def train(words: list[str], **parts: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the directory of a run, and its weights at the end."""
    result = runner.train(words, **{"model": tanh, "data": (SAMPLES, SAMPLES), **parts})
    return result.directory, weights_at(result.directory, result.steps)


def resumed(half: dict[str, Any], other: dict[str, Any], *words: str) -> dict[str, torch.Tensor]:
    """Train three steps with the parts of a user `half`, and the rest with `other`."""
    directory, _ = train([*SHORT, "steps=3", *words], **half)
    return train([f"resume={directory}", f"steps={STEPS}"], **other)[1]


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_a_plain_loop_with_and_without_evaluations_and_a_resume(name):
    case = fresh(name)
    loss = case.get("loss", cross_entropy)
    step = case.get("training_step", lambda model, batch: loss(model(batch[0]), batch[1]))
    wanted = plain_loop(made(case.get("model", tanh)), step, case.get("after_step", lambda optimizer: None))
    for words in ([], ["eval_every=1", "save_every=1"]):
        assert largest_difference(train([*SHORT, *words], **fresh(name))[1], wanted) < 1e-12
    directory, _ = train([*SHORT, "steps=3", "eval_every=2"], **fresh(name))
    case = fresh(name)  # as in a process that has just begun
    assert largest_difference(train([f"resume={directory}", f"steps={STEPS}"], **case)[1], wanted) < 1e-12


@pytest.mark.parametrize("words", [[], ["accumulation=2"], ["ema.decay=0.5", "eval_every=2"]])
def test_names_of_given_objects_in_functions_stand_for_those_of_the_run(words):
    network, margin = code_with_state.network, code_with_state.margin
    before = {name: each.clone() for name, each in network.state_dict().items()}
    parts = {"model": network, "loss": code_with_state.with_penalty}
    loop = code_with_state.made_once(tanh).double()

    def penalized(model: nn.Module, batch: Any) -> torch.Tensor:
        return entropy(model, batch) + code_with_state.penalty(model)

    wanted = plain_loop(loop, penalized)
    assert largest_difference(train([*SHORT, *words], **parts)[1], wanted) < 1e-12

    def after(optimizer: Any) -> None:
        own.margin += 0.1
        with torch.no_grad():
            for each in loop.parameters():
                each.clamp_(-0.3, 0.3)

    loop, own = code_with_state.made_once(tanh).double(), code_with_state.Margin()
    wanted = plain_loop(loop, lambda model, batch: own(model(batch[0]), batch[1]), after)
    parts = {"model": network, "loss": margin, "after_step": code_with_state.clips_and_raises_margin}
    assert largest_difference(train([*SHORT, *words], **parts)[1], wanted) < 1e-12
    assert largest_difference(resumed(parts, parts, *words), wanted) < 1e-12
    assert (code_with_state.network, code_with_state.margin, margin.margin) == (network, margin, 0)
    assert largest_difference(network.state_dict(), before) == 0


def test_a_parameter_outside_of_the_network_is_refused_once_it_has_a_gradient():
    with pytest.raises(ConfigError, match=r"outside gets a gradient, but it is no part of the network"):
        train(SHORT, loss=code_with_state.scaled_outside)


def test_a_network_in_the_loss_that_is_not_trained_stays_as_it_is_and_that_is_said(capsys):
    before = code_with_state.judge.weight.detach().clone()
    wanted = plain_loop(made(tanh), lambda model, batch: code_with_state.judged(model(batch[0]), batch[1]))
    code_with_state.judge.zero_grad()
    assert largest_difference(train(SHORT, loss=code_with_state.judged)[1], wanted) < 1e-12
    assert (
        capsys.readouterr().err.count("judge gets a gradient, but it is no part of the network, and is not trained")
        == 1
    )
    assert torch.equal(code_with_state.judge.weight, before)


def test_a_parameter_outside_of_the_network_may_have_an_optimizer_of_the_user():
    def scaled(scale: torch.nn.Parameter) -> tuple[Callable[..., Any], Callable[..., Any]]:
        own = torch.optim.SGD([scale], lr=0.1)

        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return cross_entropy(outputs * scale, targets)

        def after_step(state: Any) -> None:
            own.step()
            own.zero_grad(set_to_none=False)

        return loss, after_step

    first, second = (torch.nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(2))
    (loss, after), (ours, hook) = scaled(first), scaled(second)
    wanted = plain_loop(made(tanh), lambda model, batch: loss(model(batch[0]), batch[1]), after)
    assert largest_difference(train(SHORT, loss=ours, after_step=hook)[1], wanted) < 1e-12
    assert first.item() == pytest.approx(second.item(), abs=1e-12) != 1


def test_options_that_a_hook_sets_in_the_optimizer_go_on_after_a_resume():
    def halve(optimizer: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] *= 0.5

    wanted = plain_loop(made(tanh), entropy, halve, weight_decay=0.4)
    parts = {"after_step": code_with_state.halves_decay}
    assert largest_difference(resumed(parts, parts, "optimizer.weight_decay=0.4"), wanted) < 1e-12


def test_what_an_evaluation_step_collects_a_hook_may_read():
    collected, read = list[float](), list[float]()

    def training_step(model: nn.Module, batch: Any) -> torch.Tensor:
        return entropy(model, batch)

    def evaluation_step(model: nn.Module, batch: Any) -> dict[str, Any]:
        loss = entropy(model, batch)
        collected.append(loss.item())
        return {"loss": loss, "one": 1.0}

    def after_evaluation(state: Any, metrics: Any) -> None:
        read.extend(collected)
        assert metrics["eval/one"] == 1
        collected.clear()

    steps = {"training_step": training_step, "evaluation_step": evaluation_step}
    train([*SHORT, "eval_every=3"], **steps, after_evaluation=after_evaluation)
    assert len(read) == 2


def test_a_hook_that_changes_data_in_workers_is_refused_and_without_them_it_counts():
    data, count = Harder(*SAMPLES), itertools.count()

    def raises(state: Any) -> None:
        data.scale = 1 + 0.5 * state.step

    def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
        return entropy(model, (batch[0] * (1 + 0.5 * next(count)), batch[1]))

    wanted = plain_loop(made(tanh), scaled)
    parts = {"data": (data, SAMPLES), "after_step": raises}
    assert largest_difference(train(SHORT, **parts)[1], wanted) < 1e-6  # samples are rounded to float32
    data.scale = 1.0
    with pytest.raises(ConfigError, match=r"data\.workers"):
        train([*SHORT, "data.workers=1"], **parts)
