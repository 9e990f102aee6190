"""The overhead of `parallel=ddp` on a small network, compared with a hand-written loop of two processes.

`python -m benchmarks.ddp_overhead [--repeats 7] [--steps 2000]`. The network, the digits and the optimizer are those of
`benchmarks.overhead`, in channels_last. The global batch size is 64, and each of the two processes has one thread. The
hand-written loop uses `DistributedDataParallel`, a `DataLoader` and a `DistributedSampler`. Only the runner logs (every
50 steps), shows its progress, and adds up the loss and the accuracy of every step. The rate in steps per second is 1
divided by the median duration of a step.
"""

import statistics
import time

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks import overhead
from benchmarks.measure import Contenders, command, in_two_processes, measured, parser, passed, report, result, write

GOALS = {("runner", "by hand"): 0.95}
_WARMUP = 100


def with_runner(steps: int) -> float:
    """Return steps per second of a run with two processes."""
    options = ["parallel=ddp", "parallel.processes=2", "model=tiny", "data.size=8", "data.crop=0", "schedule=constant"]
    options += ["optimizer.lr=0.05", f"batch_size={overhead.BATCH}", f"steps={steps}", "log_every=50"]
    with command(options) as directory:
        return 1 / result(directory)["step_seconds"]["median"]


def by_hand(steps: int) -> float:
    """Return steps per second of the loop in torch's tutorial, with the same settings."""
    return 1 / statistics.median(in_two_processes(_rank, steps)[_WARMUP:])


def _rank(rank: int, steps: int) -> list[float]:
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
    return seconds


CONTENDERS: Contenders = {"runner": with_runner, "by hand": by_hand}


def main() -> None:
    """Measure both contenders, or with `--run` a single one in this process."""
    arguments = parser(__doc__, CONTENDERS, repeats=7, steps=2000).parse_args()
    rates = measured("ddp_overhead", CONTENDERS, arguments, arguments.steps)
    table = report("small network on digits, two processes of one thread", "steps/s", rates, GOALS)
    write("ddp_overhead", [table], passed(arguments))


if __name__ == "__main__":
    main()
