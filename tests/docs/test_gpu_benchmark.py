"""Tests of `python -m benchmarks.gpu`: each part is rehearsed with tiny sizes on the device that there is."""

import json
import subprocess
from pathlib import Path

import pytest
from helpers.command import run_command

from benchmarks import gpu
from runner.commands import COMMANDS

PARTS = [name for name in gpu.PARTS if name != "tests"]  # which would run pytest in pytest


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_rehearsed(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forked(*words: str) -> subprocess.CompletedProcess[str]:
        """Train in a fork of this process, which takes a third of the time of a new interpreter."""
        return subprocess.CompletedProcess(words, *run_command(*words, cwd=tmp_path / "commands"), "")

    start = gpu._runner
    if name not in ("users_command", "memory"):  # a trial of the latter forks itself
        monkeypatch.setattr(gpu, "_runner", lambda *words: (start if words[0] in COMMANDS else forked)(*words))
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


def test_an_unknown_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        gpu.main(["--only", "everything", "--out", str(tmp_path)])
    assert refused.value.code == 2
    assert "resnet50" in capsys.readouterr().err
