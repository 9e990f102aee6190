"""Networks whose outputs are dicts, tuples, named tuples and dataclasses, in every command."""

from __future__ import annotations

import pytest
from helpers import structured
from helpers.structured import NETWORKS
from helpers.user_objects import TENSORS

import runner

CPU = ["device=cpu", "device.threads=1", "optimizer=sgd", "optimizer.lr=0.05", "batch_size=12", "log_every=1"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("network", NETWORKS)
def test_verify_compares_outputs_of_any_structure(network):
    found = runner.verify(["accumulation=2", *CPU], model=network, data=TENSORS, loss=structured.loss)
    assert found.verdict == 0, str(found)
