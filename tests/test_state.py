"""Tests that all state of a run is saved and restored, and that evaluations and checkpoints do not change training."""

import copy
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.checkpoint_edits import read_checkpoint_file, rewrite_manifest, write_checkpoint_file
from helpers.plain_loop import largest_difference, weights_at
from helpers.runs import assert_bitwise_equal
from helpers.stateful_objects import (
    DATA,
    SHORT,
    Fails,
    Forgets,
    Remembers,
    Renames,
    SparseBuffer,
    Unsavable,
    Weighted,
    evolving,
    named_chain,
    quiet,
    train_given,
)
from torch import nn
from torch.nn.functional import cross_entropy

import runner
from runner.config.errors import ConfigError
from runner.seeds import derive
from runner.storage.checkpoint import load

STEPS = 6
MODES = [
    *[(1, "single ema.decay=0.5"), (2, "ddp accumulation=2 ema.decay=0.5"), (2, "fsdp precision=64 ema.decay=0.5")],
    *[(2, "ensemble"), (2, "pipeline parallel.cuts=[tanh] parallel.num_micro_batches=2")],
    (1, "pipeline parallel.cuts=[tanh] parallel.engine=streams"),
]


def words(mode: str, *more: str) -> tuple[str, ...]:
    first, *rest = mode.split() or ["single"]
    return (f"parallel={first}", *rest, "save_every=0", "log_every=1", *more)


