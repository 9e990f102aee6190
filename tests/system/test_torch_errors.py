"""Tests of `torch_errors`: its functions recognize errors that torch actually raises, and no other errors."""

import datetime
import errno
import multiprocessing
import os
from collections.abc import Callable

import pytest
import torch
from helpers.command import TIMEOUT_SECONDS
from helpers.programs import lose_peer

from runner.parallel.launch.supervisor import RankError
from runner.system import torch_errors

STORE = {"is_master": True, "timeout": datetime.timedelta(seconds=0.1)}
RECOGNIZED: dict[str, tuple[Callable[[], object], Callable[[BaseException], object] | None]] = {
    "no deterministic form": (
        lambda: torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0])),
        torch_errors.nondeterministic_operation,
    ),
    "one value per channel": (
        lambda: torch.nn.BatchNorm1d(3)(torch.ones(1, 3)),
        torch_errors.is_single_value_batch_norm,
    ),
    "absent peer": (lambda: torch.distributed.TCPStore("127.0.0.1", 0, 2, **STORE), torch_errors.is_lost_peer),
    "too large": (lambda: torch.empty(2**60), torch_errors.is_out_of_memory),
    "wrong shapes": (lambda: torch.ones(2, 3) @ torch.ones(2, 3), None),
}


@pytest.mark.parametrize("name", RECOGNIZED)
def test_each_error_is_recognized_by_its_function_alone(name):
    call, recognize = RECOGNIZED[name]
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(Exception) as raised:  # whatever torch raises
            call()
    finally:
        torch.use_deterministic_algorithms(False)
    found = [each for _, each in RECOGNIZED.values() if each and each(raised.value)]
    assert found == ([recognize] if recognize else [])
    if recognize is torch_errors.nondeterministic_operation:
        sentence = torch_errors.nondeterministic_operation(raised.value)
        assert "put_" in sentence
        assert "\n" not in sentence
        assert "turn off" not in sentence, "torch's advice is not ours"


NCCL = """NCCL error in: torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27.5
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
"""
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("FIND was unable to find an engine to execute this computation"),
    torch.distributed.DistBackendError(f"{NCCL}Failed to CUDA calloc async 608 bytes"),
    RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB, max allowed: 9.07 GB)."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: not enough memory: you tried to allocate"),
    RuntimeError("unable to mmap 4096 bytes from file </torch_1>: Cannot allocate memory (12)"),
    RuntimeError("std::bad_alloc"),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    MemoryError(),
    RankError(1, "was killed by SIGKILL (the kernel does that where memory runs out)"),
]
OTHERS = [
    RuntimeError("MPS backend is not available"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    torch.distributed.DistBackendError(f"{NCCL}Cuda failure 700 'an illegal memory access was encountered'"),
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    RankError(1, "was killed by SIGSEGV"),
]


@pytest.mark.parametrize("error", [*OUT_OF_MEMORY, *OTHERS], ids=lambda error: str(error)[-40:])
def test_errors_that_mean_too_little_memory_are_recognized(error):
    assert torch_errors.is_out_of_memory(error) == (error in OUT_OF_MEMORY)


def test_a_rank_that_dies_in_a_collective_is_a_lost_peer(tmp_path):
    """gloo raises a plain RuntimeError, which can be recognized only by its message."""
    context, (ours, theirs) = multiprocessing.get_context("forkserver"), multiprocessing.Pipe()
    ranks = [context.Process(target=lose_peer, args=(tmp_path / "store", rank, theirs)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    assert ours.poll(TIMEOUT_SECONDS)
    assert ours.recv() == (RuntimeError, True)
    for rank in ranks:
        rank.join(TIMEOUT_SECONDS)
    assert ranks[1].exitcode == 7
