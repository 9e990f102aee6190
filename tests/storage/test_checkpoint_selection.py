"""Tests of `runner.storage.checkpoint`: a checkpoint is chosen by `best`, `last` or its step, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.permissions import enforced_permissions

from runner.config.errors import ConfigError
from runner.storage.checkpoint import chosen_checkpoint


def refusal(run: Path, choice: str | int) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        chosen_checkpoint(run, choice)
    assert (refused.value.key, refused.value.got) == ("checkpoint", choice)
    return refused.value


def test_a_step_that_was_not_saved_is_refused_and_the_saved_steps_are_listed(tmp_path: Path) -> None:
    assert "choose" not in refusal(tmp_path, 7).remedy, "there is none"
    for name in ("step_00000000", "step_99999999", "step_100000000", "step_00000007.superseded"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert chosen_checkpoint(tmp_path, 100_000_000) == tmp_path / "checkpoints" / "step_100000000"
    remedy = "choose best, last, or one of 0, 99999999, 100000000"
    for choice, why in ((7, "there is no step_00000007"), ("newest", "it is not a step"), (-1, "it is not a step")):
        error = refusal(tmp_path, choice)
        assert (error.why, error.remedy) == (why, remedy)


@pytest.mark.parametrize("choice", ["best", "last", 7])
def test_checkpoints_that_cannot_be_read_are_refused_with_the_reason(choice: str | int, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_00000007").mkdir(parents=True)
    for path, bits in ((tmp_path, 0), (tmp_path / "checkpoints", 0), (tmp_path / "checkpoints", 0o444)):
        with enforced_permissions(path, bits), pytest.raises(ConfigError) as refused:
            chosen_checkpoint(tmp_path, choice)
        assert refused.value.key == "checkpoint"
        assert "Permission denied" in refused.value.why
