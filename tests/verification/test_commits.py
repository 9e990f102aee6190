"""Tests of `runner verify --against COMMIT`: the code of another commit and today's train the same steps."""

import subprocess
import sys

import pytest

from runner.commands import verify
from runner.config import user_code

MINE = """
import json
from pathlib import Path
import torch
from torch import nn
import widths
import scale

def model():
    return nn.Sequential(nn.Linear(4, widths.WIDTH), nn.Tanh(), nn.Linear(widths.WIDTH, 2))

def data():
    x = torch.tensor(json.loads(Path("samples/inputs.json").read_text()))
    return x, (x.sum(1) > 18).long()

def loss(outputs, targets):
    return scale.SCALE * nn.functional.cross_entropy(outputs, targets)
"""
WORDS = ("workload=mine.py", "batch_size=8", "device=cpu", "device.threads=1", "--steps", "3")


def git(*words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with modules beside a typed file and on the path of this process, and with data outside of git."""
    top = tmp_path / "repository"
    (top / "src").mkdir(parents=True)
    monkeypatch.chdir(top)
    monkeypatch.syspath_prepend(str(top / "src"))
    (top / "mine.py").write_text(MINE)
    (top / "widths.py").write_text("WIDTH = 5\n")
    (top / "src" / "scale.py").write_text("SCALE = 1.0\n")
    git("init", "--quiet", ".")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    (top / "samples").mkdir()
    (top / "samples" / "inputs.json").write_text(str([[float(i * j % 10) for j in range(4)] for i in range(48)]))
    with user_code.using(user_code.UserCode()):  # the command keeps what is typed
        yield top


def test_the_same_and_other_code_are_told_apart_and_nothing_is_written_to_the_repository(
    repository, monkeypatch, capfd
):
    before = sorted(path for path in repository.rglob("*") if "__pycache__" not in path.parts)
    assert verify.main(["--against", "HEAD", *WORDS]) == verify.SAME
    assert "identical, all " in capfd.readouterr().out
    assert sorted(path for path in repository.rglob("*") if "__pycache__" not in path.parts) == before

    (repository / "src" / "scale.py").write_text("SCALE = 1.5\n")
    monkeypatch.delitem(sys.modules, "scale")  # the next command imports it again, as one in a new process
    (repository / "mine.py").write_text(MINE + "# another comment\n")
    assert verify.main(["--against", "HEAD", *WORDS]) == verify.DIFFERENT
    out = capfd.readouterr().out
    assert "different: from step 1 on" in out
    assert "code.mine.py" in out


@pytest.mark.cases(
    (["--against", "nowhere"], "--against: got 'nowhere': git finds no such commit"),
    (["--against", "HEAD", "parallel=hogwild"], "parallel"),
    (["--against", "HEAD", "resume=somewhere"], "resume"),
)
def test_what_cannot_be_compared_is_refused(words, why, repository, capfd):
    assert verify.main([*words, *WORDS]) == 2
    assert why in capfd.readouterr().err


def test_a_commit_whose_code_refuses_or_diverges_is_not_judged(repository, capfd):
    for module, broken, code, why in (
        ("widths.py", "WIDTH = None\n", 2, "its code refuses the config: see above"),
        ("src/scale.py", "SCALE = float('nan')\n", verify.UNJUDGED, "diverges"),
    ):
        today = (repository / module).read_text()
        (repository / module).write_text(broken)
        git("commit", "--quiet", "--all", "-m", "broken")
        (repository / module).write_text(today)
        assert verify.main(["--against", "HEAD", *WORDS]) == code
        assert why in "".join(capfd.readouterr())
        git("commit", "--quiet", "--all", "-m", "mended")
