"""Tests of `runner.config.plain_values`: all interpolations are resolved except references to environment variables."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from runner.config.plain_values import resolved


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"a": 1, "b": "${a}"}, {"a": 1, "b": 1}),
        ({"a": "${oc.env:SECRET}"}, {"a": "${oc.env:SECRET}"}),
        ({"a": "x ${oc.env:SECRET} y"}, {"a": "x ${oc.env:SECRET} y"}),
        ({"a": "${oc.env:NONE,7}"}, {"a": "${oc.env:NONE,7}"}),
        ({"a": {"b": ["${oc.env:SECRET}"]}}, {"a": {"b": ["${oc.env:SECRET}"]}}),
        ({"a": "${oc.env:SECRET}", "b": "${a}/c"}, {"a": "${oc.env:SECRET}", "b": "${oc.env:SECRET}/c"}),
        ({"a": "${oc.env:SECRET}/${b}", "b": "${c}", "c": 5}, {"a": "${oc.env:SECRET}/5", "b": 5, "c": 5}),
        ({"a": "${b}/${oc.env:SECRET}", "b": 5}, {"a": "5/${oc.env:SECRET}", "b": 5}),
        ({"a": "{${oc.env:SECRET}}${b}}", "b": 5}, {"a": "{${oc.env:SECRET}}5}", "b": 5}),
        ({"a": "${oc.env:NONE,${oc.env:SECRET}}"}, {"a": "${oc.env:NONE,${oc.env:SECRET}}"}),
        ({"a": "${oc.decode:${oc.env:NUMBER}}"}, {"a": 3}),
        ({"a": "${oc.decode:${oc.env:NUMBER}}${oc.env:SECRET}"}, {"a": "3${oc.env:SECRET}"}),
        ({"a": "\0env:SECRET\0", "b": "${oc.env:NONE}"}, {"a": "\0env:SECRET\0", "b": "${oc.env:NONE}"}),
        ({"a": "${oc.env:NONE,${b}}", "b": 5}, {"a": "${oc.env:NONE,5}", "b": 5}),
        ({"a": "${oc.env:SECRET,x:${b}}${b}", "b": 5}, {"a": "${oc.env:SECRET,x:5}5", "b": 5}),
        ({"a": "${oc.env:SECRET,{}}${b}", "b": 5}, {"a": "${oc.env:SECRET,{}}5", "b": 5}),
        ({"a": "${oc.env:A,${oc.env:B,${oc.env:SECRET}}}"}, {"a": "${oc.env:A,${oc.env:B,${oc.env:SECRET}}}"}),
        ({"a": "${ oc.env:SECRET}${oc.env : SECRET}"}, {"a": "${ oc.env:SECRET}${oc.env : SECRET}"}),
        ({"a": "${oc.env:NONE,${oc.decode:${oc.env:NUMBER}}}"}, {"a": "${oc.env:NONE,3}"}),
        ({"output_root": "${oc.env:NUMBER}/x", "name": "${oc.env:NUMBER}"}, {"output_root": "3/x", "name": "3"}),
    ],
    ids=str,
)
def test_references_to_the_environment_are_kept(
    config: dict[str, Any], wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    monkeypatch.setenv("NUMBER", "3")
    assert resolved(OmegaConf.create(config)) == wanted


def test_an_interpolation_that_cannot_be_resolved_is_an_error() -> None:
    with pytest.raises(InterpolationResolutionError):
        resolved(OmegaConf.create({"a": "${oc.env:SURELY_NOT_SET}", "b": "${oc.decode:${oc.env:SURELY_NOT_SET}}"}))
