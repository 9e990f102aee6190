"""Tests of hooks of the user that log texts, or raise what is not derived from `Exception`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from helpers.user_objects import TENSORS, Net

import runner
from runner.state import State

WORDS = ["device=cpu", "device.threads=1", "batch_size=12", "log_every=1", "steps=6", "save_every=2"]


class Custom(BaseException):
    pass


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", [Custom, GeneratorExit, KeyboardInterrupt, SystemExit])
def test_whatever_a_hook_raises_the_run_has_crashed_and_can_be_resumed(kind):
    def after_step(state: Any) -> None:
        if state.step == 5:
            raise kind("enough")

    with pytest.raises(runner.CrashedError) as crash:
        runner.train(WORDS, model=Net, data=TENSORS, after_step=after_step)
    path: Any = crash.value.result.directory
    saved = json.loads((path / "result.json").read_text())
    assert (saved["status"], saved["steps"]) == ("crashed", 5)
    assert kind.__name__ in saved["error"]
    assert isinstance(crash.value.__cause__, kind)
    resumed = runner.train([f"resume={path}"], model=Net, data=TENSORS, after_step=lambda state: None)
    straight = runner.train(WORDS, model=Net, data=TENSORS)
    assert resumed.metrics == straight.metrics


@pytest.mark.parametrize("kind", [Custom, SystemExit])
def test_whatever_a_network_raises_is_a_config_error(kind):
    def model() -> None:
        raise kind("no network")

    with pytest.raises(runner.ConfigError) as refused:
        runner.train(WORDS, model=model, data=TENSORS)
    assert refused.value.key == "model"
    assert kind.__name__ in refused.value.why


def test_a_text_that_a_hook_logs_is_in_the_log_and_in_the_event_file():
    note = lambda state: state.log("note", f"at {state.step}")  # noqa: E731
    path: Any = runner.train(WORDS, model=Net, data=TENSORS, after_step=note).directory
    assert "step 4: note: at 4" in (path / "log.txt").read_text()
    [events] = path.glob("events.out.tfevents.*")
    assert b"at 4" in events.read_bytes()
    assert "note" not in runner.load(path).curves()


@pytest.mark.cases((None,), ([1.0, 2.0],), (torch.ones(2),), (np.ones(2),), ({},))
def test_what_is_neither_a_number_nor_a_text_is_refused_in_the_line_that_logs_it(value):
    state = State.__new__(State)
    state._to_log = {}
    with pytest.raises(TypeError, match="one number or a text"):
        state.log("tag", value)
    values: tuple[Any, ...] = (1, True, np.float32(1), np.ones(1), torch.ones(1, 1))
    for good in values:
        state.log("tag", good)
        assert float(state._to_log["tag"]) == 1


def falling(step: int, num_steps: int) -> float:
    return 1 - step / num_steps


def test_a_schedule_of_the_user_sets_the_rate_of_each_step_also_after_a_resume():
    """Also of a network and data of the runner, whose default schedule it replaces."""

    def crash(state: Any) -> None:
        if state.step == 5:
            raise Custom

    wanted = pytest.approx([0.01 * (1 - step / 6) for step in range(6)])
    for words, parts in ((WORDS, {"model": Net, "data": TENSORS}), ([*WORDS, "model=tiny", "data.size=8"], {})):
        given = {**parts, "schedule": falling}
        with pytest.raises(runner.CrashedError) as crashed:
            runner.train([*words, "optimizer.lr=0.01"], **given, after_step=crash)
        path: Any = crashed.value.result.directory
        with pytest.raises(runner.ConfigError, match="pass it again"):
            runner.train([f"resume={path}"], **parts)
        runner.train([f"resume={path}"], **given, after_step=lambda state: None)
        assert [*runner.load(path).curves()["lr"].values()] == wanted


FILE = """
import torch
from torch.utils.data import TensorDataset

def model():
    return torch.nn.Linear(3, 2)

data = TensorDataset(torch.randn(20, 3), torch.randint(0, 2, (20,)))

def schedule(step, num_steps):
    return 0.5 ** step
"""


def test_a_schedule_is_in_the_file_of_the_workload_or_in_one_of_its_own(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "rates.py").write_text("def slow(step, num_steps):\n    return 0.1\n")
    words = ["device=cpu", "device.threads=1", "batch_size=4", "steps=3", "log_every=1", "optimizer.lr=0.01"]
    for options, rates in (
        (["workload=mine.py"], [0.01, 0.005, 0.0025]),
        (["workload=mine.py", "schedule=rates.py:slow"], [0.001] * 3),
        (["model=tiny", "data.size=8", "schedule=rates.py:slow"], [0.001] * 3),
    ):
        path: Any = runner.train([*words, *options]).directory
        curves = runner.load(path).curves()
        assert [*curves["lr"].values()] == pytest.approx(rates)
    with pytest.raises(runner.ConfigError, match=r"schedule: got 'cosine': code gives a schedule, too .*mine.py:10"):
        runner.train([*words, "workload=mine.py", "schedule=cosine"])
    with pytest.raises(runner.ConfigError, match=r"rates.py defines no fast"):
        runner.train([*words, "workload=mine.py", "schedule=rates.py:fast"])
