"""Two processes compared with one, and the runner's parallel modes compared with hand-written loops.

`python -m benchmarks.parallel`: ResNet50 at 128×128, global batch size 48, float32, channels_last (fsdp: contiguous
weights), one thread per process, on a CPU. The rate is that of the median step; the memory is the peak of rank 0. No
step is logged, as in the hand-written loops: a logged step also computes the gradient norm (fsdp: 15 ms). The time from
the command to the first step is measured, too.
"""

import statistics
import time
from typing import Any

import torch

from benchmarks import measure

BATCH, SIZE, STEPS, WARMUP = 48, 128, 10, 2
GOALS = {("ddp", "single"): 1.7, ("ddp", "ddp-by-hand"): 0.97, ("fsdp", "fsdp-by-hand"): 0.95}
FIRST_STEP_GOAL = 8.0


def with_runner(mode: str) -> float:
    """Return images per second of a run."""
    options = [f"parallel={mode}", "model=resnet50", "data=synthetic", f"data.size={SIZE}", "data.num_classes=1000"]
    options += [f"data.num_samples={4 * BATCH}", f"batch_size={BATCH}", f"steps={STEPS}", "schedule=constant"]
    options += ["optimizer.lr=0.01", "log_every=100"]
    with measure.command(options) as directory:
        measured = measure.result(directory)
    measure.print_value("peak MiB of rank 0:", measured["peak_memory_bytes"] / 2**20)
    return BATCH / measured["step_seconds"]["median"]


def first_step() -> float:
    """Train one step on the digits with two processes.

    Returns:
        The seconds from the start of the command until the step is logged.
    """
    began = time.time()
    with measure.command(["parallel=ddp", "steps=1", "log_every=1"]) as directory:
        return measure.points(directory, "train/loss")[0][0] - began


def by_hand(mode: str) -> float:
    """Return images per second of a loop as in torch's tutorials, with the same settings as in `with_runner`."""
    return BATCH / statistics.median(measure.in_two_processes(_rank, mode)[WARMUP:])


def _rank(_: int, mode: str) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchvision.models import resnet50
    from torchvision.models.resnet import Bottleneck

    torch.manual_seed(0)
    model = resnet50(weights=None)
    if mode == "ddp":
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for block in (module for module in model.modules() if isinstance(module, Bottleneck)):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        wrapped = model
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9, fused=mode == "ddp")
    local_batch = BATCH // 2
    images, labels = torch.randn(4 * local_batch, 3, SIZE, SIZE), torch.randint(1000, (4 * local_batch,))
    images = images.to(memory_format=torch.channels_last)
    seconds = []
    for step in range(STEPS):
        began = time.perf_counter()
        rows = torch.arange(local_batch) + step % 4 * local_batch
        loss = torch.nn.functional.cross_entropy(wrapped(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return seconds


CONTENDERS: measure.Contenders = {
    "single": lambda: with_runner("single"),
    "ddp": lambda: with_runner("ddp"),
    "ddp-by-hand": lambda: by_hand("ddp"),
    "fsdp": lambda: with_runner("fsdp"),
    "fsdp-by-hand": lambda: by_hand("fsdp"),
}


def first_steps(repeats: int) -> dict[str, Any]:
    """Repeat `first_step`, and return a table."""
    seconds = [first_step() for _ in range(repeats)]
    median = statistics.median(seconds)
    verdict = "reached" if median <= FIRST_STEP_GOAL else "MISSED"
    print(f"\nfirst step of two processes: median {median:.1f} s ({min(seconds):.1f} – {max(seconds):.1f}): {verdict}")
    return {"title": "from the command to the first step, ddp, two processes", "unit": "s", "seconds": seconds}


def main() -> None:
    """Measure all contenders, or with `--run` a single one in this process."""
    arguments = measure.parser(__doc__, CONTENDERS, repeats=5).parse_args()
    rates = measure.measured("parallel", CONTENDERS, arguments)
    table = measure.report(
        f"ResNet50, {SIZE}×{SIZE}, batch {BATCH}, float32, one thread a process", "images/s", rates, GOALS
    )
    measure.write("parallel", [table, first_steps(arguments.repeats)], measure.passed(arguments))


if __name__ == "__main__":
    main()
