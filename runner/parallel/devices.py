"""The choice of devices for parallel modes in which one process uses several GPUs."""

from __future__ import annotations

import os

import torch

from runner.config.errors import check, errors_under
from runner.device import Device


def devices_of_one_process(choice: Device) -> list[torch.device]:
    """Return the GPUs that `choice` selects, by default all visible GPUs.

    If `choice` selects a device of another kind, return a list with only that device.

    Raises:
        ConfigError: if a device does not exist, or if `choice` is not the CPU and `CUDA_VISIBLE_DEVICES` hides every
            GPU.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU, and there is nothing to spread the work over"
    hides_all = hidden is not None and hidden.split(",")[0].strip() in ("", "-1")
    check(choice.kind == "cpu" or not hides_all, "device.kind", choice.kind, why, "unset it, or say device=cpu")
    with errors_under("device"):
        device = choice.resolve()
        return choice.resolve_all() if device.type == "cuda" else [device]
