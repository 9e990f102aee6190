"""The accelerator of this machine, through `torch.accelerator`: what one lacks is asked of it, not listed by its name.

A process has accelerators of one type: the one that its torch was built for, or that a plugin of torch registered.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from runner.system.torch_errors import is_out_of_memory

log = logging.getLogger(__name__)


def accelerator_type() -> str | None:
    """Return the device type of the accelerators that torch finds, such as `cuda` (also AMD's), or None."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def why_unavailable(kind: str) -> str:
    """Return why this process has no accelerator of the device type `kind`; an empty string if it has one."""
    with warnings.catch_warnings(record=True, action="always") as caught:  # of torch, as about an old driver
        found, built = accelerator_type(), torch.accelerator.current_accelerator()
    if found == kind:
        return ""
    if found is not None:
        return f"torch finds devices of type {found} here, and no others"
    if built is None or built.type != kind:
        return f"torch {torch.__version__} is built for {'CPUs' if built is None else built.type} only"
    details = "".join(f": {str(warning.message).splitlines()[0]}" for warning in caught[:1])
    return f"torch finds no {kind.upper()} device{details}"


def properties(device: torch.device) -> Any:
    """Return what torch knows of `device`, such as `name` and `total_memory`; None for a type without properties."""
    find = getattr(torch.get_device_module(device), "get_device_properties", None)
    return None if find is None else find(device)


def total_bytes(device: torch.device) -> int:
    """Return the memory of `device` in bytes. On CUDA, no context is created, which would itself take memory."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    found = properties(device)
    return found.total_memory if hasattr(found, "total_memory") else torch.accelerator.get_memory_info(device)[1]


@cache
def has_float64(device: torch.device) -> bool:
    """Return whether `device` computes in float64, which Metal and some GPUs of Intel do not."""
    return _works(lambda: torch.ones(1, dtype=torch.float64, device=device).add_(1))


@cache
def has_streams(device: torch.device) -> bool:
    """Return whether `device` has streams and events. The CPU has none."""
    return device.type != "cpu" and _works(lambda: torch.Stream(device).record_event())


@cache
def scales_float16(device: torch.device) -> bool:
    """Return whether `device` trains in float16 with `torch.amp.GradScaler`, by one step of a network.

    A CPU is said not to: its float16 convolutions are about 50 times slower than those in float32.
    """

    def step() -> None:
        weight = torch.ones(1, 1, device=device, requires_grad=True)
        optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler(device.type, init_scale=2.0)
        with torch.autocast(device.type, torch.float16):
            loss = torch.nn.functional.linear(weight, weight).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if not scaler.is_enabled():
            raise RuntimeError

    return device.type != "cpu" and _works(step)


def _works(trial: Callable[[], object]) -> bool:
    try:
        trial()
    except (RuntimeError, TypeError):
        return False
    return True


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of torch's default random number generator of the accelerator `device`."""
    with torch.accelerator.device_index(device.index):
        return torch.get_device_module(device).get_rng_state()


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Set torch's default random number generator of the accelerator `device` to `state`, of `random_state`."""
    with torch.accelerator.device_index(device.index):
        torch.get_device_module(device).set_rng_state(state)


# ---------------------------------------------------------------------------------------------------------------------
# What exists on CUDA alone


def has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def memory_recorded(path: Path) -> Iterator[None]:
    """A context in which torch records what allocates memory; if it runs out, the record is written to `path`.

    https://docs.pytorch.org/docs/stable/torch_cuda_memory.html: the functions are documented, though private.
    """
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error.__cause__ or error):
            torch.cuda.memory._dump_snapshot(str(path))
            log.error("the memory's snapshot is in %s: https://docs.pytorch.org/memory_viz shows it", path)
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def peers(device: torch.device, count: int) -> list[int]:
    """Return the indices of the devices, of `count`, whose memory the CUDA device `device` reads without the host."""
    others = range(count) if device.type == "cuda" else ()
    return [other for other in others if other != device.index and torch.cuda.can_device_access_peer(device, other)]
