"""Limits of control groups, from files as Linux has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.system import cgroup
from runner.system.cgroup import cgroup_limits, read_lines


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The mounted groups; this process is in /outer/inner."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/outer/inner\n")
    (tmp_path / "cgroup" / "outer" / "inner").mkdir(parents=True)
    monkeypatch.setattr(cgroup, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(cgroup, "_CGROUP", tmp_path / "cgroup")
    return tmp_path / "cgroup"


def test_limits_come_from_the_own_group_and_those_above_it(groups: Path) -> None:
    (groups / "outer" / "inner" / "cpu.max").write_text("max 100000\n")
    (groups / "cpu.max").write_text("400000 100000\n")
    (groups.parent / "cpu.max").write_text("1 1\n")  # not a group
    assert list(cgroup_limits("cpu", "cpu.max")) == [["max", "100000"], ["400000", "100000"]]
    assert list(cgroup_limits("memory", "memory.max")) == []


def test_a_path_of_the_host_leads_to_the_mounted_root(groups: Path) -> None:
    """Inside a container the group's path may be the host's."""
    (groups.parent / "proc" / "self" / "cgroup").write_text("0::/docker/0123\n")
    (groups / "memory.max").write_text("2048\n")
    assert list(cgroup_limits("memory", "memory.max")) == [["2048"]]


def test_version_1_has_a_folder_for_each_controller(groups: Path) -> None:
    (groups.parent / "proc" / "self" / "cgroup").write_text("4:memory:/a\n2:cpu,cpuacct:/a\n1:name=systemd:/b\n")
    for controller in ("cpu", "memory"):
        (groups / controller / "a").mkdir(parents=True)
    (groups / "cpu" / "a" / "cpu.cfs_quota_us").write_text("50000\n")
    (groups / "cpu" / "a" / "cpu.cfs_period_us").write_text("100000\n")
    (groups / "memory" / "a" / "cpu.cfs_quota_us").write_text("1\n")  # of another controller
    assert list(cgroup_limits("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")) == [["50000", "100000"]]


def test_without_the_files_there_are_no_limits(groups: Path) -> None:
    (groups.parent / "proc" / "self" / "cgroup").unlink()
    assert list(cgroup_limits("cpu", "cpu.max")) == []


def test_lines_of_a_file_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "absent") == []
    assert read_lines(tmp_path) == []
    (tmp_path / "file").write_bytes(b"a\nb\xff\n")
    assert read_lines(tmp_path / "file") == ["a", "b\ufffd"]
