"""Tests of the options of the default loss, and of named metrics, with networks and data of the user."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from helpers.plain_loop import largest_difference, weights_at
from helpers.user_objects import TENSORS, Net
from sklearn.metrics import f1_score, roc_auc_score, root_mean_squared_error
from torch import nn
from torch.nn.functional import cross_entropy

import runner
from runner.seeds import derive

WORDS = ["device=cpu", "device.threads=1", "optimizer=sgd", "optimizer.lr=0.05", "batch_size=12", "precision=64"]
SHORT = [*WORDS, "steps=4"]
(X, Y), (X_HELD_OUT, Y_HELD_OUT) = (each.tensors for each in TENSORS)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


class PerStep(nn.Module):
    """Predicts one of three classes for each of five values of an input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(1, 3, 3, padding=1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs[:, None])


STEPS = torch.stack([Y.roll(shift) for shift in range(5)], 1).masked_fill(X < -1, -100)


def plain_loop(make: Any, targets: torch.Tensor, weights: list[float], smoothing: float) -> nn.Module:
    torch.manual_seed(derive(0, "weights"))
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(derive(0, "order", 0)))
    for rows in order.split(12)[:4]:
        optimizer.zero_grad()
        weight = torch.tensor(weights, dtype=torch.float64)
        outputs = model(X[rows].double())
        cross_entropy(outputs, targets[rows], weight, label_smoothing=smoothing).backward()
        optimizer.step()
    return model


@pytest.mark.cases(
    ([], Net, Y, Y_HELD_OUT),
    (["accumulation.steps=3"], Net, Y, Y_HELD_OUT),
    (["parallel=ddp"], PerStep, STEPS, STEPS[:21]),
    ids=lambda value: "-".join(value) or "single" if isinstance(value, list) else None,
)
def test_class_weights_and_label_smoothing_are_those_of_a_plain_loop(mode, make, targets, held_out):
    options = ["workload.class_weights=[1,3,0.5]", "workload.label_smoothing=0.1"]
    data = ((X, targets), (X_HELD_OUT, held_out))
    result: Any = runner.train([*SHORT, *options, *mode], model=make, data=data)
    model = plain_loop(make, targets, [1, 3, 0.5], 0.1)
    assert largest_difference(weights_at(result.directory, 4), model.state_dict()) < 1e-12
    with torch.no_grad():
        loss = cross_entropy(model(X_HELD_OUT.double()), held_out)
    assert result.evaluation["eval/loss"] == pytest.approx(loss.item(), rel=1e-6), "not weighted or smoothed"


@pytest.mark.parametrize("mode", [[], ["parallel=ddp", "workload.eval_batch_size=4"]], ids=["single", "ddp"])
def test_named_metrics_are_those_of_scikit_learn_and_select_the_best_checkpoint(mode):
    words = [*SHORT, *mode, "eval_every=1", "workload.metrics=[f1,auroc]", "workload.best_metric=f1"]
    result: Any = runner.train(words, model=Net, data=TENSORS)
    model = runner.load(result.directory, model=Net, data=TENSORS).model("last")
    with torch.no_grad():
        outputs = model(X_HELD_OUT.double())
    labels = {"y_true": Y_HELD_OUT, "y_score": outputs.softmax(1)}
    assert result.evaluation["eval/f1"] == pytest.approx(f1_score(Y_HELD_OUT, outputs.argmax(1), average="macro"))
    assert result.evaluation["eval/auroc"] == pytest.approx(roc_auc_score(**labels, multi_class="ovr"))
    assert "eval/accuracy" in result.evaluation
    curve = runner.load(result.directory).curves()["eval/f1"]
    assert result.best["value"] == pytest.approx(max(curve.values()))


def test_named_metrics_of_targets_for_each_position_and_of_numbers():
    mine = {"model": PerStep, "data": ((X, STEPS), (X_HELD_OUT, STEPS[:21])), "loss": nn.CrossEntropyLoss()}
    result: Any = runner.train([*SHORT, "workload.metrics=[f1,accuracy]"], **mine)
    model = runner.load(result.directory, **mine).model("last")
    with torch.no_grad():
        predicted = model(X_HELD_OUT.double()).argmax(1)
    counts = STEPS[:21] != -100
    wanted = f1_score(STEPS[:21][counts], predicted[counts], average="macro")
    assert result.evaluation["eval/f1"] == pytest.approx(wanted)
    right = (predicted == STEPS[:21])[counts].double().mean().item()
    assert result.evaluation["eval/accuracy"] == pytest.approx(right)

    sums = X.sum(1)
    mine = {"model": lambda: nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), "data": ((X, sums), (X[:21], sums[:21]))}
    result = runner.train([*SHORT, "workload.metrics=[rmse]"], **mine)
    model = runner.load(result.directory, **mine).model("last")
    with torch.no_grad():
        wanted = root_mean_squared_error(sums[:21], model(X[:21].double()))
    assert result.evaluation["eval/rmse"] == pytest.approx(wanted)


NUMBERS = ((X, X[:, :1]), (X_HELD_OUT, X_HELD_OUT[:, :1]))
ONE = {"model": lambda: nn.Linear(5, 1), "data": NUMBERS}


class Locked(nn.Linear):
    """It cannot be copied."""

    def __init__(self, num_inputs: int, num_outputs: int):
        super().__init__(num_inputs, num_outputs)
        self.lock = threading.Lock()


PROBABILITIES = {"model": lambda: nn.Sequential(nn.Linear(5, 3), nn.Softmax(1)), "data": TENSORS}


@pytest.mark.cases(
    (["workload.class_weights=[1,2]"], {}, "workload.class_weights", "give 3 weights"),
    (["workload.class_weights=[1,-2,1]"], {}, "workload.class_weights", "workload.class_weights="),
    (["workload.class_weights=[1,2,1]"], ONE, "workload.class_weights", "weight=…"),
    (
        ["workload.label_smoothing=0.1"],
        {"loss": nn.CrossEntropyLoss()},
        "workload.label_smoothing",
        "label_smoothing=…",
    ),
    (["workload.metrics=[f1]"], ONE, "workload.metrics", "rmse"),
    (["workload.metrics=[rmse]"], {}, "workload.metrics", "f1"),
    (["workload.metrics=[f2]"], {}, "workload.metrics", "f1"),
    (["workload.metrics=[f1]"], {"metrics": {"f1": print}}, "workload.metrics", "leave one"),
    (["workload.metrics=[auroc]"], PROBABILITIES, "workload.metrics", "return logits"),
    (["workload.best_metric=mine"], {"metrics": {"mine": lambda o, t: 1.0}}, "workload.best_goal", "best_goal=max"),
    (["seed=1"], {"model": Locked(5, 3)}, "model", "lambda: Net"),
    (["seed=2"], {"loss": Locked(1, 1)}, "loss", "that calls it"),
    (["stop.metric=eval/mine", "stop.target=1"], {"metrics": {"mine": print}}, "stop.metric", "best_metric=NAME"),
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_does_not_apply_says_what_does(words, code, key, remedy):
    with pytest.raises(runner.ConfigError) as refused:
        runner.train([*SHORT, *words], **{"model": Net, "data": TENSORS, **code})
    assert refused.value.key == key
    assert remedy in refused.value.remedy
