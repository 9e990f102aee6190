"""Tests that the Python code in docs/python.md runs unchanged, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.command import ROOT

from runner.parallel.launch import processes
from runner.system.forkserver import start_server

BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text("utf-8"), re.M | re.S)


def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    start_server(*processes.PRELOADED)  # otherwise, each block would start and stop its own server
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(block, names)
    refused, predicted = capsys.readouterr().out.splitlines()
    assert refused == "optimizer.lr see the comments in conf/optimizer/sgd.yaml"
    assert re.fullmatch(r"image\.png \d [01]\.\d+ ", predicted)
