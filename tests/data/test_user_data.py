"""Tests of data sets of users: what is handed to their code is theirs, and what they define is used or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import user_objects
from helpers.user_objects import TENSORS, changes_inputs, changes_targets, counts_ones
from torch.nn.functional import cross_entropy

import runner
from runner.commands import convert

FILES = {"model": "changes_inputs", "data": "TENSORS"}
CPU = ["device=cpu", "device.threads=1", "optimizer=sgd", "schedule=constant", "batch_size=12", "log_every=1"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors that are handed to code of the user may be changed in place


def from_one(data: Any) -> Any:
    return tuple((each.tensors[0].clone(), each.tensors[1] + 1) for each in data)


@pytest.mark.parametrize("mode", ["single", "fsdp", "ensemble", "pipeline", "pipeline parallel.engine=streams"])
def test_operations_in_place_change_nothing_of_the_data_nor_of_what_is_measured(mode):
    words = [*CPU, "optimizer.lr=1e-30", "steps=3", "eval_every=1", "precision=32", *f"parallel={mode}".split()]
    data, model = from_one(TENSORS), changes_inputs()
    before = [tensor.clone() for pair in data for tensor in pair]
    metrics = {"first": counts_ones, "second": counts_ones}
    result = runner.train(words, model=model, data=data, loss=changes_targets, metrics=metrics)
    run = runner.load(result.directory, model=model, data=data, loss=changes_targets, metrics=metrics)
    with torch.no_grad():
        wanted = cross_entropy(model(before[2].clone()), before[3] - 1).item()
    curves, ones = run.curves(), (before[3] == 1).double().mean().item()
    for step in (1, 2, 3):
        assert curves["eval/loss"][step] == pytest.approx(wanted, rel=1e-5)
        assert curves["eval/first"][step] == curves["eval/second"][step] == pytest.approx(ones)
    assert run.evaluate("last") == result.evaluation
    assert all(now.equal(then) for now, then in zip((t for pair in data for t in pair), before, strict=True))


def test_verify_and_convert_give_each_pass_inputs_of_its_own():
    code = {"model": changes_inputs(), "data": from_one(TENSORS), "loss": changes_targets}
    found = runner.verify([*CPU, "accumulation=2"], **code)
    assert found.verdict == 0, str(found)
    words = [f"{part}={user_objects.__file__}:{name}" for part, name in FILES.items()]
    result = runner.train([*CPU, "steps=1", *words])
    assert convert.main([str(result.directory), "net.pt2", *words]) == 0
    network, inputs = runner.load(result.directory, model=changes_inputs).model("last"), TENSORS[1].tensors[0]
    program = torch.export.load("net.pt2").module()
    torch.testing.assert_close(program(inputs.clone()), network(inputs.clone()))
