"""Tests of code of the user in `runner.train`, `verify`, `sweep` and `load`: networks, data, losses, metrics, hooks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import user_objects
from helpers.plain_loop import largest_difference, weights_at
from helpers.runs import assert_checkpoint_bitwise_equal, checkpoint_tensors
from helpers.user_objects import (
    TENSORS,
    Dicts,
    Endless,
    Fails,
    FailsForward,
    Net,
    NoLength,
    Plain,
    Rows,
    chain,
    failing_hook,
    recall,
    right,
    smooth,
    tensors,
)
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader

import runner
from runner.seeds import derive

CPU = ["device=cpu", "device.threads=1", "optimizer=sgd", "optimizer.lr=0.05", "batch_size=12", "log_every=1"]
SHORT = [*CPU, "steps=6", "eval_every=3", "save_every=3"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(overrides: list[str], **code: Any) -> Any:
    return runner.train(overrides, **code)


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
    ([], 1e-6),
    (["precision=64"], 1e-12),
    (["accumulation=4", "precision=64"], 1e-12),
    (["parallel=ddp", "accumulation=2"], 1e-6),
    (["parallel=fsdp", "precision=64"], 1e-12),
    (["parallel=pipeline", "precision=64"], 1e-12),
    ids=lambda value: "-".join(value) or "single" if isinstance(value, list) else None,
)
def test_weights_are_those_of_a_plain_loop_in_every_mode(mode, limit):
    dtype = torch.float64 if "precision=64" in mode else torch.float32
    for make, loss in ((Net, smooth), (chain, None)):
        result = train([*SHORT, *mode], model=make, data=TENSORS, loss=loss)
        wanted = plain_weights(make, loss or cross_entropy, dtype)
        assert largest_difference(weights(result), wanted) < limit
        inputs, targets = TENSORS[1].tensors
        model = make().to(dtype)
        model.load_state_dict(wanted)
        outputs = model(inputs.to(dtype))
        assert result.evaluation["eval/loss"] == pytest.approx(
            (loss or cross_entropy)(outputs, targets).item(), rel=1e-5
        )
        if loss is None:  # the default metric of classes
            right = (outputs.argmax(1) == targets).double().mean().item()
            assert result.evaluation["eval/accuracy"] == pytest.approx(right)


def test_data_in_every_form_gives_the_same_weights():
    pairs = [list(zip(*each.tensors, strict=True)) for each in TENSORS]
    arrays = tuple(tuple(tensor.numpy() for tensor in each.tensors) for each in TENSORS)
    plain = [Plain(pair) for pair in pairs]
    wanted = weights(train(SHORT, model=Net, data=TENSORS))
    for data in (tuple(pairs), arrays, plain, lambda: TENSORS):
        assert largest_difference(weights(train(SHORT, model=Net, data=data)), wanted) == 0


def test_augmentation_is_the_same_with_workers_and_in_other_modes_and_a_resume_is_bitwise():
    data = (Rows(60), Rows(20, noise=0))
    whole = train([*SHORT, "precision=64"], model=Net, data=data)
    other = train([*SHORT, "precision=64", "data.workers=2"], model=Net, data=data)
    assert largest_difference(weights(other), weights(whole)) == 0
    checkpoint = whole.directory / "checkpoints" / "step_00000003"
    resumed = train([f"resume={checkpoint}"], model=Net, data=data)
    assert resumed.directory == whole.directory
    assert_checkpoint_bitwise_equal(whole.directory, checkpoint_tensors(other.directory))
    unlike = (Rows(60, noise=0.2), data[1])
    with pytest.raises(runner.ConfigError) as refused:
        train([f"resume={checkpoint}", "steps=9"], model=Net, data=unlike)
    assert refused.value.key == "data"


def test_code_of_a_script_reaches_the_ranks_and_the_workers():
    names: dict[str, Any] = {"__name__": "__main__", "Base": Rows, "nn": nn, "mse_loss": mse_loss}
    exec(
        "scale = 3.0\n"
        "class Samples(Base):\n"
        "    def __getitem__(self, index):\n"
        "        x, y = super().__getitem__(index)\n"
        "        return x, scale * x[:1]\n"
        "class Tiny(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(5, 1)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n",
        names,
    )
    data = (names["Samples"](48), names["Samples"](12))
    loss = lambda outputs, targets: mse_loss(outputs, targets) + 1  # noqa: E731
    words = [*SHORT, "precision=64"]
    single = train(words, model=names["Tiny"], data=data, loss=loss)
    two = train([*words, "parallel=ddp", "data.workers=1"], model=names["Tiny"], data=data, loss=loss)
    assert two.world_size == 2
    assert largest_difference(weights(two), weights(single)) < 1e-12
    assert single.evaluation["eval/loss"] > 1


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


@pytest.mark.parametrize("mode", [["workload.eval_batch_size=4"], ["parallel=ddp"]], ids=["single", "ddp"])
def test_metrics_are_of_all_held_out_samples(mode):
    metrics = {"recall": recall, "right": right}
    best = ["workload.best_metric=right", "workload.best_goal=max"]
    result = train([*SHORT, *best, *mode], model=Net, data=TENSORS, metrics=metrics)
    model, (inputs, targets) = Net(), TENSORS[1].tensors
    model.load_state_dict(weights(result))
    outputs = model(inputs).detach()
    wanted = {"recall": recall(outputs, targets), "right": right(outputs, targets).float().mean()}
    wanted["loss"] = cross_entropy(outputs, targets)
    assert result.evaluation == {
        f"eval/{name}": pytest.approx(float(value), rel=1e-5) for name, value in wanted.items()
    }
    assert result.best["metric"] == "eval/right"


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
    result = train(words, model=Net, data=TENSORS, **hooks)
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
    changing: list[dict[str, Any]] = [
        {"after_step": leaves_gradients},
        {"before_save": shrinks},
    ]
    for hook in changing:
        found = runner.verify(CPU, **given, **hook)
        assert found.verdict == 1, str(found)
        assert next(iter(hook)) in str(found)
    evaluation = runner.verify(CPU, **given, after_evaluation=lambda state, metrics: shrinks(state))
    assert evaluation.verdict == 1
    draws = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3), nn.Dropout(0.5))
    for words, is_excused in ((CPU, False), (["accumulation=2", *CPU], True)):  # the same numbers are drawn, and others
        found = runner.verify(
            words, model=draws, data=TENSORS, after_step=lambda state: state.model[1].bias.data.neg_()
        )
        assert found.verdict == 1, str(found)
        assert ("dropout" in str(found)) is is_excused, str(found)


def test_a_hook_that_sets_the_learning_rate_changes_nothing_and_is_told_once(capsys):
    def halve(state: Any, metrics: Any = None) -> None:
        for group in state.optimizer.param_groups:
            group["lr"] = float(group["lr"]) / 2

    def told() -> list[str]:
        return [line.split()[0] for line in capsys.readouterr().err.splitlines() if "has set the learning rate" in line]

    words = [*SHORT, "optimizer=adamw"]
    wanted = weights(train(words, model=Net, data=TENSORS, after_step=lambda state: None))
    assert not told()
    for mode in ([], ["compile=step"]):
        hooked = train([*words, *mode], model=Net, data=TENSORS, after_step=halve)
        assert largest_difference(weights(hooked), wanted) < 1e-4
        assert told() == ["after_step"]
    train(words, model=Net, data=TENSORS, after_evaluation=halve)
    assert told() == ["after_evaluation"]


# ---------------------------------------------------------------------------------------------------------------------
# Sweeps


def test_a_sweep_returns_a_table_of_its_runs():
    words = [*CPU, "steps=3", "optimizer.lr=-1,0.01", "seed=0,1"]
    table = runner.sweep(words, model=Net, data=TENSORS)
    assert len(table) == 4
    assert table["status"].value_counts().to_dict() == {"done": 2, "refused": 2}
    done: Any = table[table["status"] == "done"]
    assert sorted(zip(done["optimizer.lr"], done["seed"], strict=True)) == [(0.01, 0), (0.01, 1)]
    row = done[(done["optimizer.lr"] == 0.01) & (done["seed"] == 1)].iloc[0]
    single = train([*CPU, "steps=3", "optimizer.lr=0.01", "seed=1"], model=Net, data=TENSORS)
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


@pytest.mark.parametrize("mode", [[], ["parallel=ddp"], ["parallel=fsdp"], ["parallel=pipeline"]], ids="-".join)
def test_another_network_than_that_of_the_checkpoint_is_named(mode):
    result = train(SHORT, model=Net, data=TENSORS)
    for use in (
        lambda **code: runner.load(result.directory, **code).evaluate("last", mode),
        lambda **code: train([f"resume={result.directory}", "steps=7", *mode], **code),
    ):
        with pytest.raises(runner.ConfigError) as refused:
            use(model=Wide, data=TENSORS)
        assert refused.value.key == "model", refused.value
        assert "Wide" in str(refused.value.got)
        assert "first.weight" in refused.value.why


def test_a_resume_says_which_code_has_another_name_or_source(capsys, tmp_path):
    def told(run: Any, steps: int, **code: Any) -> list[str]:
        capsys.readouterr()
        train([f"resume={run.directory}", f"steps={steps}"], data=TENSORS, **code)
        lines = capsys.readouterr().err.splitlines()
        return [line for line in lines if "than in the last session" in line or "since the last session" in line]

    run = train(SHORT, model=Net, data=TENSORS, loss=smooth)
    assert not told(run, 7, model=Net, loss=smooth)
    [said] = told(run, 8, model=Same, loss=smooth)
    assert "Net then" in said
    assert "Same now" in said
    losses = []
    for number in (1, 2):
        file, names = tmp_path / f"losses{number}.py", {"__name__": "losses"}
        file.write_text(f"def loss(outputs, targets):\n    return {number} * outputs.square().mean()\n")
        exec(compile(file.read_text(), file, "exec"), names)
        losses.append(names["loss"])
    run = train(SHORT, model=Net, data=TENSORS, loss=losses[0])
    [said] = told(run, 7, model=Net, loss=losses[1])
    assert said.startswith("loss=losses.loss ")


# ---------------------------------------------------------------------------------------------------------------------
# What is refused, and errors


class TwoInputs(Net):
    def forward(self, x, y):
        return super().forward(x) + y


def of_both_classes(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    if len(targets) < 21:
        raise ValueError("a class is missing")
    return 0.5


def test_metrics_that_need_more_samples_than_a_batch_are_not_refused():
    result = train(SHORT, model=Net, data=TENSORS, metrics={"a": of_both_classes})
    assert result.evaluation["eval/a"] == 0.5


@pytest.mark.cases(
    ({"data": (Endless(), Endless())}, "data", "no index"),
    ({"data": (NoLength(), NoLength())}, "data", "no length"),
    ({"data": (DataLoader(TENSORS[0]), TENSORS[1])}, "data", "batches"),
    ({"data": (Dicts([1, 2]), Dicts([1]))}, "data", "(input, target)"),
    ({"data": (tensors(60), (torch.zeros(2, 6), torch.zeros(2).long()))}, "data", "[6]"),
    ({"data": ((torch.zeros(9, 5), torch.zeros(8)), tensors(21))}, "data", "9 inputs and 8 targets"),
    ({"data": ((torch.zeros(24, 5), torch.zeros(24)),) * 2}, "data", "[12, 3], targets [12]"),
    ({"data": ((torch.zeros(24, 5), torch.zeros(24, 2).long()),) * 2}, "data", "[12, 3], targets [12, 2]"),
    ({"loss": lambda outputs, targets: outputs}, "loss", "scalar"),
    ({"loss": 3}, "loss", "function"),
    ({"metrics": [right]}, "metrics", "dict"),
    ({"metrics": {"a": lambda outputs, targets: outputs.argmx(1)}}, "metrics.a", "argmx"),
    ({"metrics": {"a": lambda outputs: outputs}}, "metrics.a", "argument"),
    ({"metrics": {"a": lambda outputs, targets: "high"}}, "metrics.a", "number"),
    ({"loss": lambda outputs, targets: cross_entropy(outputs.detach(), targets)}, "loss", "weights"),
    ({"model": TwoInputs}, "model", "single input"),
    ({"model": lambda width: Net()}, "model", "width"),
    ({"model": lambda: 3}, "model", "int"),
    ({"after_step": lambda: None}, "after_step", "arguments"),
    ({"modle": Net}, "modle", "no such argument"),
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_trained_is_refused(given, key, why):
    with pytest.raises(runner.ConfigError) as refused:
        train(SHORT, **({"model": Net, "data": TENSORS} | given))
    assert refused.value.key == key, refused.value
    assert why in f"{refused.value.got} {refused.value.why} {refused.value.remedy}"
    assert not list(Path.cwd().glob("outputs/*/*/config.yaml"))


def test_what_cannot_be_sent_to_processes_is_refused_only_where_there_are_some():
    file = Path("words.txt").open("w")  # noqa: SIM115
    with file:
        loss = lambda outputs, targets: cross_entropy(outputs, targets, reduction="mean" if file else "sum")  # noqa: E731
        assert train(SHORT, model=Net, data=TENSORS, loss=loss).status == "done"
        with pytest.raises(runner.ConfigError) as refused:
            train([*SHORT, "parallel=ddp"], model=Net, data=TENSORS, loss=loss)
    assert refused.value.key == "code"
    assert "files" in refused.value.why


def line_of(text: str) -> str:
    file = Path(user_objects.__file__)
    lines = file.read_text().splitlines()
    return f"{file.name}:{next(n for n, line in enumerate(lines, 1) if line.strip() == text)}"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"data": (Fails(60), Rows(20))}, 'raise ValueError("unreadable")  # of a sample'),
        ({"model": FailsForward}, 'raise RuntimeError("in forward")  # of a network'),
        ({"after_step": failing_hook}, 'raise KeyError("in a hook")  # of a hook'),
    ],
    ids=["sample", "forward", "hook"],
)
@pytest.mark.parametrize("mode", [[], ["parallel=ddp", "data.workers=1"]], ids=["single", "ddp"])
def test_errors_in_code_of_the_user_name_its_line(mode, given, line):
    with pytest.raises(runner.CrashedError) as crashed:
        train([*SHORT, *mode], **({"model": Net, "data": TENSORS} | given))
    assert line_of(line) in crashed.value.result.error
