"""Tests of initializing, destroying and aborting the process group, and of its store."""

import pytest
import torch
from torch.distributed import HashStore

from runner.config.errors import ConfigError
from runner.parallel.ddp import DDP
from runner.parallel.launch import process_group
from runner.parallel.launch.cluster import external_rank_info
from runner.parallel.launch.processes import ExternalProcesses


def test_abort_does_not_end_a_backend_in_agreement_with_the_other_ranks():
    ended = []

    class Recording(torch.distributed.ProcessGroup):
        def getBackendName(self) -> str:  # torch's name
            return "recording"

        def shutdown(self) -> None:
            ended.append("shutdown")

        def abort(self) -> None:
            ended.append("abort")

    torch.distributed.Backend.register_backend(
        "recording", lambda store, rank, size, timeout: Recording(rank, size), devices=["cpu"]
    )
    for leave in (process_group.destroy_process_group, process_group.abort_process_group):
        torch.distributed.init_process_group("recording", store=HashStore(), rank=0, world_size=1)
        leave()
        assert not torch.distributed.is_initialized()
    assert ended == ["shutdown", "abort"]


ONE = ("cuda", "GPU-1")


@pytest.mark.cases(
    ([ONE, ("cuda", "GPU-2")], None),
    ([ONE, ONE], ("parallel.processes", 2)),
    ([ONE, ("cpu", "")], ("device.kind", "cuda, cpu")),
    ([ONE, None], ("device.kind", "gpu")),
    ([None, None], ("device.kind", "gpu")),
    ids=str,
)
def test_devices_that_do_not_fit_together_are_refused_on_all_ranks(devices, refused, ranks):
    assert ranks(2).call_on_all(refusal_of_devices, devices) == [refused] * 2


def refusal_of_devices(devices: list[tuple[str, str] | None]) -> tuple[str, object] | None:
    """In a rank: return the refusal of `devices`, a type and a UUID for each rank; None: a rank without a device."""
    rank_info = external_rank_info()
    device, refusal = devices[rank_info.rank], ConfigError("device.kind", "gpu", "there is none", "device=cpu")
    launcher = ExternalProcesses(rank_info, torch.device("cpu"), DDP(), None if device else refusal)
    if device:
        launcher._device = lambda: device
    try:
        with launcher.connect():
            return None
    except ConfigError as error:
        return error.key, error.got
