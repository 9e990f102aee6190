"""What runs of several processes hold while they go on, and the bits that they end with."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from pathlib import Path

import safetensors.torch
import torch

from helpers.command import processes_in
from helpers.compose import FAST

TWO = (*FAST, "parallel=ddp", "parallel.processes=2")


def held_in(cwd: Path) -> tuple[set[str], set[str]]:
    """(inodes of listening sockets, names in shared memory) that the processes in `cwd` have."""
    sockets, names = set(), set()
    for pid in processes_in(cwd):
        with suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    sockets |= set(re.findall(r"socket:\[(\d+)\]", str(file.readlink())))
            names |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
    return sockets & listening(), {name for name in names if Path(name).exists()}


def listening() -> set[str]:
    """Inodes of the TCP sockets of this machine that listen."""
    lines = "".join(Path(f"/proc/net/{family}").read_text() for family in ("tcp", "tcp6")).splitlines()
    return {line.split()[9] for line in lines if line.split()[3] == "0A"}


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of the newest checkpoint of `run`."""
    newest = max(run.glob("checkpoints/step_????????"))
    moments = torch.load(newest / "state.pt", weights_only=True)["optimizer"]
    flat = {f"{key} of {name}": tensor for name, state in moments.items() for key, tensor in state.items()}
    return (
        {"step": torch.tensor(int(newest.name[5:]))} | safetensors.torch.load_file(newest / "model.safetensors") | flat
    )


def assert_bitwise(run: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Refuse a run that ended elsewhere."""
    got = weights(run)
    assert got.keys() == wanted.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, wanted[name]), name


def free_port() -> int:
    """A port that nothing listened at a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
