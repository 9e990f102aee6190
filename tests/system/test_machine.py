"""Tests of what the machine has: cores and memory, from fake files in the format of Linux, and the memory in use."""

import os
import pickle
import resource
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from helpers.programs import map_new_pages

from runner.device import Device
from runner.system import cpu as processor
from runner.system import memory

CPU = torch.device("cpu")
MEGABYTE = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CPUINFO = "".join(
    f"processor\t: {i}\nmodel name\t: Fast CPU\nphysical id\t: {i // 4}\ncore id\t: {i % 2}\n"
    "flags\t: fpu avx2 amx_bf16\n\n"
    for i in range(8)
)


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A fake machine of 2 sockets × 2 cores × 2 threads and 1,024,000 bytes, in the control group /outer/inner."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "cpuinfo").write_text(CPUINFO)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/outer/inner\n")
    (tmp_path / "cgroup" / "outer" / "inner").mkdir(parents=True)
    monkeypatch.setattr(processor, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(processor, "_CGROUP", tmp_path / "cgroup")
    # psutil reads /sys first, which a test cannot replace. These are the counts that /proc/cpuinfo would give.
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1_024_000, available=409_600))
    return tmp_path


def test_the_processor_is_described_and_values_that_the_system_does_not_report_are_none(machine, monkeypatch):
    found = processor.cpu()
    assert (found["model"], found["physical_cores"], found["quota_cores"]) == ("Fast CPU", 4, None)
    assert found["features"] == ["avx2", "amx_bf16"]
    assert found["threads"] == torch.get_num_threads()
    assert found["capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["logical_cores"] == os.cpu_count()
    for path in ("proc/cpuinfo", "proc/self/cgroup"):
        (machine / path).unlink()
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: None)
    found = processor.cpu()
    assert (found["physical_cores"], found["quota_cores"], found["features"]) == (None, None, [])
    assert found["model"] == processor.cpu_model() != ""


@pytest.mark.cases(
    ("/outer/inner", {"outer/inner": "max", "outer": "150000", "": "400000"}, 1.5),
    ("/docker/0123", {"": "50000", "..": "1"}, 0.5),  # the path on the host of a container; and not outside /sys,
)
def test_the_smallest_cpu_quota_of_the_group_and_its_ancestors_applies(group, limits, quota, machine):
    (machine / "proc" / "self" / "cgroup").write_text(f"0::{group}\n")
    for name, limit in limits.items():
        (machine / "cgroup" / name / "cpu.max").write_text(f"{limit} 100000\n")
    assert processor.cpu()["quota_cores"] == quota
    assert len(processor.usable_core_numbers()) == 1


def test_the_cores_of_this_process_are_those_of_the_affinity_mask(monkeypatch):
    monkeypatch.setattr(processor, "_quota_cores", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 7}, raising=False)
    assert processor.usable_core_numbers() == [1, 5, 7]
    monkeypatch.delattr(os, "sched_getaffinity")
    assert len(processor.usable_core_numbers()) == os.cpu_count()


@linux
def test_the_peak_stays_until_it_is_reset_which_frees_reference_cycles():
    node: Any = type("Node", (), {})()
    node.itself, left = node, weakref.ref(node)
    del node
    memory.reset_peak(CPU)
    assert left() is None
    before = memory.usage(CPU)["memory/peak"]
    assert before == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)
    with map_new_pages(128 * MEGABYTE):
        pass
    peak = memory.usage(CPU)["memory/peak"]
    assert peak >= before + 120 * MEGABYTE
    assert memory.usage(CPU)["memory/peak"] == peak
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this container forbids resetting the peak")
    memory.reset_peak(CPU)
    assert memory.usage(CPU)["memory/peak"] < peak - 100 * MEGABYTE


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("freebsd", 1024)])
def test_without_proc_the_peak_is_that_of_getrusage(tmp_path, monkeypatch, platform, unit):
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    monkeypatch.setattr(sys, "platform", platform)
    memory.reset_peak(CPU)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    assert memory.usage(CPU) == {"memory/peak": pytest.approx(peak)}
    (tmp_path / "status").write_text("Name:\tpython\n")  # some containers leave out `VmHWM`
    assert memory.usage(CPU)["memory/peak"] == pytest.approx(peak)


GROUP = {"memory.max": "5000", "memory.current": "1300"}
GROUP["memory.stat"] = "anon 300\nfile 900\ninactive_file 200\nactive_file 100\nslab 50"  # 300 of it are cached files


@pytest.mark.cases(
    ({"outer/inner/memory.max": "max"}, 409_600, None),
    ({"outer/memory.max": "2048"}, 2048, 2048),
    ({"outer/memory.max": "1024000"}, 409_600, None),  # no more than the machine has
    ({f"outer/inner/{name}": text for name, text in GROUP.items()}, 4000, 5000),
    ({f"outer/inner/{name}": text for name, text in GROUP.items()} | {"memory.stat": "anon 99"}, 4000, 5000),
    ({"outer/inner/memory.max": "5000", "outer/memory.max": "20000", "outer/memory.current": "17500"}, 2500, 5000),
    ({"outer/inner/memory.max": "5000", "outer/memory.max": "20000", "outer/memory.current": "21000"}, 0, 5000),
)
def test_the_memory_of_the_machine_is_what_its_control_groups_leave(files, available, limit, machine):
    for name, text in files.items():
        (machine / "cgroup" / name).write_text(f"{text}\n")
    assert memory.host_memory() == {"total_bytes": 1_024_000, "available_bytes": available, "limit_bytes": limit}


@pytest.mark.skipif(memory._glibc() is None, reason="the C library is not glibc")
def test_freed_blocks_are_used_again_and_returned_at_the_end():
    def fill() -> int:
        """Allocate and free 128 MiB, 32,768 pages, and return the number of page faults."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [bytearray(b"x") * 2**24 for _ in range(8)]
        del blocks
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with memory.freed_memory_kept():
        fill()
        assert sum(fill() for _ in range(4)) < 5_000
        kept = psutil.Process().memory_info().rss
    assert kept - psutil.Process().memory_info().rss > 100 * MEGABYTE


@pytest.mark.gpu
def test_memory_usage_on_cuda_is_that_of_the_allocator():
    device = torch.device("cuda", 0)
    memory.reset_peak(device)
    before, allocated = memory.usage(device), torch.cuda.memory_allocated(device)
    assert set(before) == {"memory/peak", "memory/peak_reserved"}
    assert before["memory/peak"] == allocated
    block = torch.empty(64 * MEGABYTE, dtype=torch.uint8, device=device)
    during = memory.usage(device)
    assert during["memory/peak"] == allocated + 64 * MEGABYTE
    assert during["memory/peak_reserved"] >= during["memory/peak"]
    del block
    assert memory.usage(device) == during

    memory.reset_peak(device)
    freed = memory.usage(device)
    assert freed["memory/peak_reserved"] < during["memory/peak_reserved"], "given back"
    assert freed["memory/peak"] == allocated


@pytest.mark.gpu
def test_the_memory_is_written_if_it_runs_out(tmp_path):
    recorded = Device("cuda", memory_snapshot=True).memory_recorded(tmp_path / "memory.pickle")
    with pytest.raises(torch.OutOfMemoryError), recorded:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    [trace, *_] = pickle.loads((tmp_path / "memory.pickle").read_bytes())["device_traces"]
    assert trace[-1]["action"] == "oom"
    assert trace[-1]["size"] >= 2**50
