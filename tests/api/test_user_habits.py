"""Tests of what users bring: NumPy's and pandas' types, labels of other kinds, outputs that are no tensor, modules."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from helpers.plain_loop import largest_difference, weights_at
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, TensorDataset

import runner
from runner.config.errors import ConfigError
from runner.config.user_code import find, passed, using
from runner.system.import_path import python_path

SHORT = ["device=cpu", "device.threads=1", "optimizer=sgd", "optimizer.lr=0.1", "batch_size=10", "steps=4"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 inputs that float32 rounds, and int64 classes."""
    x = np.random.default_rng(count).normal(size=(count, 3))
    return x, (x[:, 0] > 0) + 1 * (x[:, 1] > 0)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.spare = net(), nn.Linear(2, 2)

    def forward(self, x):
        return self.layers(x)


class Dict(Net):
    def forward(self, x):
        return {"logits": self.layers(x), "more": (x,)}


def trained(*words: str, model=net, data=None, **more):
    result = runner.train([*SHORT, *words], model=model, data=data or (rows(40), rows(21)), **more)
    return result, weights_at(result.directory, result.steps)


def test_types_of_inputs_and_labels_do_not_change_the_result():
    wide = rows(40), rows(21)
    wanted = trained()[1]
    frames = tuple((pandas.DataFrame(x), pandas.Series(y)) for x, y in wide)
    small = tuple((x.astype(np.float32), y.astype(np.int32)) for x, y in wide)
    for data in (frames, small, tuple(ConcatDataset([TensorDataset(*map(torch.tensor, each))]) for each in wide)):
        assert largest_difference(trained(data=data)[1], wanted) == 0
    assert largest_difference(trained(data=small, loss=nn.CrossEntropyLoss())[1], wanted) < 1e-6
    two, as_ints = (tuple((x, (y > 0).astype(kind)) for x, y in wide) for kind in (bool, np.int64))
    assert largest_difference(trained(data=two)[1], trained(data=as_ints)[1]) == 0


def test_ignored_targets_count_neither_in_gradients_nor_in_the_accuracy():
    (x, y), (v, w) = ((a, np.where(np.arange(len(a)) % 3 == 0, -100, b)) for a, b in (rows(40), rows(21)))
    result, whole = trained("precision=64", data=((x, y), (v, w)))
    parts = trained("precision=64", "accumulation=2", data=((x, y), (v, w)))[1]
    assert largest_difference(parts, whole) < 1e-13
    (model := net().double()).load_state_dict(whole)
    outputs, targets = model(torch.from_numpy(v).float().double()), torch.from_numpy(w)
    loss = cross_entropy(outputs, targets, reduction="sum").item() / 21
    right = (outputs.argmax(1) == targets).sum().item() / 14
    assert result.evaluation == {"eval/loss": pytest.approx(loss), "eval/accuracy": pytest.approx(right)}


@pytest.mark.parametrize("mode", [["workload.eval_batch_size=4"], ["parallel=ddp", "parallel.find_unused=true"]])
def test_outputs_may_be_a_dict_and_parameters_unused(mode):
    wanted, weights = trained(model=Net)
    loss = lambda outputs, targets: cross_entropy(outputs["logits"], targets)  # noqa: E731
    right = lambda outputs, targets: outputs["logits"].argmax(1) == targets  # noqa: E731
    metrics = {"accuracy": right, "inputs": lambda outputs, targets: outputs["more"][0].sum()}
    result, same = trained(*mode, model=Dict, loss=loss, metrics=metrics)
    assert largest_difference(same, weights) < 1e-6
    assert result.evaluation == pytest.approx(wanted.evaluation | {"eval/inputs": rows(21)[0].sum()}, rel=1e-5)


def test_a_compiled_network_saves_weights_under_its_own_names():
    for given in (torch.compile(net()), lambda: torch.compile(net())):
        assert trained(model=given)[1].keys() == net().state_dict().keys()


@pytest.mark.cases(
    ([], {"model": Dict}, "model"),
    ([], {"model": lambda: nn.Sequential(nn.LazyLinear(3))}, "model"),
    ([], {"data": [([1.0, 2.0, 3.0], "cat")] * 40}, "data"),
    ([], {"data": ((rows(40)[0], rows(40)[1] + 1), rows(21))}, "data"),
    ([], {"data": ((rows(40)[0], rows(40)[1] - 1), rows(21)), "loss": nn.CrossEntropyLoss()}, "data"),
    (["parallel=ddp"], {"model": Net}, "parallel.find_unused"),
    ids=["dict", "lazy", "text", "from 1", "from -1", "unused"],
)
def test_mistakes_are_refused(words, given, key):
    with pytest.raises(ConfigError) as refused:
        trained(*words, **given)
    assert refused.value.key == key


def test_a_hook_that_logs_no_number_is_named():
    with pytest.raises(runner.CrashedError) as crashed:
        trained(after_step=lambda state: state.log("a", torch.ones(3)))  # here
    line = 1 + next(n for n, text in enumerate(Path(__file__).read_text().splitlines()) if text.endswith("# here"))
    assert f"{Path(__file__).name}:{line}" in crashed.value.result.error


@pytest.mark.parametrize("tag", ["train/loss", "eval/loss", "lr"])
def test_a_hook_does_not_replace_a_curve_of_the_run(tag):
    name = "after_evaluation" if tag.startswith("eval/") else "after_step"
    with pytest.raises(runner.CrashedError) as crashed:
        trained(**{name: lambda state, *metrics: state.log(tag, 7)})
    assert f"log('{tag}', …)" in crashed.value.result.error


def test_files_are_compiled_as_they_are_and_may_not_hide_packages(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    (tmp_path / "mine.py").write_text("class Net:\n    size: int\n")
    (tmp_path / "hides.py").write_text("from models.mine import Net\n")
    with using(passed(["model=mine.py:Net"])):
        assert find("model").__annotations__ == {"size": int}
    with using(passed(["model=hides.py"])), pytest.raises(ConfigError) as refused:
        find("model")
    assert "models" in refused.value.remedy
    command, environment = [sys.executable, "-c", "import runner; runner.load"], {**python_path(), "PYTHONSAFEPATH": ""}
    assert "rename" in subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stderr
