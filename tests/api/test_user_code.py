"""Tests of code of the user in `runner.train`, `verify`, `sweep` and `load`: networks, data, losses, metrics, hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.plain_loop import largest_difference, weights_at
from helpers.runs import assert_checkpoint_bitwise_equal, checkpoint_tensors
from helpers.user_objects import TENSORS, Net, Rows, chain, smooth
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import prune

import runner
from runner.config import user_code
from runner.seeds import derive

CPU = ["device=cpu", "device.threads=1", "optimizer=sgd", "optimizer.lr=0.05", "batch_size=12", "log_every=1"]
SHORT = [*CPU, "steps=6", "eval_every=3", "save_every=3"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(overrides: list[str], model: Any = Net, data: Any = TENSORS, **code: Any) -> Any:
    return runner.train(overrides, model=model, data=data, **code)


def weights(result: Any) -> dict[str, torch.Tensor]:
    return weights_at(result.directory, result.steps)


def plain_weights(
    make: Callable[[], nn.Module], loss: Callable[..., torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Train for six steps in plain PyTorch on `TENSORS`."""
    inputs, targets = TENSORS[0].tensors
    torch.manual_seed(derive(0, "weights"))
    model = make().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    epochs = [torch.Generator().manual_seed(derive(0, "order", epoch)) for epoch in range(2)]
    stream = torch.cat([torch.randperm(60, generator=generator) for generator in epochs])
    for step in range(6):
        rows = stream[12 * step : 12 * step + 12]
        optimizer.zero_grad()
        loss(model(inputs[rows].to(dtype)), targets[rows]).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.cases(
    (Net, smooth, [], 1e-6),
    (chain, None, ["precision=64"], 1e-12),
    (Net, smooth, ["accumulation=4", "precision=64"], 1e-12),
    (chain, None, ["parallel=ddp", "accumulation=2"], 1e-6),
    (Net, smooth, ["parallel=fsdp", "precision=64"], 1e-12),
    (Net, smooth, ["parallel=pipeline", "precision=64"], 1e-12),
    ids=lambda value: "-".join(value) or "single" if isinstance(value, list) else None,
)
def test_weights_are_those_of_a_plain_loop_in_every_mode(make, loss, mode, limit):
    dtype = torch.float64 if "precision=64" in mode else torch.float32
    result = train([*SHORT, *mode], model=make, loss=loss)
    wanted = plain_weights(make, loss or cross_entropy, dtype)
    assert largest_difference(weights(result), wanted) < limit
    inputs, targets = TENSORS[1].tensors
    model = make().to(dtype)
    model.load_state_dict(wanted)
    outputs = model(inputs.to(dtype))
    assert result.evaluation["eval/loss"] == pytest.approx((loss or cross_entropy)(outputs, targets).item(), rel=1e-5)
    if loss is None:  # the default metric of classes
        right = (outputs.argmax(1) == targets).double().mean().item()
        assert result.evaluation["eval/accuracy"] == pytest.approx(right)


def test_augmentation_is_the_same_with_workers_and_in_other_modes_and_a_resume_is_bitwise():
    data = (Rows(60), Rows(20, noise=0))
    whole = train([*SHORT, "precision=64"], data=data)
    other = train([*SHORT, "precision=64", "data.workers=2"], data=data)
    assert largest_difference(weights(other), weights(whole)) == 0
    checkpoint = whole.directory / "checkpoints" / "step_00000003"
    resumed = train([f"resume={checkpoint}"], data=data)
    assert resumed.directory == whole.directory
    assert_checkpoint_bitwise_equal(whole.directory, checkpoint_tensors(other.directory))
    unlike = (Rows(60, noise=0.2), data[1])
    with pytest.raises(runner.ConfigError) as refused:
        train([f"resume={checkpoint}", "steps=9"], data=unlike)
    assert refused.value.key == "data"


