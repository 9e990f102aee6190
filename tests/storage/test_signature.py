"""Tests of `runner.storage.signature`: a signature is read as it was written, and refused if it is invalid."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoint_edits import rewrite_manifest
from helpers.handmade_runs import save_and_wait

from runner.config.errors import ConfigError
from runner.storage.checkpoint import Checkpoint
from runner.storage.checkpoints import Checkpoints
from runner.storage.manifest import DamagedError
from runner.storage.signature import check_same_names, saved_signature, signature_text

IMAGE = {"shape": [1, 8, 8], "mean": [0.5], "std": [0.25], "center": 1.0}
SIGNATURE = {"inputs": [1, 8, 8], "classes": ["zero", "Größe"], "image": IMAGE}


def saved(directory: Path, text: str) -> Path:
    """Save a checkpoint with `text` in `model.json`, and return its path."""
    checkpoints = Checkpoints(directory, keep=1, texts={"model.json": lambda: text})
    return save_and_wait(checkpoints, Checkpoint(1, {"weight": torch.zeros(1)}, {}, {}))


SCALE = {"targets": {"mean": [3.5], "std": [0.25]}, "inputs": {"mean": [0, -1.0], "std": [1e-30, 1]}}
DATA = {"training": 8, "held_out": 2, "sha256": "0f" * 32}
REGRESSION = {"inputs": [2], "targets": ["price"], "scale": SCALE}


@pytest.mark.cases(
    *(SIGNATURE, SIGNATURE | {"image": None}),
    *(REGRESSION, REGRESSION | {"scale": {"targets": SCALE["targets"]}}),
    *(REGRESSION | {"columns": ["a", "b"], "data": DATA}, SIGNATURE | {"data": DATA}, {"data": DATA}),
)
def test_a_signature_is_read_as_it_was_written(signature, tmp_path):
    assert saved_signature(saved(tmp_path, signature_text(signature))) == signature


def test_a_checkpoint_may_have_no_signature(tmp_path):
    assert signature_text({}) == ""
    assert signature_text({"classes": ["x" * 10] * 100_000}) == "", "it would be too large to be read"
    assert saved_signature(saved(tmp_path, "")) == {}


INVALID: list[Any] = [
    *("{", "[" * 100_000, "[]", "3"),
    SIGNATURE | {"inputs": [1, 8, 8.5]},
    SIGNATURE | {"inputs": [1, 10**6, 10**6]},
    SIGNATURE | {"inputs": "1"},
    SIGNATURE | {"classes": [1, 2]},
    SIGNATURE | {"image": IMAGE | {"shape": [1, 9, 9]}},
    SIGNATURE | {"image": IMAGE | {"mean": [0.5, 0.5]}},
    SIGNATURE | {"image": IMAGE | {"std": [0.0]}},
    SIGNATURE | {"image": IMAGE | {"center": 0}},
    SIGNATURE | {"image": IMAGE | {"more": 1}},
    SIGNATURE | {"data": DATA | {"training": -1}},
    SIGNATURE | {"data": DATA | {"held_out": "2"}},
    SIGNATURE | {"data": DATA | {"more": 1}},
    SIGNATURE | {"inputs": [2, 8, 8], "image": IMAGE | {"shape": [2, 8, 8], "mean": [0, 0], "std": [1, 1]}},
    REGRESSION | {"targets": ["a", "b"]},
    REGRESSION | {"inputs": [3]},
    REGRESSION | {"classes": ["a"]},
    REGRESSION | {"scale": None},
    REGRESSION | {"scale": SCALE | {"targets": {"mean": ["0"], "std": [1.0]}}},
    REGRESSION | {"scale": SCALE | {"inputs": {"mean": [0.0, 0.0]}}},
    REGRESSION | {"columns": ["a"]},
]


@pytest.mark.parametrize("signature", INVALID, ids=range(len(INVALID)))
def test_an_invalid_signature_is_refused(tmp_path, signature):
    text = signature if isinstance(signature, str) else json.dumps(signature)
    with pytest.raises(ConfigError, match="do not trust it"):
        saved_signature(saved(tmp_path, text))


@pytest.mark.cases(
    (["a", "b"], ["b", "a"], ("a, b", "b, a")),
    (["x"] * 90 + ["a"] * 30, ["x"] * 90 + ["b"], (", ".join(["a"] * 20), "b")),
)
def test_a_refusal_has_both_lists_or_of_long_ones_what_follows_the_first_difference(names, others, shown):
    check_same_names({"classes": names}, {"classes": list(names), "columns": ["a"]})
    with pytest.raises(ConfigError) as refused:
        check_same_names({"classes": names}, {"classes": others})
    assert refused.value.key == "data"
    assert refused.value.why == f"the model was trained with the classes {shown[0]}, and this data has {shown[1]}"


def test_a_changed_file_is_damaged_unless_its_hash_is_changed_too(tmp_path):
    path = saved(tmp_path, signature_text(SIGNATURE))
    (path / "model.json").write_text(signature_text(SIGNATURE | {"classes": ["one"]}))
    with pytest.raises(DamagedError):
        saved_signature(path)
    rewrite_manifest(path)
    assert saved_signature(path)["classes"] == ["one"]
