"""ResNet50 in two pipeline stages, compared with one process, with a hand-written loop and with a theoretical bound.

`python -m benchmarks.pipeline [--precision bf16]` trains with images of 128×128, a global batch size of 48 and
channels_last, on a CPU with one thread per process. A rate is computed from the median step time. For each pipeline,
the benchmark also reports the fraction of the theoretical bound that was reached. This fraction is the minimum step
time that the measured times of the stages allow, divided by the actual step time.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import measure

BATCH, SIZE, STEPS = 48, 128, 5
CUT, SPLIT = "layer3.1", 6
"""The first block of the second stage, and the micro-batch size, in the comparison with the hand-written loop."""


def with_runner(*options: str) -> Callable[[str], float]:
    """Return a function that trains a run with `options` in a given precision, and returns its images per second.

    If the run is a pipeline, the function also prints the fraction of the theoretical bound that the run has reached.
    """

    def rate(precision: str) -> float:
        line = [*options, f"precision={precision}", "model=resnet50", "data=synthetic", f"data.size={SIZE}"]
        line += [f"data.num_samples={4 * BATCH}", "data.holdout=8", "data.num_classes=1000", f"batch_size={BATCH}"]
        line += [f"steps={STEPS}", "schedule=constant", "optimizer.lr=0.01", "log_every=1"]
        with measure.command(line) as directory:
            bubbles, bounds = (measure.points(directory, f"pipeline/{tag}") for tag in ("bubble", "bubble_bound"))
            # The busy time is the same in a step and its bound: the busy fractions have the ratio of the times.
            reached = [(1 - bubble) / (1 - bound) for (_, bubble), (_, bound) in zip(bubbles, bounds, strict=True)]
            if reached:
                measure.print_value("of its bound:", statistics.median(reached[1:]))
            return BATCH / measure.result(directory)["step_seconds"]["median"]

    return rate


def by_hand(precision: str) -> float:
    """Return images per second of `torch.distributed.pipelining` in a hand-written loop with the same settings."""
    return BATCH / statistics.median(measure.in_two_processes(_rank, precision)[1:])


class _StageModule(torch.nn.Module):
    """Blocks of a network in channels_last; tensors between stages are contiguous, as torch requires for sending."""

    def __init__(self, blocks: list[torch.nn.Module], dtype: torch.dtype, is_first: bool):
        super().__init__()
        self.blocks, self.dtype, self.is_first = torch.nn.Sequential(*blocks), dtype, is_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_first:
            x = x.permute(0, 3, 1, 2)
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            x = self.blocks(x)
        return x.permute(0, 2, 3, 1).clone() if self.is_first else x  # torch cannot detach a view in place


def _rank(rank: int, precision: str) -> list[float]:
    from torch.distributed import pipelining
    from torchvision.models import resnet50

    torch.manual_seed(0)
    network = resnet50(weights=None)
    blocks: dict[str, Any] = {name: getattr(network, name) for name in ("conv1", "bn1", "relu", "maxpool")}
    for i in range(1, 5):
        blocks |= {f"layer{i}.{j}": block for j, block in enumerate(getattr(network, f"layer{i}"))}
    blocks |= {"avgpool": network.avgpool, "flatten": torch.nn.Flatten(), "fc": network.fc}
    cut = list(blocks).index(CUT)
    stage_blocks = list(blocks.values())[:cut] if rank == 0 else list(blocks.values())[cut:]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    module = _StageModule(stage_blocks, dtype, rank == 0)
    module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
    loss = torch.nn.functional.cross_entropy
    schedule = pipelining.ScheduleGPipe(stage, BATCH // SPLIT, loss_fn=lambda out, target: loss(out.float(), target))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, fused=True)
    images, labels = torch.randn(4 * BATCH, 3, SIZE, SIZE), torch.randint(1000, (4 * BATCH,))
    seconds = []
    for step in range(STEPS):
        began = time.perf_counter()
        rows = torch.arange(BATCH) + step % 4 * BATCH
        if rank == 0:
            schedule.step(images[rows])
        else:
            schedule.step(target=labels[rows])
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.barrier()  # waits for both stages, as the runner does after each step
        seconds.append(time.perf_counter() - began)
    return seconds


def _pipeline(schedule: str, split: int, cuts: str = "auto") -> Callable[[str], float]:
    options = [f"parallel.schedule={schedule}", f"parallel.split_size={split}", f"parallel.cuts={cuts}"]
    return with_runner("parallel=pipeline", *options)


CONTENDERS: measure.Contenders = {
    "single": with_runner("parallel=single"),
    **{f"gpipe, split {split}": _pipeline("gpipe", split) for split in (6, 8, 12)},
    **{f"{name}, split 6": _pipeline(name, 6) for name in ("1f1b", "interleaved_1f1b")},
    **{f"zero_bubble, split {split}": _pipeline("zero_bubble", split) for split in (6, 8, 12, 16)},
    **{f"cut at {cut}": _pipeline("gpipe", SPLIT, f"[{cut}]") for cut in ("layer2.3", "layer3.0", CUT)},
    "by hand": by_hand,
}
GOALS = {"32": 1.6, "bf16": 1.5}
"""How many times as fast as one process the fastest pipeline should be, by precision."""
_HAND_CUTS = [name for name in CONTENDERS if name.startswith("cut at")]
_SPLITS = [name for name in CONTENDERS if "split" in name]


def main() -> None:
    """Measure all contenders, or with `--run` a single one in this process."""
    options = measure.parser(__doc__, CONTENDERS, repeats=5)
    options.add_argument("--precision", choices=tuple(GOALS), default="32")
    arguments = options.parse_args()
    rates = measure.measured("pipeline", CONTENDERS, arguments, arguments.precision)
    best = max(_SPLITS, key=lambda name: statistics.median(rates[name]))
    cut = max(_HAND_CUTS, key=lambda name: statistics.median(rates[name]))
    goals = {
        (best, "single"): GOALS[arguments.precision],
        (f"gpipe, split {SPLIT}", cut): 1.0,
        (f"cut at {CUT}", "by hand"): 0.97,
    }
    title = f"ResNet50, {SIZE}×{SIZE}, batch {BATCH}, precision {arguments.precision}, two stages of one thread each"
    table = measure.report(title, "images/s", rates, goals)
    measure.write(
        "pipeline", [table], measure.passed(arguments), "" if arguments.precision == "32" else f"_{arguments.precision}"
    )


if __name__ == "__main__":
    main()
