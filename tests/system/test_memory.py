"""Memory in use, against what the kernel and the allocator say."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import sys
import weakref
from pathlib import Path

import pytest
import torch

from runner.system import memory

CPU = torch.device("cpu")
MEGABYTE = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def resident() -> int:
    """Bytes of this process in RAM, from another file than the module reads."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fresh(size: int) -> mmap.mmap:
    """New pages, written to: what is freed of the heap may be used again without the process growing."""
    block = mmap.mmap(-1, size)
    block.write(b"x" * size)
    return block


@linux
def test_the_process_is_measured_on_the_cpu() -> None:
    usage = memory.usage(CPU)
    assert set(usage) == {"memory/allocated", "memory/peak"}
    assert usage["memory/allocated"] == pytest.approx(resident(), rel=0.02)
    with fresh(64 * MEGABYTE):
        grown = memory.usage(CPU)["memory/allocated"] - usage["memory/allocated"]
        assert grown == pytest.approx(64 * MEGABYTE, rel=0.05)
    assert memory.usage(CPU)["memory/allocated"] == pytest.approx(usage["memory/allocated"], rel=0.02)


@linux
def test_the_peak_stays_until_it_is_reset() -> None:
    memory.reset_peak(CPU)
    before = memory.usage(CPU)["memory/peak"]
    with fresh(128 * MEGABYTE):
        pass
    peak = memory.usage(CPU)["memory/peak"]
    assert peak >= before + 120 * MEGABYTE
    assert memory.usage(CPU)["memory/peak"] == peak
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this container forbids resetting the peak")
    memory.reset_peak(CPU)
    assert memory.usage(CPU)["memory/peak"] < peak - 100 * MEGABYTE


def test_cycles_are_freed_before_the_next_run() -> None:
    class Node:
        other: Node

    node = Node()
    node.other = node
    left = weakref.ref(node)
    gc.disable()
    try:
        del node
        assert left() is not None
        memory.reset_peak(CPU)
        assert left() is None
    finally:
        gc.enable()


@linux
def test_a_container_that_forbids_the_reset_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", forbidden)
    memory.reset_peak(CPU)
    assert memory.usage(CPU)["memory/peak"] > 0


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("freebsd", 1024)])
def test_without_proc_the_peak_is_getrusages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, unit: int
) -> None:
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    monkeypatch.setattr(sys, "platform", platform)
    memory.reset_peak(CPU)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    assert memory.usage(CPU) == {"memory/allocated": pytest.approx(peak), "memory/peak": pytest.approx(peak)}
    (tmp_path / "status").write_text("Name:\tpython\n")  # some containers show less of it
    assert memory.usage(CPU)["memory/peak"] == pytest.approx(peak)


@pytest.mark.gpu
def test_cuda_is_measured_by_its_allocator() -> None:
    device = torch.device("cuda", 0)
    memory.reset_peak(device)
    before = memory.usage(device)
    assert set(before) == {"memory/allocated", "memory/reserved", "memory/peak", "memory/peak_reserved"}
    block = torch.empty(64 * MEGABYTE, dtype=torch.uint8, device=device)
    during = memory.usage(device)
    assert during["memory/allocated"] - before["memory/allocated"] == 64 * MEGABYTE
    assert during["memory/peak"] == during["memory/allocated"]
    assert during["memory/reserved"] >= during["memory/allocated"]
    del block
    after = memory.usage(device)
    assert after["memory/allocated"] == before["memory/allocated"]
    assert after["memory/reserved"] == during["memory/reserved"], "cached"
    assert after["memory/peak"] == during["memory/peak"]
    memory.reset_peak(device)
    freed = memory.usage(device)
    assert freed["memory/reserved"] < after["memory/reserved"], "given back"
    assert freed["memory/peak"] == freed["memory/allocated"]
