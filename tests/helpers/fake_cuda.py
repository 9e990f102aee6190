"""A fake of `torch.cuda` that records the calls of streams, events and tensors in their order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

CUDA = torch.device("cuda")
SECOND_CUDA = torch.device("cuda", 1)


class FakeCuda:
    """The part of `torch.cuda` that copy streams use; `calls` records what was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.current: dict[torch.device, FakeStream] = {}
        self.active: FakeStream | None = None
        self.finished: set[int] = set()
        self.num_events = 0

    def Stream(self, device: torch.device) -> FakeStream:  # torch's name
        return FakeStream(self, f"copy{_suffix(device)}")

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current.setdefault(device, FakeStream(self, f"compute{_suffix(device)}"))

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.active = self.active, stream
        yield
        self.active = before


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str):
        self.cuda, self.name = cuda, name

    def record_event(self) -> FakeEvent:
        self.cuda.num_events += 1
        self.cuda.calls.append(("record", self.name, self.cuda.num_events))
        return FakeEvent(self.cuda, self.cuda.num_events)

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.calls.append(("wait", self.name, event.number))

    def synchronize(self) -> None:
        self.cuda.calls.append(("synchronize", self.name))


class FakeEvent:
    def __init__(self, cuda: FakeCuda, number: int):
        self.cuda, self.number = cuda, number

    def query(self) -> bool:
        return self.number in self.cuda.finished


class FakeTensor:
    """A tensor on the host, or its copy on the device; `alive` holds the names of all instances that still exist."""

    alive: ClassVar[set[str]] = set()

    def __init__(self, cuda: FakeCuda, name: str):
        self.cuda, self.name = cuda, name
        self.alive.add(name)

    def __del__(self) -> None:
        self.alive.discard(self.name)

    def to(self, device: torch.device, non_blocking: bool) -> FakeTensor:
        assert device == CUDA
        assert non_blocking
        assert self.cuda.active is not None, "copied on a stream of its own"
        self.cuda.calls.append(("copy", self.cuda.active.name, self.name))
        return FakeTensor(self.cuda, f"{self.name} on the device")

    def record_stream(self, stream: FakeStream) -> None:
        self.cuda.calls.append(("record_stream", stream.name, self.name))


def _suffix(device: torch.device) -> str:
    return "" if device == CUDA else f" on {device}"
