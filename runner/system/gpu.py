"""Functions that list the GPUs of the machine without creating a CUDA context in this process."""

from __future__ import annotations

import os
import re
import warnings
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


def lacks_kernels(index: int) -> str:
    """Return why the installed torch cannot compute on CUDA device `index`; an empty string if it can.

    A build of torch has binary code for some architectures. The code for `sm_86` runs on devices of capability 8.6 to
    8.9, and that for `compute_90` is compiled by the driver for 9.0 and later.
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#application-compatibility
    """
    import torch

    # Not sm_90a, which is for 9.0 alone.
    built = re.findall(r"(sm|compute)_([0-9]+)([0-9])\b", " ".join(torch.cuda.get_arch_list()))
    try:
        with warnings.catch_warnings(action="ignore"):  # of torch, about any device that is too old
            major, minor = torch.cuda.get_device_capability(index)
    except (RuntimeError, AssertionError):  # no driver, or a broken device, which its first use tells
        return ""
    versions = [(kind, (int(a), int(b))) for kind, a, b in built]
    fits = (each <= (major, minor) and (kind == "compute" or each[0] == major) for kind, each in versions)
    if not versions or any(fits):
        return ""
    known = ", ".join(f"{a}.{b}" for a, b in sorted({each for _, each in versions}))
    name = torch.cuda.get_device_name(index)
    return f"{name} has compute capability {major}.{minor}, and torch {torch.__version__} is built for {known}"
