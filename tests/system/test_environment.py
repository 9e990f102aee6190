"""What `environment.json` tells, against trees and repositories made for the test."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runner.system import cpu as processor
from runner.system import environment


def git(root: Path, *words: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    ran = subprocess.run(["git", "-C", str(root), *names, *words], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # set when the tests run in a git hook
        monkeypatch.delenv(name, raising=False)
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def test_environment_is_json_and_has_every_part() -> None:
    told = json.loads(json.dumps(environment.environment()))
    parts = ["command", "source", "versions", "variables", "cpu", "memory", "devices", "findings"]
    assert list(told) == parts
    assert told["versions"]["torch"] == torch.__version__
    assert told["versions"]["python"].startswith(".".join(str(part) for part in sys.version_info[:3]))


def test_it_needs_no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"] or ["rich"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises
    spec = importlib.util.find_spec("runner.system.environment")
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert fresh.environment()["versions"]["torch"] == torch.__version__


# ---------------------------------------------------------------------------------------------------------------------
# The source


def test_a_clean_checkout_has_its_commit(checkout: Path) -> None:
    assert environment.source(checkout) == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False}


def test_a_changed_or_new_file_makes_it_dirty(checkout: Path) -> None:
    (checkout / "a.py").write_text("2\n")
    assert environment.source(checkout) == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": True}
    git(checkout, "commit", "-qam", "two")
    (checkout / "b.py").write_text("new\n")
    assert environment.source(checkout) == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": True}


def test_the_repository_of_a_git_hook_is_not_mistaken_for_ours(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "-q")
    expected = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert environment.source(checkout) == {"commit": expected, "dirty": False}


def test_no_commit_yet_no_checkout_and_no_git(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert environment.source(empty) is None  # although it lies inside a checkout
    git(empty, "init", "-q")
    assert environment.source(empty) == {"commit": None, "dirty": False}
    monkeypatch.setenv("PATH", "")
    assert environment.source(checkout) is None


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/somewhere/runner/__main__.py", "name=a b", "lr=1"], "python -m runner 'name=a b' lr=1"),
        (["/somewhere/bin/runner", "lr=1"], "runner lr=1"),
    ],
)
def test_the_command_can_be_typed_again(argv: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert environment.command() == expected


def test_a_missing_package_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("omegaconf", "no-such-package"))
    versions = environment.versions()
    assert versions["no-such-package"] is None
    assert versions["omegaconf"][0].isdigit()


# ---------------------------------------------------------------------------------------------------------------------
# The processor, from files as Linux has them

CPUINFO = "".join(
    f"processor\t: {i}\nmodel name\t: Fast CPU\nphysical id\t: {i // 4}\ncore id\t: {i % 2}\n"
    "flags\t: fpu avx2 amx_bf16\n\n"
    for i in range(8)
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sockets of two cores of two threads; this process lies in the control group /outer/inner."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "cpuinfo").write_text(CPUINFO)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  400 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/outer/inner\n")
    (tmp_path / "cgroup" / "outer" / "inner").mkdir(parents=True)
    monkeypatch.setattr(processor, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(processor, "_CGROUP", tmp_path / "cgroup")
    return tmp_path


def test_cores_are_counted_over_sockets_and_threads(machine: Path) -> None:
    told = processor.cpu()
    assert (told["model"], told["physical_cores"], told["quota_cores"]) == ("Fast CPU", 4, None)
    assert told["features"] == ["avx2", "amx_bf16"]


def test_the_tightest_quota_of_all_groups_above_counts(machine: Path) -> None:
    (machine / "cgroup" / "outer" / "inner" / "cpu.max").write_text("max 100000\n")
    (machine / "cgroup" / "outer" / "cpu.max").write_text("150000 100000\n")
    (machine / "cgroup" / "cpu.max").write_text("400000 100000\n")
    told = processor.cpu()
    assert told["quota_cores"] == 1.5
    assert processor.usable_cores(told | {"allowed_cores": 8}) == 1.5
    assert processor.usable_cores(told | {"allowed_cores": 1}) == 1
    assert processor.usable_cores(told | {"allowed_cores": 8, "quota_cores": None}) == 8


def test_version_1_groups_are_understood(machine: Path) -> None:
    (machine / "proc" / "self" / "cgroup").write_text("4:memory:/a\n2:cpu,cpuacct:/a\n")
    for controller in ("cpu", "memory"):
        (machine / "cgroup" / controller / "a").mkdir(parents=True)
    group = machine / "cgroup" / "cpu" / "a"
    (group / "cpu.cfs_quota_us").write_text("50000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    (machine / "cgroup" / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (machine / "cgroup" / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (machine / "cgroup" / "memory" / "a" / "memory.limit_in_bytes").write_text("4096\n")
    (machine / "cgroup" / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert processor.cpu()["quota_cores"] == 0.5
    assert processor.memory()["limit_bytes"] == 4096


def test_memory_is_in_bytes_and_a_limit_above_the_total_is_none(machine: Path) -> None:
    assert processor.memory() == {"total_bytes": 1_024_000, "available_bytes": 409_600, "limit_bytes": None}
    (machine / "cgroup" / "outer" / "memory.max").write_text("2048\n")
    (machine / "cgroup" / "outer" / "inner" / "memory.max").write_text("max\n")
    assert processor.memory()["limit_bytes"] == 2048


def test_a_system_without_these_files_is_told_of_as_far_as_it_goes(machine: Path) -> None:
    for path in ("proc/cpuinfo", "proc/meminfo", "proc/self/cgroup"):
        (machine / path).unlink()
    assert processor.cpu()["physical_cores"] is None
    assert processor.cpu()["features"] == []
    told = processor.memory()
    assert told["available_bytes"] is None
    assert told["total_bytes"] is not None
    assert told["total_bytes"] > 2**20
