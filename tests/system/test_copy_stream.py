"""Tests of copy streams: what is queued on which CUDA stream, in which order, and how long host memory is kept."""

from typing import Any

import pytest
import torch
from helpers.fake_cuda import CUDA, SECOND_CUDA, FakeCuda, FakeTensor

from runner.system.copy_stream import CopyStream, NoCopy, PeerCopyStream, copy_stream


def names(tensors: Any) -> list[str]:
    return [tensor.name for tensor in tensors]


def host(cuda: FakeCuda, number: int) -> Any:
    return FakeTensor(cuda, f"x{number}"), FakeTensor(cuda, f"y{number}")


def test_nothing_is_copied_within_one_device():
    stream, tensors = copy_stream(SECOND_CUDA, SECOND_CUDA), (torch.ones(2), torch.zeros(3))
    assert type(stream) is NoCopy
    received = stream.receive(stream.send(tensors))
    assert all(got is sent for got, sent in zip(received, tensors, strict=True))
    stream.close()


def test_a_copy_runs_on_its_own_stream_and_the_compute_stream_waits_for_it_alone():
    cuda = FakeCuda()
    stream = CopyStream(CUDA, cuda)
    transfer = stream.send(host(cuda, 1))
    assert cuda.calls == [("copy", "copy", "x1"), ("copy", "copy", "y1"), ("record", "copy", 1)]
    stream.send(host(cuda, 2))
    cuda.calls.clear()
    received = stream.receive(transfer)
    assert names(received) == ["x1 on the device", "y1 on the device"]
    assert cuda.calls == [
        ("wait", "compute", 1),
        ("record_stream", "compute", "x1 on the device"),
        ("record_stream", "compute", "y1 on the device"),
    ], "and the memory is not used again before the computing stream has read it"


def test_host_memory_is_kept_until_its_copy_is_done():
    cuda = FakeCuda()
    stream = CopyStream(CUDA, cuda)
    for number in (1, 2, 3):
        stream.send(host(cuda, number))
    assert {"x1", "y1", "x2", "x3", "x1 on the device"} <= FakeTensor.alive, "nothing else keeps them"
    cuda.finished |= {1, 2}
    stream.send(host(cuda, 4))
    assert not {"x1", "y1", "x2", "x1 on the device"} & FakeTensor.alive
    assert {"x3", "x4"} <= FakeTensor.alive
    stream.close()
    assert cuda.calls[-1] == ("synchronize", "copy")
    assert not {"x3", "x4"} & FakeTensor.alive


def test_a_peer_copy_waits_for_its_source_and_blocks_neither_compute_stream():
    cuda = FakeCuda()
    stream = copy_stream(SECOND_CUDA, CUDA, cuda)
    assert isinstance(stream, PeerCopyStream)
    transfer = stream.send(host(cuda, 1))
    assert cuda.calls == [
        ("record", "compute on cuda:1", 1),
        ("wait", "copy on cuda:1", 1),
        ("copy", "copy", "x1"),
        ("copy", "copy", "y1"),
        ("record", "copy", 2),
        ("record_stream", "copy on cuda:1", "x1"),
        ("record_stream", "copy on cuda:1", "y1"),
    ]
    cuda.calls.clear()
    assert names(stream.receive(transfer)) == ["x1 on the device", "y1 on the device"]
    assert cuda.calls[0] == ("wait", "compute", 2)
    assert {call[1] for call in cuda.calls} == {"compute"}


@pytest.mark.gpu
def test_copies_arrive_complete_on_a_busy_device():
    device = torch.device("cuda")
    stream = CopyStream(device)
    weights, sums = torch.randn(4096, 4096, device=device), []
    for number in range(24):
        transfer = stream.send((torch.full((1 << 22,), number, dtype=torch.float32).pin_memory(),))
        for _ in range(20):  # the device falls behind the host
            weights = torch.nn.functional.normalize(weights @ weights)
        (values,) = stream.receive(transfer)
        sums.append(torch.stack((values.min(), values.max())))
        del values, transfer
    stream.close()
    expected = torch.arange(24, dtype=torch.float32)[:, None].expand(24, 2)
    assert torch.equal(torch.stack(sums).cpu(), expected)
