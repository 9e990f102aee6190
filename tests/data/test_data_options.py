"""The files of options: each builds, and lists and explains every field."""

from __future__ import annotations

import dataclasses

import pytest
from omegaconf import OmegaConf

from runner.config import CONF, build, load_class
from runner.data.base import Data

FILES = sorted((CONF / "data").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_options_builds_and_lists_every_field(path):
    node = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(node, dict)
    cls = load_class(node["_target_"], Data)
    assert list(node) == ["_target_", *(field.name for field in dataclasses.fields(cls))]
    required = {"root": "anywhere"} if node.get("root") == "???" else {}
    assert type(build(node | required, Data, "data")) is cls


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_option_is_explained(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# python -m runner ")
    assert lines[1].startswith("# ")
    assert lines[1].endswith(".")
    assert all("#" in line for line in lines[3:])