def test_code_of_a_script_reaches_the_ranks_and_the_workers():
    scale = 3.0

    class Samples(Rows):
        __module__ = "__main__"

        def __getitem__(self, index: int) -> Any:
            x, _ = super().__getitem__(index)
            return x, scale * x[:1]

    class Tiny(nn.Linear):
        __module__ = "__main__"

        def __init__(self):
            super().__init__(5, 1)

    given = {"model": Tiny, "data": (Samples(48), Samples(12))}
    loss = lambda outputs, targets: mse_loss(outputs, targets) + 1  # noqa: E731
    words = [*CPU, "steps=3", "precision=64"]
    single = train(words, **given, loss=loss)
    two = train([*words, "parallel=ddp", "data.workers=1"], **given, loss=loss)
    assert two.world_size == 2
    assert largest_difference(weights(two), weights(single)) < 1e-12
    assert single.evaluation["eval/loss"] > 1


def test_a_saved_run_is_loaded_and_evaluated_with_its_code():
    start = Net()
    before = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    given = {"model": start, "data": TENSORS, "loss": loss}
    result = train([*SHORT, "optimizer.lr=1e-9"], **given)
    assert all(torch.equal(before[name], tensor) for name, tensor in start.state_dict().items()), "it is copied"
    assert largest_difference(weights(result), before) < 1e-6, "its weights are those at the beginning"
    run = runner.load(result.directory, **given)
    assert run.evaluate("last") == result.evaluation
    assert run.evaluate("last", ["parallel=ddp", "data.workers=0"]) == pytest.approx(result.evaluation)
    assert set(run.evaluate("last", split="all")) == {"eval/loss"}
    assert largest_difference(runner.load(result.directory, model=Net).model("last").state_dict(), weights(result)) == 0
    with pytest.raises(runner.ConfigError) as refused:
        runner.load(result.directory, model=Net).evaluate("last")
    assert "data" in refused.value.remedy
    assert "loss" in refused.value.remedy


# ---------------------------------------------------------------------------------------------------------------------
# Hooks


@pytest.mark.parametrize("mode", [[], ["parallel=ddp"]], ids=["single", "ddp"])
def test_hooks_are_called_at_their_steps(mode, tmp_path):
    def note(text: str) -> None:
        with (tmp_path / "calls.txt").open("a") as file:
            file.write(f"{text}\n")

    def after_step(state: Any) -> None:
        note(f"step {state.step} of rank {state.session.rank}")
        state.log("user/double", torch.tensor(2.0 * state.step))
        if state.step == 4 and state.session.rank == state.session.world_size - 1:
            state.save_soon()

    def after_evaluation(state: Any, metrics: dict[str, float]) -> None:
        note(f"evaluation {state.step} of rank {state.session.rank}")
        assert metrics["eval/loss"] > 0
        state.log("user/evaluated", state.step)
        if state.step == 6 and state.session.rank == 0:
            state.stop("enough")

    hooks = {
        "after_step": after_step,
        "after_evaluation": after_evaluation,
        "before_save": lambda s: note(f"save {s.step} of rank {s.session.rank}"),
    }
    words = [*CPU, "steps=12", "eval_every=3", "save_every=0", "keep=9", *mode]
    result = train(words, **hooks)
    late = result.world_size > 1  # the ranks may agree while they compute the next step
    last, saved = result.steps, next(step for step in runner.load(result.directory).steps if step >= 4)
    assert last in ((6, 7) if late else (6,))
    assert saved == (5 if late else 4)
    assert (result.status, result.stopped_by) == ("done", "enough")
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    for rank in range(result.world_size):
        ours = [line.removesuffix(f" of rank {rank}") for line in calls if line.endswith(f"rank {rank}")]
        assert [line for line in ours if line.startswith("step")] == [f"step {n}" for n in range(1, last + 1)]
        assert [line for line in ours if line.startswith("evaluation")] == ["evaluation 3", "evaluation 6"]
        assert {f"save {saved}", f"save {last}"} <= {*ours}
    run = runner.load(result.directory)
    assert {saved, last} <= {*run.steps}
    curves = run.curves()
    assert curves["user/double"] == {n: 2.0 * n for n in range(1, last + 1)}
    assert curves["user/evaluated"] == {3: 3.0, 6: 6.0}


