"""Tests of `to_device`: which copies and waits are queued on which stream, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.fake_cuda import CUDA, FakeCuda, FakeTensor

from runner.data.image_files import to_device


def host(cuda: FakeCuda, count: int) -> Any:
    for number in range(1, count + 1):
        cuda.calls.append(("load", number))
        yield FakeTensor(cuda, f"x{number}"), FakeTensor(cuda, f"y{number}")


def copied(number: int) -> list[tuple[Any, ...]]:
    names = f"x{number}", f"y{number}"
    return [("load", number), *(("copy", "copy", name) for name in names), ("record", "copy", number)]


def handed_out(number: int) -> list[tuple[Any, ...]]:
    names = f"x{number} on the device", f"y{number} on the device"
    return [("wait", "compute", number), *(("record_stream", "compute", name) for name in names), ("compute", number)]


def test_the_next_copy_is_queued_before_a_batch_is_yielded():
    cuda = FakeCuda()
    for number, batch in enumerate(to_device(host(cuda, 3), CUDA, cuda=cuda), start=1):
        assert [tensor.name for tensor in batch] == [f"x{number} on the device", f"y{number} on the device"]
        cuda.calls.append(("compute", number))
    assert cuda.calls == [
        *copied(1),
        *copied(2),
        *handed_out(1),
        *copied(3),
        *handed_out(2),
        *handed_out(3),
        ("synchronize", "copy"),
    ]


def test_a_closed_stream_waits_for_its_copies_and_closes_its_source():
    cuda = FakeCuda()
    source = host(cuda, 10)
    batches = to_device(source, CUDA, cuda=cuda)
    next(batches)
    batches.close()
    assert cuda.calls[-1] == ("synchronize", "copy")
    assert list(source) == []


def test_on_the_cpu_batches_pass_through_one_at_a_time():
    taken = []

    def source():
        for number in range(3):
            taken.append(number)
            yield torch.tensor([number]), torch.tensor([-number])

    batches = to_device(source(), torch.device("cpu"))
    for number, (x, y) in enumerate(batches):
        assert (x.item(), y.item()) == (number, -number)
        assert taken == list(range(number + 1))  # no batch is loaded ahead, because it would only take memory


@pytest.mark.gpu
def test_copies_overlap_with_computation():
    device = torch.device("cuda")
    host_batch = torch.ones(1 << 26).pin_memory()  # 256 MiB: copying them takes about ten milliseconds
    weights = torch.randn(4096, 4096, device=device)

    def milliseconds(copy: bool, work: bool) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        source = ((host_batch if copy else torch.ones(1),) for _ in range(20))
        begin.record()
        for _ in to_device(source, device):
            for _ in range(10 if work else 0):
                weights @ weights  # only queued; the result is not needed
        torch.cuda.synchronize()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    milliseconds(True, True)
    copies, work, both = milliseconds(True, False), milliseconds(False, True), milliseconds(True, True)
    assert both < max(copies, work) + 0.5 * min(copies, work)
