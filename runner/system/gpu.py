"""The GPUs of the machine, without creating a CUDA context in this process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count() if torch.backends.cuda.is_built() else 0
    if visible is None:
        return [str(index) for index in range(count)]
    return [name.strip() for name in visible.split(",") if name.strip()][:count]


def busy_gpus(names: Iterable[str]) -> set[str]:
    """Return those of the GPUs `names` on which a process computes; none of them if NVML is not available.

    NVML is the package nvidia-ml-py, which `pip install -e '.[gpu]'` installs.
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
