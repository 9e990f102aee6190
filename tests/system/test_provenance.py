"""Tests of the content of `environment.json`, with git repositories that the tests create."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.command import ROOT

from runner.system import provenance


def git(root: Path, *words: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    ran = subprocess.run(["git", "-C", str(root), *names, *words], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # set when the tests run in a git hook
        monkeypatch.delenv(name, raising=False)
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def test_environment_is_json_with_every_part():
    report = json.loads(json.dumps(provenance.environment()))
    parts = ["command", "source", "versions", "variables", "cpu", "memory", "devices", "findings"]
    assert list(report) == parts
    assert report["versions"]["torch"] == torch.__version__
    if (ROOT / ".git").exists():
        assert report["source"]["commit"] == git(ROOT, "rev-parse", "HEAD"), "of this project"


def test_the_commit_is_found_and_a_changed_or_new_file_makes_it_dirty(checkout):
    assert provenance.source(checkout) == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False}
    (checkout / "a.py").write_text("2\n")
    assert provenance.source(checkout)["dirty"]
    git(checkout, "commit", "-qam", "two")
    (checkout / "b.py").write_text("new\n")
    assert provenance.source(checkout) == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": True}


def test_the_source_without_a_repository_a_commit_or_git_or_in_a_git_hook(checkout, monkeypatch):
    empty = checkout / "empty"
    empty.mkdir()
    assert provenance.source(empty) is None  # although it lies inside a checkout
    git(empty, "init", "-q")
    assert provenance.source(empty) == {"commit": None, "dirty": False}
    commit = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(empty / ".git"))
    assert provenance.source(checkout) == {"commit": commit, "dirty": True}, "the variables of a hook are ignored"
    monkeypatch.setenv("PATH", "")
    assert provenance.source(checkout) is None


@pytest.mark.cases(
    (["/somewhere/runner/__main__.py", "name=a b", "lr=1"], "python -m runner 'name=a b' lr=1"),
    (["runner", os.fsdecode(b"data.root=a\xff b")], "runner 'data.root=a\\xff b'"),
)
def test_the_command_can_be_typed_again(argv, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    assert provenance.command() == expected


def test_secrets_are_hidden_in_the_command_and_the_variables(monkeypatch):
    words = ["data.root=https://ann:s3cret@host/x", "data.token=s3 cret,x", "--auth-token", "s3cret", "lr=1"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/runner", *words])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "https://ann:s3cret@host")
    report = provenance.environment()
    assert report["command"] == "runner 'data.root=https://ann:***@host/x' 'data.token=***' --auth-token *** lr=1"
    assert report["variables"]["CUDA_VISIBLE_DEVICES"] == "https://ann:***@host"
    assert "cret" not in json.dumps(report)
