"""Simulated accelerators, and a fake of torch that records the calls of streams, events and tensors in their order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

CUDA = torch.device("cuda")
SECOND_CUDA = torch.device("cuda", 1)


def simulate_accelerators(monkeypatch: pytest.MonkeyPatch, count: int, kind: str = "cuda") -> None:
    """Let torch find `count` accelerators of the device type `kind`."""

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return torch.device(kind) if count or not check_available else None

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


class FakeCuda:
    """The part of torch that copy streams use, which is also its `accelerator`; `calls` records what was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.current: dict[torch.device, FakeStream] = {}
        self.active: FakeStream | None = None
        self.finished: set[int] = set()
        self.num_events = 0
        self.accelerator = self

    def Stream(self, device: torch.device) -> FakeStream:  # torch's name
        return FakeStream(self, f"copy{_suffix(device)}")

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current.setdefault(device, FakeStream(self, f"compute{_suffix(device)}"))


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str):
        self.cuda, self.name = cuda, name

    def __enter__(self) -> None:
        self.before, self.cuda.active = self.cuda.active, self

    def __exit__(self, *_: object) -> None:
        self.cuda.active = self.before

    def record_event(self) -> SimpleNamespace:
        self.cuda.num_events = number = self.cuda.num_events + 1
        self.cuda.calls.append(("record", self.name, number))
        return SimpleNamespace(number=number, query=lambda: number in self.cuda.finished)

    def wait_event(self, event: SimpleNamespace) -> None:
        self.cuda.calls.append(("wait", self.name, event.number))

    def synchronize(self) -> None:
        self.cuda.calls.append(("synchronize", self.name))


class FakeTensor(torch.Tensor):
    """A tensor on the host, or its copy on the device; `alive` holds the names of all instances that still exist."""

    alive: ClassVar[set[str]] = set()
    name: str = ""

    def __new__(cls, cuda: FakeCuda, name: str) -> FakeTensor:
        return super().__new__(cls)

    def __init__(self, cuda: FakeCuda, name: str):
        self.cuda, self.name = cuda, name
        self.alive.add(name)

    def __del__(self) -> None:
        self.alive.discard(self.name)

    def to(self, device: torch.device, non_blocking: bool) -> FakeTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert device == CUDA
        assert non_blocking
        assert self.cuda.active is not None, "copied on a stream of its own"
        self.cuda.calls.append(("copy", self.cuda.active.name, self.name))
        return FakeTensor(self.cuda, f"{self.name} on the device")

    def record_stream(self, stream: FakeStream) -> None:
        self.cuda.calls.append(("record_stream", stream.name, self.name))


def _suffix(device: torch.device) -> str:
    return "" if device == CUDA else f" on {device}"
