"""Tests of averaged weights: equal to plain PyTorch in every mode, evaluated, saved, bitwise exact after resume."""

import functools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers import plain_loop as loops
from helpers.compose import TINY_CPU, build_composed_run, compose_config, prepare_session, train_in
from helpers.rank_functions import overflow_at, sigterm_at
from helpers.runs import assert_bitwise_equal, run_outcome
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from runner.config.errors import ConfigError
from runner.ema import Ema
from runner.parallel import full_state

DECAY = 0.8
EMA = f"ema.decay={DECAY}"
HARD = ("data.crop=2", "model.dropout=0.2", "batch_size=24", "steps=8", "log_every=3", "eval_every=4", "save_every=4")


def average_at(directory: Path, step: int) -> dict[str, torch.Tensor]:
    """The averaged weights in a checkpoint."""
    return safetensors.torch.load_file(directory / "checkpoints" / f"step_{step:08d}" / "ema.safetensors")


@functools.cache
def plain_average() -> dict[str, torch.Tensor]:
    """The average in plain PyTorch: a = w after the first step, then a = decay·a + (1 − decay)·w after each step."""
    run = build_composed_run(*TINY_CPU, *loops.PLAIN_LOOP_OVERRIDES)
    averages: dict[int, torch.Tensor] = {}

    def averaged(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = loops.OPTIMIZER_CASES["sgd"][1](parameters)

        def average(*_: object) -> None:
            for number, parameter in enumerate(parameters):
                now = parameter.detach().clone()
                averages[number] = DECAY * averages[number] + (1 - DECAY) * now if number in averages else now

        optimizer.register_step_post_hook(average)
        return optimizer

    names = list(loops.plain_loop(run, averaged, loops.PlainSettings()).weights)
    return {name: averages[number] for number, name in enumerate(names)}  # this network has no buffers


MODES = {
    "single": (1, ("accumulation=2",)),
    "dp": (1, ("parallel=dp",)),
    "model": (1, ("parallel=model",)),
    "ddp": (2, ("parallel=ddp", "accumulation=2")),
    "fsdp": (2, ("parallel=fsdp",)),
    "pipeline": (2, ("parallel=pipeline", "parallel.split_size=12")),
}


@pytest.mark.parametrize(("processes", "mode"), MODES.values(), ids=MODES)
def test_the_average_is_that_of_a_plain_loop_and_is_evaluated(processes, mode, ranks, tmp_path):
    overrides = (*TINY_CPU, *loops.PLAIN_LOOP_OVERRIDES, *loops.OPTIMIZER_CASES["sgd"][0], *mode, EMA)
    result = ranks(processes).train(compose_config(*overrides), tmp_path)
    average = average_at(tmp_path, loops.STEPS)
    assert loops.largest_difference(average, plain_average()) <= 1e-6
    assert loops.largest_difference(loops.weights_at(tmp_path, loops.STEPS), average) > 0.01
    loss, accuracy = loops.plain_evaluation(build_composed_run(*TINY_CPU, *loops.PLAIN_LOOP_OVERRIDES), average)
    assert result.metrics["eval/accuracy"] == accuracy
    assert result.metrics["eval/loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("mode", ["single", "fsdp", "pipeline"])
def test_a_skipped_update_does_not_advance_the_average(mode, ranks, tmp_path):
    steps = ("steps=6", "eval_every=0", "save_every=1", "keep=6")
    overrides = (*TINY_CPU, *HARD, "precision=16", EMA, f"parallel={mode}", *steps)
    ranks(1 if mode == "single" else 2).train(compose_config(*overrides), tmp_path, partial(overflow_at, 3))
    weights = [loops.weights_at(tmp_path, step) for step in range(1, 7)]
    assert_bitwise_equal(weights[2], weights[1])
    average = weights[0]
    for now in (weights[1], *weights[3:]):
        average = {name: DECAY * average[name] + (1 - DECAY) * now[name] for name in average}
    assert loops.largest_difference(average_at(tmp_path, 6), average) <= 1e-6


@pytest.mark.parametrize("options", [(), ("parallel=ensemble",)], ids=str)  # other modes: tests/test_state.py
def test_resume_is_bitwise_exact(options, ranks, tmp_path):
    overrides = (*TINY_CPU, *HARD, EMA, *options)

    def train(name: str, change: Callable[[Any, Any], None] | None = None) -> Path:
        ranks(2 if options else 1).train(compose_config(*overrides), tmp_path / name, change)
        return tmp_path / name

    wanted = train("whole")
    if not options:  # averaging does not change the training
        without = run_outcome(train_in(tmp_path / "without", build_composed_run(*TINY_CPU, *HARD)).directory)
        averaged = run_outcome(wanted)
        assert_bitwise_equal(averaged["weights"], without["weights"])
        assert_bitwise_equal(averaged["curves"]["train/loss"], without["curves"]["train/loss"])
        assert averaged["curves"]["eval/loss"] != without["curves"]["eval/loss"]
        assert not list((tmp_path / "without").rglob("ema.safetensors")), "no average, no file"
    stopped = train("stopped", partial(sigterm_at, 6, 0))
    assert not (stopped / "checkpoints/step_00000008").exists()
    train("stopped")
    assert_bitwise_equal(average_at(stopped, 8), average_at(wanted, 8))
    assert_bitwise_equal(run_outcome(stopped), run_outcome(wanted))
    if "parallel=ensemble" in options:
        files = (path / "checkpoints/step_00000008/rank_1.pt" for path in (stopped, wanted))
        got, of_whole = (torch.load(file, weights_only=True)["ema"] for file in files)
        assert got["moments"], "the second member has its own average"
        assert_bitwise_equal(got, of_whole)


def test_the_average_continues_when_a_run_resumes_in_another_mode(ranks, tmp_path):
    overrides = (*TINY_CPU, *loops.PLAIN_LOOP_OVERRIDES, *loops.OPTIMIZER_CASES["sgd"][0], EMA)
    train_in(tmp_path, build_composed_run(*overrides), partial(sigterm_at, 4, 0))
    ranks(2).train(compose_config(*overrides, "parallel=fsdp"), tmp_path, partial(sigterm_at, 7, 0))
    ranks(2).train(compose_config(*overrides, "parallel=pipeline", "parallel.split_size=12"), tmp_path)
    assert loops.largest_difference(average_at(tmp_path, loops.STEPS), plain_average()) <= 1e-6


def test_the_average_begins_after_resume_if_the_checkpoint_has_none(tmp_path, caplog):
    train_in(
        tmp_path, build_composed_run(*TINY_CPU, *loops.PLAIN_LOOP_OVERRIDES), partial(sigterm_at, loops.STEPS - 1, 0)
    )
    with caplog.at_level("INFO", logger="runner"):
        train_in(tmp_path, build_composed_run(*TINY_CPU, *loops.PLAIN_LOOP_OVERRIDES, EMA))
    assert "the checkpoint has no average of the weights" in caplog.text
    assert_bitwise_equal(average_at(tmp_path, loops.STEPS), loops.weights_at(tmp_path, loops.STEPS))


def test_the_average_equals_that_of_torchs_averaged_model():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(False)
    average, theirs = Ema(0.9).build(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(5):
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
        average.update()
        theirs.update_parameters(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def failing_evaluation() -> None:
        with average.applied():
            assert_bitwise_equal(dict(model.state_dict()), dict(theirs.module.state_dict()))
            assert not model[0].weight.equal(before["0.weight"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_evaluation()
    assert_bitwise_equal(dict(model.state_dict()), before)


def test_hogwild_with_an_average_is_refused():
    with pytest.raises(ConfigError) as refusal:
        prepare_session(build_composed_run(*TINY_CPU, EMA, "parallel=hogwild"))
    assert (refusal.value.key, refusal.value.got) == ("ema.decay", DECAY)


@pytest.mark.parametrize(("decay", "num_steps"), [(0.9999, 450), (0.99, 100), (0.999, 1000)])
def test_a_decay_too_large_for_the_run_is_named_with_one_that_fits(decay, num_steps):
    warning = Ema(decay).too_slow(num_steps)
    average = 1.0  # the weights are 1 after the first step, and 0 later
    for _ in range(num_steps - 1):
        average = decay * average
    assert f" {average:.0%} of the last average" in warning
    fits = float(re.findall(r"ema\.decay=([0-9.]+) averages", warning)[0])
    assert fits ** (num_steps - 1) < 1e-4
    assert 1 / (1 - fits) == pytest.approx(num_steps / 10, rel=0.05)


def test_a_tied_weight_is_averaged_under_all_of_its_names():
    torch.manual_seed(0)
    first, last = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    last.weight, model = first.weight, torch.nn.Sequential(first, torch.nn.Tanh(), last)
    update, average = torch.optim.SGD(model.parameters(), 0.1), Ema(DECAY).build(model)
    wanted = now = torch.zeros(())
    for number in range(3):
        model(torch.ones(2, 4)).square().sum().backward()
        update.step()
        average.update()
        now = first.weight.detach().clone()
        wanted = DECAY * wanted + (1 - DECAY) * now if number else now
    tensors = average.full_tensors(partial(full_state.collect, model, keep=True))
    assert list(tensors) == ["0.weight", "2.weight"]
    for tensor in tensors.values():
        torch.testing.assert_close(tensor, wanted)
    assert torch.equal(last.weight, now), "the weights themselves are kept"
