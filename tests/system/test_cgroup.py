"""Tests of control group limits, read from fake files in the format of Linux."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.system import cgroup
from runner.system.cgroup import cgroup_limits, read_lines


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake control group file system, in which this process is in the group /outer/inner."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/outer/inner\n")
    (tmp_path / "cgroup" / "outer" / "inner").mkdir(parents=True)
    monkeypatch.setattr(cgroup, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(cgroup, "_CGROUP", tmp_path / "cgroup")
    return tmp_path / "cgroup"


def test_limits_come_from_the_group_of_the_process_and_its_ancestors(groups: Path) -> None:
    (groups / "outer" / "inner" / "cpu.max").write_text("max 100000\n")
    (groups / "cpu.max").write_text("400000 100000\n")
    (groups.parent / "cpu.max").write_text("1 1\n")  # outside the mounted hierarchy
    assert list(cgroup_limits("cpu", "cpu.max")) == [["max", "100000"], ["400000", "100000"]]
    assert list(cgroup_limits("memory", "memory.max")) == []


def test_a_group_path_of_the_host_leads_to_the_mounted_root(groups: Path) -> None:
    """In a container, the path of the group may be its path on the host."""
    (groups.parent / "proc" / "self" / "cgroup").write_text("0::/docker/0123\n")
    (groups / "memory.max").write_text("2048\n")
    assert list(cgroup_limits("memory", "memory.max")) == [["2048"]]


def test_cgroup_version_1_has_one_hierarchy_per_controller(groups: Path) -> None:
    (groups.parent / "proc" / "self" / "cgroup").write_text("4:memory:/a\n2:cpu,cpuacct:/a\n1:name=systemd:/b\n")
    for controller in ("cpu", "memory"):
        (groups / controller / "a").mkdir(parents=True)
    (groups / "cpu" / "a" / "cpu.cfs_quota_us").write_text("50000\n")
    (groups / "cpu" / "a" / "cpu.cfs_period_us").write_text("100000\n")
    (groups / "memory" / "a" / "cpu.cfs_quota_us").write_text("1\n")  # ignored: another controller
    assert list(cgroup_limits("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")) == [["50000", "100000"]]


def test_without_the_files_there_are_no_limits(groups: Path) -> None:
    (groups.parent / "proc" / "self" / "cgroup").unlink()
    assert list(cgroup_limits("cpu", "cpu.max")) == []


def test_read_lines_of_an_unreadable_file_is_an_empty_list(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "absent") == []
    assert read_lines(tmp_path) == []
    (tmp_path / "file").write_bytes(b"a\nb\xff\n")
    assert read_lines(tmp_path / "file") == ["a", "b\ufffd"]