def test_verify_finds_a_hook_that_changes_weights_or_gradients():
    given = {"model": Net, "data": TENSORS}

    def shrinks(state: Any) -> None:
        with torch.no_grad():
            state.model.last.weight.mul_(0.999)

    def leaves_gradients(state: Any) -> None:
        for parameter in state.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)

    same = runner.verify(["accumulation=2", *CPU], **given, after_step=lambda state: state.log("a", 1))
    assert same.verdict == 0, str(same)
    last = lambda state, metrics: shrinks(state)  # noqa: E731
    for name, hook in {"after_step": leaves_gradients, "before_save": shrinks, "after_evaluation": last}.items():
        found = runner.verify(CPU, **given, **{name: hook})
        assert found.verdict == 1, str(found)
        assert name in str(found)
    draws = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3), nn.Dropout(0.5))
    for words, is_excused in ((CPU, False), (["accumulation=2", *CPU], True)):  # the same numbers are drawn, and others
        negates = lambda state: state.model[1].bias.data.neg_()  # noqa: E731
        found = runner.verify(words, model=draws, data=TENSORS, after_step=negates)
        assert found.verdict == 1, str(found)
        assert ("dropout" in str(found)) is is_excused, str(found)


class InFloat32(Net):
    """It multiplies by a matrix that is no buffer, and stays float32, as those of quantization do."""

    def __init__(self):
        super().__init__()
        self.matrix = torch.eye(5)

    def forward(self, x):
        return super().forward(x @ self.matrix)


def test_a_network_that_takes_no_float64_is_compared_as_configured(capfd):
    verdict = runner.verify(["accumulation=2", *CPU], model=InFloat32, data=TENSORS).verdict
    assert verdict in (0, 3)
    assert "not compared in float64: " in capfd.readouterr().err
    with pytest.raises(runner.ConfigError):
        runner.verify(["accumulation=2", "precision=64", *CPU], model=InFloat32, data=TENSORS)


def test_verify_explains_a_loss_that_is_no_mean_over_the_samples():
    x, y = TENSORS[0].tensors
    valid = (x, y.where(torch.arange(len(y)) % 12 < 4, -100))  # of a batch in order, other counts in its two halves

    def own(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    halves = ["accumulation=2", *CPU]
    for words, loss, verdict in ((CPU, own, 0), (halves, own, 1), (halves, nn.CrossEntropyLoss(), 0)):
        found = runner.verify(words, model=Net, data=(valid, TENSORS[1]), loss=loss)
        assert found.verdict == verdict, str(found)
        assert ("mean over the samples" in str(found)) is bool(verdict), str(found)


def test_a_hook_that_sets_the_learning_rate_changes_nothing_and_is_told_once(capsys, caplog):
    def halve(state: Any, metrics: Any = None) -> None:
        for group in state.optimizer.param_groups:
            group["lr"] /= 2  # in place, if it is a tensor

    def told() -> list[str]:
        return [line.split()[0] for line in capsys.readouterr().err.splitlines() if "has set the learning rate" in line]

    wanted = weights(train(SHORT, after_step=lambda state: None))
    assert not told()
    for name in ("after_step", "after_evaluation"):
        assert largest_difference(weights(train(SHORT, **{name: halve})), wanted) == 0
        assert told() == [name]
    of_tensor: Any = SimpleNamespace(
        model=torch.nn.Module(), optimizer=torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.1))
    )
    for hook, count in ((lambda state: None, 0), (halve, 1)):
        with user_code.using(user_code.passed(after_step=hook)):
            user_code.hooks().after_step(of_tensor)
        assert len(caplog.messages) == count


@pytest.mark.cases((False, "single"), (True, "single"), (False, "ddp"), (None, "single"))
def test_a_hook_that_freezes_unfreezes_or_prunes_parameters_ends_the_run(is_trained, mode):
    def network() -> torch.nn.Module:
        made = chain()
        made[0].requires_grad_(is_trained is not True)
        return made

    def change(state: Any) -> None:
        if state.step == 2 and is_trained is None:
            prune.l1_unstructured(state.model[0], "weight", amount=0.5)
        elif state.step == 2:
            state.model.get_submodule("0").requires_grad_(is_trained)

    changed = "weight" if is_trained is None else "bias"
    with pytest.raises(runner.ConfigError, match=rf"after_step: it changes what is trained \(0.{changed}\)"):
        train([*SHORT, f"parallel={mode}"], model=network, after_step=change)


