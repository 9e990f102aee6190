"""The files of options: each builds, and lists and explains every field."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from helpers.command import environment
from omegaconf import OmegaConf

from runner.config.options import CONF
from runner.config.schema import build, load_class
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


def test_options_are_checked_without_torch():
    program = f"""
import sys
from runner.system.lazy_import import import_lazily
import_lazily("torch", "torchvision")
from omegaconf import OmegaConf
from runner.config import build
from runner.data.base import Data
for path in {[str(path) for path in FILES]}:
    node = OmegaConf.to_container(OmegaConf.load(path))
    build(node | ({{"root": "anywhere"}} if "root" in node else {{}}), Data, "data")
    loaded = [name for name in ("torch._C", "torchvision.datasets", "numpy", "PIL.Image") if name in sys.modules]
    assert not loaded, (path, loaded)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
