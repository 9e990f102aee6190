"""Tests of `runner.config.renamed_classes`: class names in configs of earlier versions are replaced by current ones."""

from __future__ import annotations

import copy

import pytest

from runner.config.renamed_classes import RENAMED, with_current_names
from runner.config.schema import load_class


@pytest.mark.parametrize("now", sorted(RENAMED.values()))
def test_every_current_name_is_a_class(now: str) -> None:
    assert load_class(now, object).__qualname__ == now.rpartition(".")[2]


def test_no_current_name_was_renamed_again() -> None:
    assert not RENAMED.keys() & RENAMED.values()


def test_targets_are_renamed_and_all_other_values_are_unchanged() -> None:
    saved = {
        "name": "runner.model.ResNet",
        "model": {"_target_": "runner.model.ResNet", "depth": 50, "inner": {"_target_": "runner.qnet.QNet"}},
        "workload": {"_target_": "runner.workloads.classifier.Classifier"},
        "list": [1, "runner.qnet.QNet"],
        "nothing": None,
    }
    before = copy.deepcopy(saved)
    renamed = with_current_names(saved)
    assert renamed == {
        "name": "runner.model.ResNet",
        "model": {
            "_target_": "runner.model.resnet.ResNet",
            "depth": 50,
            "inner": {"_target_": "runner.model.qnet.QNet"},
        },
        "workload": {"_target_": "runner.workloads.classifier.Classifier"},
        "list": [1, "runner.qnet.QNet"],
        "nothing": None,
    }
    assert saved == before, "the saved config is not changed"