# ---------------------------------------------------------------------------------------------------------------------
# Sweeps


def test_a_sweep_returns_a_table_of_its_runs():
    words = [*CPU, "steps=3", "optimizer.lr=-1,0.01", "seed=0,1"]
    table = runner.sweep(words, model=Net, data=TENSORS)
    assert len(table) == 4
    assert table["status"].value_counts().to_dict() == {"done": 2, "refused": 2}
    assert {*table[table["status"] == "refused"]["directory"]} == {""}, "they have none"
    done: Any = table[table["status"] == "done"]
    assert sorted(zip(done["optimizer.lr"], done["seed"], strict=True)) == [(0.01, 0), (0.01, 1)]
    row = done[(done["optimizer.lr"] == 0.01) & (done["seed"] == 1)].iloc[0]
    single = train([*CPU, "steps=3", "optimizer.lr=0.01", "seed=1"])
    assert row["eval/loss"] == row["best"] == single.evaluation["eval/loss"]
    assert largest_difference(weights_at(Path(row["directory"]), 3), weights(single)) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Other code than before


class Wide(Net):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 9), nn.Linear(9, 3)


class Same(Net):
    pass


def test_another_network_than_that_of_the_checkpoint_is_named():
    path = train(SHORT).directory
    run = runner.load(path, model=Wide, data=TENSORS)
    for use in (
        lambda: train([f"resume={path}", "steps=7"], model=Wide),
        *(partial(run.evaluate, "last", [f"parallel={mode}"]) for mode in ("single", "fsdp", "pipeline")),
    ):
        with pytest.raises(runner.ConfigError) as refused:
            use()
        assert refused.value.key == "model", refused.value
        assert "Wide" in str(refused.value.got)
        assert "first.weight" in refused.value.why


def test_a_resume_says_which_code_has_another_name_or_source(capsys, tmp_path):
    def told(run: Any, steps: int, **code: Any) -> list[str]:
        capsys.readouterr()
        train([f"resume={run.directory}", f"steps={steps}"], **code)
        lines = capsys.readouterr().err.splitlines()
        return [line for line in lines if "than in the last session" in line or "since the last session" in line]

    run = train(SHORT, loss=smooth)
    assert not told(run, 7, model=Net, loss=smooth)
    [said] = told(run, 8, model=Same, loss=smooth)
    assert "Net then" in said
    assert "Same now" in said
    one = lambda outputs, targets: outputs.square().mean()  # noqa: E731
    two = lambda outputs, targets: 2 * outputs.square().mean()  # noqa: E731
    run = train(SHORT, loss=one)
    [said] = told(run, 7, loss=two)
    assert said.startswith(f"loss={__name__}.test_a_resume")


@pytest.mark.cases(
    (["optimizer.lrr=1,2"], "optimizer.lrr"),
    (["optimizer.lrr=1", "seed=1,2"], "optimizer.lrr"),
    (["optimizer=sgdd,adam"], "optimizer"),
    (["steps=1,("], "steps=1,("),
    (["-m", "seed=1,2"], "-m"),
)
def test_mistakes_in_a_sweep_are_config_errors_that_name_the_key(words, key):
    with pytest.raises(runner.ConfigError) as refused:
        runner.sweep(words, model=Net, data=TENSORS)
    assert refused.value.key == key


def test_a_search_over_objects_prints_no_command_which_could_not_pass_them(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = [*CPU, "steps=2", "optimizer.lr=0.1,0.01", "sweep.search=grid"]
    assert [*runner.sweep(words, model=Net, data=TENSORS)["status"]] == ["done", "done"]
    output = capfd.readouterr().out
    assert "best eval/loss" in output
    assert "run: " not in output
