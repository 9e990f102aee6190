"""Functions that list the GPUs of the machine without creating a CUDA context in this process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress


def visible_gpus() -> list[str]:
    """Return the indices or UUIDs of the GPUs that this process may use, in the format of CUDA_VISIBLE_DEVICES."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count() if torch.backends.cuda.is_built() else 0
    if visible is None:
        return [str(index) for index in range(count)]
    return [name.strip() for name in visible.split(",") if name.strip()][:count]


def busy_gpus(names: Iterable[str]) -> set[str]:
    """Return the GPUs in `names` that any process is using for computation; an empty set if NVML is not available.

    Args:
        names: the index or UUID of each GPU. NVML numbers the GPUs in the order of the PCI bus. On a machine with GPUs
            of several models, the indices of CUDA are the same only with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    try:
        import pynvml  # pyright: ignore[reportMissingImports] (optional)

        pynvml.nvmlInit()
    except Exception:  # the package, the library or the driver is missing
        return set()
    busy = set()
    for name in names:
        with suppress(pynvml.NVMLError):
            by_index = name.isdecimal()
            handle = (
                pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(name)
            )
            if pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                busy.add(name)
    return busy