@pytest.mark.parametrize(("count", "mode"), MODES)
def test_evaluations_checkpoints_and_resumes_change_no_bit_of_any_kind_of_state(count, mode, ranks, tmp_path):
    """Of buffers, attributes, extra state and a loss, which may be replaced, change their form and begin as None."""

    def train(name: str, *more: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        ranks(count).call_on_all(partial(train_given, words(mode, *more)), tmp_path / name)

    train("whole", f"steps={STEPS}", "eval_every=0")
    train("often", f"steps={STEPS}", "eval_every=1", "save_every=1")
    for step in (2, 3, STEPS):
        train("resumed", f"steps={step}", "eval_every=2")
    for rank in range(count):
        wanted, often, resumed = (
            load(tmp_path / name / f"checkpoints/step_{STEPS:08d}", rank) for name in ("whole", "often", "resumed")
        )
        for other in (often, resumed):
            for key in ("tensors", "ema"):
                assert_bitwise_equal(dict(vars(other)[key]), dict(vars(wanted)[key]))
            for key in ("attributes", "loss"):
                assert_bitwise_equal(other.state[key], wanted.state[key])
        assert_bitwise_equal(dict(resumed.local), dict(wanted.local))
    assert bool(wanted.ema) is ("ema" in mode)
    passes = len(wanted.tensors["evolves.grown"])  # a step has several in a pipeline
    assert passes >= STEPS
    assert passes % STEPS == 0
    assert wanted.state["attributes"].keys() == {
        f"0.evolves.{name}" for name in ("calls", "_started", "temperature", "phase", "level", "power", "late_power")
    }
    assert wanted.state["attributes"]["0.evolves.calls"] == passes
    assert len(wanted.tensors["odd._extra_state"]["log"]) == passes
    assert wanted.tensors["odd.wide"][0] == 1 + (2 + passes) * 1j
    assert wanted.tensors["odd.count"].int().tolist() == [passes] * 2
    [of_loss] = wanted.state["loss"]
    assert len(of_loss["grown"]) == passes


def plain_loop() -> tuple[dict[str, torch.Tensor], list[float], dict[str, torch.Tensor]]:
    """Train in plain PyTorch with an evaluation after each step, which is made with copies; return its losses."""
    (inputs, targets), held_out = DATA
    torch.manual_seed(derive(0, "weights"))
    model, loss, evaluations = quiet(), Weighted(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    epochs = [torch.Generator().manual_seed(derive(0, "order", epoch)) for epoch in range(2)]
    stream = torch.cat([torch.randperm(60, generator=generator) for generator in epochs])
    for step in range(STEPS):
        rows = stream[12 * step : 12 * step + 12]
        optimizer.zero_grad()
        loss(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
        with torch.no_grad():
            tested, measured = copy.deepcopy(model).eval(), copy.deepcopy(loss).eval()
            evaluations.append(float(measured(tested(held_out[0]), held_out[1])))
    return model.state_dict(), evaluations, loss.state_dict()


def test_buffers_and_the_mode_of_a_loss_are_those_of_a_plain_loop(ranks, tmp_path):
    wanted, evaluations, of_loss = plain_loop()
    for step in (2, STEPS):
        result = train_given(words("", f"steps={step}", "eval_every=1"), tmp_path, model=quiet)
        assert result.metrics["eval/loss"] == pytest.approx(evaluations[step - 1], rel=1e-6)
    got = weights_at(tmp_path, STEPS)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-7)
    [saved] = torch.load(tmp_path / f"checkpoints/step_{STEPS:08d}/state.pt", weights_only=True)["loss"]
    torch.testing.assert_close(saved["frequency"], of_loss["frequency"])
    assert saved["calls"].int() == of_loss["calls"].int() == STEPS


@pytest.mark.cases(
    (Forgets, ["0.weight", "load_state_dict"]),
    (partial(Unsavable, Weighted()), ["_extra_state", "Weighted"]),
    (partial(Unsavable, b"bytes"), ["_extra_state"]),
    (partial(Unsavable, np.zeros(2)), ["_extra_state"]),
    (SparseBuffer, ["graph", "persistent=False"]),
    (Fails, ["in state_dict"]),
    ids=["forgets", "object", "bytes", "array", "sparse", "fails"],
)
def test_a_network_whose_state_cannot_be_restored_is_refused_before_the_first_step(make, named, tmp_path):
    with pytest.raises(ConfigError) as refused:
        train_given(words("", "steps=3", "eval_every=0"), tmp_path, model=make(), loss=None)
    assert refused.value.key == "model"
    assert all(word in str(refused.value) for word in named), refused.value
    assert not [*tmp_path.glob("checkpoints/*")]


def evolved(num_steps: int) -> tuple[nn.Module, list[float]]:
    """Train in plain PyTorch; return the network, and the losses of an evaluation after each step, made with a copy."""
    (inputs, targets), held_out = DATA
    torch.manual_seed(derive(0, "weights"))
    model, losses = evolving().double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    epochs = [torch.Generator().manual_seed(derive(0, "order", epoch)) for epoch in range(2)]
    stream = torch.cat([torch.randperm(60, generator=generator) for generator in epochs])
    for step in range(num_steps):
        rows = stream[12 * step : 12 * step + 12]
        optimizer.zero_grad()
        cross_entropy(model(inputs[rows].double()), targets[rows]).backward()
        optimizer.step()
        with torch.no_grad():
            losses.append(float(cross_entropy(copy.deepcopy(model).eval()(held_out[0].double()), held_out[1])))
    return model, losses


def evaluated(directory: Path, mode: str) -> dict[str, float]:
    return runner.load(directory, model=evolving, data=DATA).evaluate("last", [mode])


def test_such_state_is_that_of_a_plain_loop_in_any_order_of_modes_and_in_evaluations(ranks, tmp_path):
    modes = ["single", "ddp", "single", "fsdp", "ddp", "single"]
    model, losses = evolved(len(modes))
    options = [*SHORT, f"output_root={tmp_path}", "precision=64", "save_every=0", "eval_every=1", "log_every=1"]
    directory = runner.train([*options, "steps=1"], model=evolving, data=DATA).directory
    for step, mode in enumerate(modes[1:], start=2):
        change = [f"resume={directory}", f"steps={step}", f"parallel={mode}"]
        count = 1 if mode == "single" else 2
        result, *_ = ranks(count).call_on_all(partial(runner.train, change, model=evolving, data=DATA))
        assert result.metrics["eval/loss"] == pytest.approx(losses[step - 1], rel=1e-12)
    assert largest_difference(weights_at(directory, len(modes)), dict(model.state_dict())) < 1e-12
    for count, mode in ((1, "single"), (2, "ddp")):
        found, *_ = ranks(count).call_on_all(partial(evaluated, directory, f"parallel={mode}"))
        assert found["eval/loss"] == pytest.approx(losses[-1], rel=1e-12)
    inputs, loaded = DATA[1][0].double(), runner.load(directory, model=evolving).model("last")
    with torch.no_grad():
        torch.testing.assert_close(loaded(inputs), model.eval()(inputs), rtol=1e-12, atol=0)


def test_each_process_resumes_with_numbers_and_lists_of_its_own(ranks, tmp_path):
    def train(name: str, steps: int) -> list[int]:
        (tmp_path / name).mkdir(exist_ok=True)
        call = partial(train_given, words("ddp", f"steps={steps}", "eval_every=0"), model=Remembers, loss=None)
        ranks(2).call_on_all(call, tmp_path / name)
        saved = [load(tmp_path / name / f"checkpoints/step_{steps:08d}", rank).local["buffers"] for rank in (0, 1)]
        return [each.get("0.peaks", 0) for each in saved]

    whole, half = train("whole", 4), train("resumed", 2)
    assert 0 in half
    assert half[0] != half[1]
    assert train("resumed", 4) == whole
    assert_bitwise_equal(weights_at(tmp_path / "resumed", 4), weights_at(tmp_path / "whole", 4))
    log = (tmp_path / "whole/log.txt").read_text()
    assert "no checkpoint has it" not in log
    lists = [
        [load(tmp_path / name / "checkpoints/step_00000004", rank).local["code"]["model.seen"] for rank in (0, 1)]
        for name in ("whole", "resumed")
    ]
    assert lists[0] == lists[1]
    assert [len(each) for each in lists[0]] == [4, 4]
    assert "model: Remembers.peaks differs between processes" in log
    assert "Remembers.constant" not in log


def made_older(checkpoint: Path) -> None:
    """Remove what runs of an earlier version did not save."""
    for file, keys in (("state.pt", ["attributes", "loss"]), ("rank_*.pt", ["buffers", "replicas", "random"])):
        for path in checkpoint.glob(file):
            content = read_checkpoint_file(path)
            random = {"cpu": content["random"]["cpu"]} if "random" in content else {}
            kept = {key: value for key, value in content.items() if key not in keys}
            write_checkpoint_file(path, kept | ({"random": random} if random else {}))
    signature = json.loads((checkpoint / "model.json").read_text())
    (checkpoint / "model.json").write_text(json.dumps({"data": signature["data"]}))
    rewrite_manifest(checkpoint)


@pytest.mark.parametrize(("count", "mode"), [(1, "single"), (2, "ddp"), (2, "pipeline parallel.cuts=[tanh]")])
def test_a_checkpoint_of_an_earlier_version_is_resumed_bitwise(count, mode, ranks, tmp_path):
    def train(name: str, steps: int) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        call = partial(train_given, words(mode, f"steps={steps}", "eval_every=0"), model=named_chain, loss=None)
        ranks(count).call_on_all(call, tmp_path / name)

    train("whole", 4)
    train("older", 2)
    made_older(tmp_path / "older/checkpoints/step_00000002")
    train("older", 4)
    assert_bitwise_equal(weights_at(tmp_path / "older", 4), weights_at(tmp_path / "whole", 4))


def test_names_that_a_network_gives_its_state_are_those_of_its_checkpoint(tmp_path):
    for step in (2, 4):
        train_given(words("", f"steps={step}", "eval_every=0"), tmp_path / "resumed", model=Renames, loss=None)
    train_given(words("", "steps=4", "eval_every=0"), tmp_path / "whole", model=Renames, loss=None)
    wanted = weights_at(tmp_path / "whole", 4)
    assert wanted.keys() == {"w", "0.bias"}
    assert_bitwise_equal(weights_at(tmp_path / "resumed", 4), wanted)


class RegistersHook(nn.Linear):
    """Its first forward pass registers a hook of its weight, and says so in an attribute that a checkpoint has."""

    is_registered = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not self.is_registered:
            self.weight.register_hook(lambda gradient: gradient / 2)
            self.is_registered = True
        return super().forward(x)


def test_a_hook_that_a_resumed_run_would_lack_is_said(tmp_path):
    options = [*SHORT, f"output_root={tmp_path}", "steps=1", "eval_every=0"]
    directory = runner.train(options, model=lambda: RegistersHook(5, 3), data=DATA).directory
    said = "RegistersHook.weight.hooks changes in training, and no checkpoint has it"
    assert said in (directory / "log.txt").read_text()


def test_a_hook_that_makes_a_buffer_says_that_no_run_can_be_loaded(tmp_path):
    def after_step(state):
        if state.step == 2:
            state.model[0].register_buffer("mask", torch.ones(3))

    options = [*SHORT, f"output_root={tmp_path}", "steps=2", "eval_every=0"]
    made = {"model": lambda: nn.Sequential(nn.Linear(5, 3)), "data": DATA, "after_step": after_step}
    log = (runner.train(options, **made).directory / "log.txt").read_text()
    assert "makes or removes 0.mask" in log
    assert "no run can be resumed or loaded from this checkpoint" in log
