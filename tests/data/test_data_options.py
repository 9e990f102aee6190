"""Tests of the option files in conf/data/.

Each file contains every field of its class, explains each field in a comment, and can be built without loading torch.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from helpers.command import child_environment
from helpers.compose import option_content

from runner.config.options import CONF
from runner.config.schema import build, load_class
from runner.data.base import Data

FILES = sorted((CONF / "data").glob("[!_]*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_option_file_can_be_built_and_lists_every_field(path):
    node = option_content("data", path.stem)
    cls = load_class(node["_target_"], Data)
    assert sorted(node) == sorted(["_target_", *(field.name for field in dataclasses.fields(cls))])
    required = {"root": "anywhere"} if node.get("root") == "???" else {}
    assert type(build(node | required, Data, "data")) is cls


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_option_is_explained(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# python -m runner ")
    assert lines[1].startswith("# ")
    assert lines[1].endswith(".")
    assert all("#" in line for line in lines[3:] if line.partition(":")[0] not in ("defaults", "_target_"))


def test_options_are_checked_without_torch():
    done = subprocess.run(
        [sys.executable, "-m", "helpers.data_options"],
        input=json.dumps({path.stem: option_content("data", path.stem) for path in FILES}),
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [path.stem for path in FILES]
