"""Tests of the Python API in several threads of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any

import pytest
import torch
from helpers.plain_loop import largest_difference, weights_at
from helpers.user_objects import TENSORS, Net
from torch import nn

import runner
from runner.api import execution

WORDS = ["device=cpu", "device.threads=1", "batch_size=12", "steps=6"]


class Drops(Net):
    """A network that draws random numbers while it trains."""

    def __init__(self):
        super().__init__()
        self.last = nn.Sequential(nn.Dropout(0.5), self.last)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_runs_in_threads_are_those_of_one_after_another(monkeypatch):
    said, waits = list[str](), Event()

    def warning(text: str, *values: Any) -> None:
        said.append(text)
        waits.set()

    monkeypatch.setattr(execution.log, "warning", warning)

    def train(seed: int, together: bool = False) -> dict[str, torch.Tensor]:
        def hook(state: Any) -> None:
            state.log("user/seed", seed)
            assert not together or waits.wait(60)  # the first run trains until another thread waits for it

        words = [*WORDS, f"seed={seed}", f"precision={(32, 64)[seed % 2]}"]
        result: Any = runner.train(words, model=(Net, Drops)[seed % 2], data=TENSORS, after_step=hook)
        assert result.metrics["eval/loss"] > 0
        assert {*runner.load(result.directory).curves()["user/seed"].values()} == {float(seed)}
        return weights_at(result.directory, 6)

    with ThreadPoolExecutor(3) as pool:
        together = [*pool.map(partial(train, together=True), range(3))]
    assert any("this thread waits" in text for text in said)
    for seed, weights in enumerate(together):
        alone = train(seed)
        assert [each.dtype for each in weights.values()] == [each.dtype for each in alone.values()]
        assert largest_difference(weights, alone) == 0


def test_configs_are_composed_in_threads_while_another_one_trains():
    def compose(seed: int) -> tuple[int, float, str]:
        config = runner.compose([f"seed={seed}", f"optimizer.lr={seed + 1}", "parallel=ddp"])
        return config["seed"], config["optimizer"]["lr"], config["name"]

    found: list[Any] = []
    with ThreadPoolExecutor(4) as pool:

        def after_step(state: Any) -> None:
            if state.step == 3:
                found.extend(pool.map(compose, range(8)))

        runner.train(WORDS, model=Net, data=TENSORS, after_step=after_step)
    assert found == [(seed, seed + 1.0, "classifier") for seed in range(8)]


def test_a_run_inside_a_hook_does_not_change_the_run():
    def inner(state: Any) -> None:
        if state.step == 2:
            runner.train([*WORDS, "precision=64", "seed=5"], model=Net, data=TENSORS)

    def weights(hook: Any) -> dict[str, torch.Tensor]:
        result: Any = runner.train(WORDS, model=Drops, data=TENSORS, after_step=hook)
        return weights_at(result.directory, 6)

    assert largest_difference(weights(inner), weights(lambda state: None)) == 0
