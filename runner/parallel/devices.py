"""The GPUs that one process may use together."""

from __future__ import annotations

import os

import torch

from runner.config.errors import check, errors_under
from runner.device import Device


def devices_of_one_process(choice: Device) -> list[torch.device]:
    """The GPUs of `device.indices`, or all that are visible; the one device of `choice` where it is not CUDA.

    Raises:
        ConfigError: when a device is not there, or the environment hides every GPU and the CPU was not asked for.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU, and there is nothing to spread the work over"
    hides_all = hidden is not None and hidden.split(",")[0].strip() in ("", "-1")
    check(choice.kind == "cpu" or not hides_all, "device.kind", choice.kind, why, "unset it, or say device=cpu")
    with errors_under("device"):
        device = choice.resolve()
        return choice.resolve_all() if device.type == "cuda" else [device]
