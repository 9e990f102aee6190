"""Which device computes: found by itself, or named, and then it must be there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from runner.config.errors import check, check_choice, check_range
from runner.system.cpu import cpu_model


@dataclass
class Device:
    """A choice of device. `resolve` turns it into a `torch.device` that exists, or refuses.

    Args:
        kind: `cpu`, `cuda`, `mps`, or `auto`: the first of cuda, mps and cpu that is there.
        index: which of several CUDA devices, counted among the visible ones (CUDA_VISIBLE_DEVICES); null: the first.
        indices: the devices that a mode of several may use; empty: all visible.
        threads: CPU threads that one operation may use; null: one a core.
    """

    kind: str = "auto"
    index: int | None = None
    indices: list[int] = field(default_factory=list)
    threads: int | None = None

    def __post_init__(self) -> None:
        check_choice(self, "kind", ("auto", "cpu", "cuda", "mps"))
        check_range(self, "index", least=0)
        check_range(self, "threads", least=1, most=1024)
        check(
            self.index is None or self.kind in ("auto", "cuda"),
            "index",
            self.index,
            f"device={self.kind} has no numbered devices",
            "leave it null, or choose device=cuda",
        )
        check(
            len(set(self.indices)) == len(self.indices) and all(index >= 0 for index in self.indices),
            "indices",
            self.indices,
            "they must be different numbers from 0",
            "device.indices=[0,1]",
        )

    def resolve(self) -> torch.device:
        """The device to compute on.

        Raises:
            ConfigError: when a device was asked for that is not there.
        """
        kind = self.kind if self.kind != "auto" else _best()
        if kind == "cuda":
            check(torch.cuda.is_available(), "kind", kind, f"torch finds no CUDA device{_hidden()}", _OTHERWISE)
            count, index = torch.cuda.device_count(), self.index or 0
            check(index < count, "index", index, f"{count} CUDA devices are visible{_hidden()}", f"0 to {count - 1}")
            return torch.device("cuda", index)
        self.check_unnumbered(kind)
        if kind == "mps":
            check(torch.backends.mps.is_available(), "kind", kind, "this machine has no Metal device", _OTHERWISE)
        return torch.device(kind)

    def check_unnumbered(self, kind: str) -> None:
        """Refuse GPUs that were asked for by number where the device is another `kind`."""
        why = f"the device is the {kind}"
        check(self.index is None, "index", self.index, why, "leave device.index null")
        check(not self.indices, "indices", self.indices, why, "leave device.indices empty")

    def resolve_all(self) -> list[torch.device]:
        """The CUDA devices to compute on: the one at `index`, those at `indices`, or all visible ones.

        Raises:
            ConfigError: when one is not there.
        """
        first = Device("cuda", self.index).resolve()
        if self.index is not None:
            return [first]
        count = torch.cuda.device_count()
        why, remedy = f"{count} CUDA devices are visible{_hidden()}", f"numbers from 0 to {count - 1}"
        check(all(index < count for index in self.indices), "indices", self.indices, why, remedy)
        return [torch.device("cuda", index) for index in self.indices or range(count)]

    @contextmanager
    def settings(self, device: torch.device, deterministic: bool) -> Iterator[None]:
        """torch's global switches for one run; the jobs of a sweep share a process, so they are put back after it."""
        before = torch.get_num_threads(), torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS documentation: results reproducibility
        torch.set_num_threads(self.threads or before[0])
        torch.backends.cudnn.benchmark = device.type == "cuda" and not deterministic
        _use_deterministic(deterministic)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            yield
        finally:
            torch.set_num_threads(before[0])
            torch.backends.cudnn.benchmark = before[1]
            _use_deterministic(before[2])


_OTHERWISE = "device=auto takes what is there; `python -m runner.tools.doctor` shows it"


def _use_deterministic(wanted: bool) -> None:
    if wanted != torch.are_deterministic_algorithms_enabled():  # the call loads the compiler, which takes a second
        torch.use_deterministic_algorithms(wanted)


def _best() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _hidden() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"


def device_name(device: torch.device) -> str:
    """The device with the name of its hardware: `cuda:0 (NVIDIA H200)`."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({cpu_model()})"


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all that was queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
