"""Tests of `runner.config.overrides`."""

from __future__ import annotations

import pytest

from runner.config.overrides import override_key


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=1", "seed"),
        ("+data.x=a=b", "data.x"),
        ("++optimizer.lr=+1", "optimizer.lr"),
        ("~debug", "debug"),
        ("~model=tiny", "model"),
        ("optimizer@other=sgd", "optimizer@other"),
        ("name=", "name"),
    ],
)
def test_the_key_of_an_override_has_no_prefix(override: str, key: str) -> None:
    assert override_key(override) == key
