"""Tests of `python -m benchmarks.gpu`: each part is rehearsed with tiny sizes on the device that there is."""

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from helpers.dry_run import globals_restored, run_in_this_process

from benchmarks import gpu, resnet
from benchmarks.measure import Rates
from runner import training
from runner.commands import COMMANDS

PARTS = [name for name in gpu.PARTS if name != "tests"]  # which would run pytest in pytest


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_rehearsed(name, tmp_path, capfd, monkeypatch):
    """Without new interpreters, which take most of the time: all but the command that is killed is done here."""

    def here(*words: str) -> subprocess.CompletedProcess[str]:
        if words[0] not in COMMANDS:
            return subprocess.CompletedProcess(words, *run_in_this_process([*words], tmp_path), "")
        capfd.readouterr()
        code = importlib.import_module(f"runner.commands.{words[0]}").main([*words[1:]])
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    def interleaved(module: str, contenders: Sequence[str], repeats: int, arguments: Sequence[str]) -> Rates:
        rates = Rates(contenders)
        for contender in contenders:
            with globals_restored(), pytest.raises(SystemExit):
                resnet.main(["--run", contender, *arguments])
            rates[contender].append(float(capfd.readouterr().out.splitlines()[-1]))
        return rates

    monkeypatch.setattr(gpu, "runner", here)
    drawing = SimpleNamespace(NAMES=(), pictures=lambda compared: {})  # whose libraries take seconds to import
    monkeypatch.setitem(sys.modules, "runner.analysis.figures", drawing)
    monkeypatch.setattr(gpu, "interleave", interleaved)
    for owner, what in ((torch.backends.cudnn, "benchmark"), (training.Progress, "step")):
        monkeypatch.setattr(owner, what, getattr(owner, what))  # restored at the end
    monkeypatch.setattr("sys.argv", ["runner"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    gpu.main(["--rehearse", "--only", name, "--out", str(tmp_path), "--data", str(tmp_path)])
    rows = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    assert rows
    text = str(rows)
    assert not any(word in text for word in ("FAILED", "CRASHED", "DIFFERENT", "OTHER WEIGHTS", "refused")), text
    assert f"### {name} (" in (tmp_path / "report.md").read_text(encoding="utf-8")
    capfd.readouterr()
    gpu.main(["--rehearse", "--only", name, "--out", str(tmp_path)])
    assert f"{name}:" not in capfd.readouterr().err, "a part is not repeated"


def test_an_unknown_part_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        gpu.main(["--only", "everything", "--out", str(tmp_path)])
    assert refused.value.code == 2
    assert "resnet50" in capsys.readouterr().err
