"""Tests of the CPU report, read from fake files in the format of Linux, and of the number of usable cores."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch

from runner.system import cpu as processor

CPUINFO = "".join(
    f"processor\t: {i}\nmodel name\t: Fast CPU\nphysical id\t: {i // 4}\ncore id\t: {i % 2}\n"
    "flags\t: fpu avx2 amx_bf16\n\n"
    for i in range(8)
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake machine of 2 sockets × 2 cores × 2 threads; this process is in the control group /outer/inner."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "cpuinfo").write_text(CPUINFO)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/outer/inner\n")
    (tmp_path / "cgroup" / "outer" / "inner").mkdir(parents=True)
    monkeypatch.setattr(processor, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(processor, "_CGROUP", tmp_path / "cgroup")
    # psutil reads /sys first, which a test cannot replace. These are the counts that /proc/cpuinfo would give.
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    return tmp_path


def test_the_processor_is_described(machine: Path) -> None:
    found = processor.cpu()
    assert (found["model"], found["physical_cores"], found["quota_cores"]) == ("Fast CPU", 4, None)
    assert found["features"] == ["avx2", "amx_bf16"]
    assert found["threads"] == torch.get_num_threads()
    assert found["capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["logical_cores"] == os.cpu_count()


def test_the_smallest_cpu_quota_of_the_group_and_its_ancestors_applies(machine: Path) -> None:
    (machine / "cgroup" / "outer" / "inner" / "cpu.max").write_text("max 100000\n")
    (machine / "cgroup" / "outer" / "cpu.max").write_text("150000 100000\n")
    (machine / "cgroup" / "cpu.max").write_text("400000 100000\n")
    assert processor.cpu()["quota_cores"] == 1.5
    assert len(processor.usable_core_numbers()) == 1


def test_a_group_path_of_the_host_leads_to_the_mounted_root(machine: Path) -> None:
    """In a container, the path of the group may be its path on the host."""
    (machine / "proc" / "self" / "cgroup").write_text("0::/docker/0123\n")
    (machine / "cgroup" / "cpu.max").write_text("50000 100000\n")
    (machine / "cpu.max").write_text("1 100000\n")  # outside the mounted hierarchy
    assert processor.cpu()["quota_cores"] == 0.5


def test_values_that_the_system_does_not_report_are_none(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("proc/cpuinfo", "proc/self/cgroup"):
        (machine / path).unlink()
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: None)
    found = processor.cpu()
    assert (found["physical_cores"], found["quota_cores"], found["features"]) == (None, None, [])
    assert found["model"] == processor.cpu_model() != ""


def test_the_cores_of_this_process_are_those_of_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_quota_cores", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 7}, raising=False)
    assert processor.usable_core_numbers() == [1, 5, 7]
    monkeypatch.delattr(os, "sched_getaffinity")
    assert len(processor.usable_core_numbers()) == os.cpu_count()


@pytest.mark.skipif(processor.seconds_without_core() is None, reason="the system does not tell how long threads wait")
def test_the_time_is_measured_for_which_a_thread_waits_for_its_core():
    before, cores = processor.seconds_without_core(), os.sched_getaffinity(0)
    one = {min(cores)}
    with subprocess.Popen(["yes"], stdout=subprocess.DEVNULL) as other:
        os.sched_setaffinity(other.pid, one)
        os.sched_setaffinity(0, one)
        try:
            until = time.process_time() + 0.5
            while time.process_time() < until:
                pass
            waited = processor.seconds_without_core()
        finally:
            os.sched_setaffinity(0, cores)
            other.kill()
    assert before is not None
    assert waited is not None
    assert waited - before > 0.1  # half a second, if both get as much
