"""Copies to the device beside its work: what is queued where, and in which order."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from runner.data.prefetch import to_device

CUDA = torch.device("cuda")


class Recorder:
    """Stands in for `torch.cuda`: writes down what is asked of streams, events and tensors."""

    def __init__(self):
        self.calls: list[tuple[Any, ...]] = []
        self.computing = Stream(self, "compute")
        self.current = self.computing
        self.finished: set[int] = set()

    def Stream(self, device):
        assert device == CUDA
        return Stream(self, "copy")

    def current_stream(self, device):
        assert device == CUDA
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    def __init__(self, recorder: Recorder, name: str):
        self.recorder, self.name, self.events = recorder, name, 0

    def record_event(self):
        self.events += 1
        self.recorder.calls.append(("record", self.name, self.events))
        return Event(self.recorder, self.events)

    def wait_event(self, event):
        self.recorder.calls.append(("wait", self.name, event.number))

    def synchronize(self):
        self.recorder.calls.append(("synchronize", self.name))


class Event:
    def __init__(self, recorder: Recorder, number: int):
        self.recorder, self.number = recorder, number

    def query(self) -> bool:
        return self.number in self.recorder.finished


class Tensor:
    """A tensor on the host, or its copy on the device."""

    alive: set[str] = set()  # noqa: RUF012

    def __init__(self, recorder: Recorder, name: str):
        self.recorder, self.name = recorder, name
        self.alive.add(name)

    def __del__(self):
        self.alive.discard(self.name)

    def to(self, device, non_blocking):
        assert device == CUDA
        assert non_blocking
        self.recorder.calls.append(("copy", self.recorder.current.name, self.name))
        return Tensor(self.recorder, f"{self.name} on the device")

    def record_stream(self, stream):
        self.recorder.calls.append(("belongs", stream.name, self.name))


def host(recorder: Recorder, count: int) -> Any:
    for number in range(1, count + 1):
        recorder.calls.append(("load", number))
        yield Tensor(recorder, f"x{number}"), Tensor(recorder, f"y{number}")


def copied(number: int) -> list[tuple[Any, ...]]:
    names = f"x{number}", f"y{number}"
    return [("load", number), *(("copy", "copy", name) for name in names), ("record", "copy", number)]


def handed_out(number: int) -> list[tuple[Any, ...]]:
    names = f"x{number} on the device", f"y{number} on the device"
    return [("wait", "compute", number), *(("belongs", "compute", name) for name in names), ("compute", number)]


def test_the_next_batch_is_under_way_before_one_is_computed_with_and_waited_for_before_it_is_used():
    recorder = Recorder()
    for number, batch in enumerate(to_device(host(recorder, 3), CUDA, recorder), start=1):
        assert [tensor.name for tensor in batch] == [f"x{number} on the device", f"y{number} on the device"]
        recorder.calls.append(("compute", number))
    assert recorder.calls == [
        *copied(1),
        *copied(2),
        *handed_out(1),
        *copied(3),
        *handed_out(2),
        *handed_out(3),
        ("synchronize", "copy"),
    ]


def test_a_batch_waits_on_the_stream_that_is_current_when_it_is_asked_for():
    recorder = Recorder()
    batches = to_device(host(recorder, 2), CUDA, recorder)
    recorder.current = Stream(recorder, "another")
    next(batches)
    assert ("wait", "another", 1) in recorder.calls
    assert ("belongs", "another", "x1 on the device") in recorder.calls


def test_host_memory_lives_until_its_copy_is_over():
    recorder = Recorder()
    batches = to_device(host(recorder, 10), CUDA, recorder)
    batch = next(batches)
    del batch
    next(batches)  # the third is queued; no copy is over yet
    assert {"x1", "x2", "x3"} <= Tensor.alive
    assert "x1 on the device" in Tensor.alive  # so does the copy: it is still being written
    recorder.finished |= {1, 2}
    next(batches)
    assert not {"x1", "y2", "x1 on the device"} & Tensor.alive
    assert {"x3", "x4"} <= Tensor.alive


def test_a_stream_that_is_left_waits_for_its_copies_and_ends_its_source():
    recorder = Recorder()
    source = host(recorder, 10)
    batches = to_device(source, CUDA, recorder)
    next(batches)
    batches.close()
    assert recorder.calls[-1] == ("synchronize", "copy")
    assert list(source) == []


def test_elsewhere_batches_pass_through_one_by_one():
    taken = []

    def source():
        for number in range(3):
            taken.append(number)
            yield torch.tensor([number]), torch.tensor([-number])

    batches = to_device(source(), torch.device("cpu"))
    for number, (x, y) in enumerate(batches):
        assert (x.item(), y.item()) == (number, -number)
        assert taken == list(range(number + 1))  # nothing ahead: it would only take memory


@pytest.mark.gpu
def test_on_a_device_every_batch_arrives_whole_however_busy_it_is():
    device = torch.device("cuda")
    size, count = 1 << 22, 24

    def source():
        for number in range(count):
            # Pinned memory is used again as soon as Python lets go of it and the allocator thinks its copy is over.
            yield (torch.full((size,), number, dtype=torch.float32).pin_memory(),)

    weights = torch.randn(4096, 4096, device=device)
    sums = []
    for (values,) in to_device(source(), device):
        for _ in range(20):  # the device falls behind the host, so that copies of later batches overtake its work
            weights = torch.nn.functional.normalize(weights @ weights)
        sums.append(torch.stack((values.min(), values.max())))
        del values
    expected = torch.arange(count, dtype=torch.float32)[:, None].expand(count, 2)
    assert torch.equal(torch.stack(sums).cpu(), expected)


@pytest.mark.gpu
def test_on_a_device_copies_overlap_with_work():
    device = torch.device("cuda")
    host_batch = torch.ones(1 << 26).pin_memory()  # 256 MiB: some ten milliseconds on the bus
    weights = torch.randn(4096, 4096, device=device)

    def milliseconds(copy: bool, work: bool) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        source = ((host_batch if copy else torch.ones(1),) for _ in range(20))
        begin.record()
        for _ in to_device(source, device):
            for _ in range(10 if work else 0):
                weights @ weights  # queued; its result is not wanted
        torch.cuda.synchronize()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    milliseconds(True, True)
    copies, work, both = milliseconds(True, False), milliseconds(False, True), milliseconds(True, True)
    assert both < max(copies, work) + 0.5 * min(copies, work)
