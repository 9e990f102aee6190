"""The devices that one process may spread a network over."""

from __future__ import annotations

import os

import torch

from runner.config import check
from runner.device import Device


def check_not_hidden(choice: Device) -> None:
    """Refuse a mode for several GPUs where the environment hides all of them, unless the CPU is meant.

    Raises:
        ConfigError: with the key from the device's room.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU, and there is nothing to spread the work over"
    hides_all = hidden is not None and hidden.split(",")[0].strip() in ("", "-1")
    check(choice.kind == "cpu" or not hides_all, "kind", choice.kind, why, "unset it, or say device=cpu")


def spread(choice: Device, device: torch.device) -> list[torch.device]:
    """The GPUs of `device.indices`, or all that are visible; `device` alone where it is none, or one is named."""
    return choice.resolve_all() if device.type == "cuda" else [device]


def first(choice: Device) -> torch.device:
    """The device that `spread` begins with."""
    return spread(choice, choice.resolve())[0]
