"""The overhead of `parallel=ddp` on a small network, compared with a hand-written loop of two processes.

`python -m benchmarks.ddp_overhead [--repeats 7] [--steps 2000]`. The network, the digits and the optimizer are those of
`benchmarks.overhead`, in channels_last. The global batch size is 64, and each of the two processes has one thread. The
hand-written loop uses `DistributedDataParallel`, a `DataLoader` and a `DistributedSampler`. Only the runner logs (every
50 steps), shows its progress, and adds up the loss and the accuracy of every step. The rate in steps per second is 1
divided by the median duration of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks import overhead
from benchmarks.measure import command, interleave, report, result, write

GOALS = {("runner", "by hand"): 0.95}
_WARMUP = 100


def with_runner(steps: int) -> float:
    """Return steps per second of a run with two processes."""
    options = ["parallel=ddp", "parallel.processes=2", "model=tiny", "data.size=8", "data.crop=0", "schedule=constant"]
    options += ["optimizer.lr=0.05", f"batch_size={overhead.BATCH}", f"steps={steps}", "eval_every=0", "save_every=0"]
    with command([*options, "log_every=50", "keep=0", "device=cpu", "device.threads=1"]) as directory:
        return 1 / result(directory)["step_seconds"]["median"]


def by_hand(steps: int) -> float:
    """Return steps per second of the loop in torch's tutorial, with the same settings."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "seconds.json")
        torch.multiprocessing.spawn(_rank, (steps, str(path), f"file://{scratch}/store"), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
        return 1 / statistics.median(json.loads(path.read_text())[_WARMUP:])


def _rank(rank: int, steps: int, path: str, init_method: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    overhead.CHANNELS_LAST = True
    model = torch.nn.parallel.DistributedDataParallel(overhead.network(), gradient_as_bucket_view=True)
    optimizer = overhead.sgd(model)
    samples = overhead.digits()
    data = TensorDataset(samples.inputs, samples.targets)
    sampler = DistributedSampler(data, num_replicas=2, rank=rank, drop_last=True)
    batches = overhead.endless(DataLoader(data, batch_size=overhead.BATCH // 2, sampler=sampler, drop_last=True))
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        inputs, targets = next(batches)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        Path(path).write_text(json.dumps(seconds))
    torch.distributed.destroy_process_group()


CONTENDERS: dict[str, Callable[[int], float]] = {"runner": with_runner, "by hand": by_hand}


def main() -> None:
    """Measure both contenders, or with `--run` a single one in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--run", choices=CONTENDERS)
    arguments = parser.parse_args()
    if arguments.run:
        print(CONTENDERS[arguments.run](arguments.steps))
        return
    passed = ["--steps", str(arguments.steps)]
    rates = interleave("benchmarks.ddp_overhead", list(CONTENDERS), arguments.repeats, passed)
    table = report("small network on digits, two processes of one thread", "steps/s", rates, GOALS)
    line = f"python -m benchmarks.ddp_overhead {' '.join(passed)} --repeats {arguments.repeats}"
    write("ddp_overhead", [table], line)


if __name__ == "__main__":
    main()
