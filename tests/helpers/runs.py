"""Inspect the files of runs and the resources that running processes hold, and create inputs of runs."""

import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from PIL import Image

from helpers.command import processes_in
from helpers.compose import TINY_CPU
from helpers.events import MEASURED, load_events, scalar_curves

TWO_RANK_DDP = (*TINY_CPU, "parallel=ddp", "parallel.processes=2")


def only_run(cwd: Path) -> Path:
    [path] = cwd.glob("outputs/*/*")
    return path


def newest_checkpoint(run: Path) -> Path:
    return max(run.glob("checkpoints/step_????????"))


def checkpoint_tensors(run: Path) -> dict[str, torch.Tensor]:
    """The step, weights and optimizer state of the newest checkpoint of `run`, in a flat dict."""
    newest = newest_checkpoint(run)
    optimizer_state = torch.load(newest / "state.pt", weights_only=True)["optimizer"]
    flat = {f"{key} of {name}": tensor for name, state in optimizer_state.items() for key, tensor in state.items()}
    step = {"step": torch.tensor(int(newest.name[5:]))}
    return step | safetensors.torch.load_file(newest / "model.safetensors") | flat


def assert_checkpoint_bitwise_equal(run: Path, wanted: dict[str, torch.Tensor]) -> None:
    got = checkpoint_tensors(run)
    assert got.keys() == wanted.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, wanted[name]), name


def run_outcome(path: Path) -> dict[str, Any]:
    """All results of the run at `path`: weights, optimizer and random state, curves, images; no times, no memory."""
    newest = newest_checkpoint(path)
    state = torch.load(newest / "state.pt", weights_only=True)
    read = load_events(path)
    return {
        "name": newest.name,
        "weights": safetensors.torch.load_file(newest / "model.safetensors"),
        "state": {key: state[key] for key in ("optimizer", "precision", "metrics", "best", "window")},
        "local": torch.load(newest / "rank_0.pt", weights_only=True),
        "curves": scalar_curves(path, without=MEASURED),
        "images": {t: [(i.step, i.encoded_image_string) for i in read.Images(t)] for t in read.Tags()["images"]},
    }


def assert_bitwise_equal(got: Any, wanted: Any, where: str = "") -> None:
    """Fail unless nested values are equal, bit for bit."""
    assert type(got) is type(wanted), where
    if isinstance(got, dict):
        assert set(got) == set(wanted), where
        for key, value in got.items():
            assert_bitwise_equal(value, wanted[key], f"{where}/{key}")
    elif isinstance(got, torch.Tensor):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), where
        bits, wanted_bits = (t.contiguous().flatten().view(torch.uint8) for t in (got, wanted))
        assert bits.equal(wanted_bits), where
    elif isinstance(got, list | tuple):
        assert len(got) == len(wanted), where
        for index, value in enumerate(got):
            assert_bitwise_equal(value, wanted[index], f"{where}/{index}")
    else:
        assert got == wanted, where


def held_resources(cwd: Path) -> tuple[set[str], set[str]]:
    """Return the inodes of the listening sockets, and the files in /dev/shm, that the processes in `cwd` hold."""
    sockets, names = set(), set()
    for pid in processes_in(cwd):
        with suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    sockets |= set(re.findall(r"socket:\[(\d+)\]", str(file.readlink())))
            names |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
    return sockets & listening_inodes(), {name for name in names if Path(name).exists()}


def listening_addresses(cwd: Path) -> set[tuple[str, int]]:
    """Return the pairs (address, port) at which the processes in `cwd` accept TCP connections."""
    inodes = held_resources(cwd)[0]
    lines = "".join(Path(f"/proc/net/{family}").read_text() for family in ("tcp", "tcp6")).splitlines()
    found = [line.split()[1].split(":") for line in lines if line.split()[9] in inodes]
    return {(address, int(port, 16)) for address, port in found}


def listening_inodes() -> set[str]:
    lines = "".join(Path(f"/proc/net/{family}").read_text() for family in ("tcp", "tcp6")).splitlines()
    return {line.split()[9] for line in lines if line.split()[3] == "0A"}


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_images(root: Path) -> None:
    """Write a dataset with two classes of random images as PNG files."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 20), ("val", 4)):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(256, (12, 16, 3), generator=generator, dtype=torch.uint8)
                Image.frombytes("RGB", (16, 12), pixels.numpy().tobytes()).save(root / split / name / f"{i}.png")
