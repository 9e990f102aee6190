"""Tests of `runner.config.other_names`: what is suggested for the names of other libraries."""

from __future__ import annotations

import pytest

from runner.config.options import root_keys
from runner.config.other_names import NAMES, type_instead


def test_every_name_means_one_thing_and_none_is_ours() -> None:
    names = " ".join(NAMES.values()).split()
    assert len(names) == len(set(names))
    assert not set(names) & root_keys()


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("lr", "type optimizer.lr=…"),
        ("Trainer.Max-Epochs", "type epochs=…"),
        ("hydra.run.dir", "type --run-directory=DIR"),
        ("hydra.job.name", "type name=…"),
        ("hydra.launcher.gpus", ""),
        ("nonsense", ""),
        ("devices.nonsense", ""),
    ],
)
def test_a_key_is_known_by_its_last_word(key: str, remedy: str) -> None:
    assert type_instead(key) == remedy
