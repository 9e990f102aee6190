"""ResNet50 in two pipeline stages, compared with one process, with a hand-written loop and with a theoretical bound.

`python -m benchmarks.pipeline [--precision bf16]` trains with images of 128×128, a global batch size of 48 and
channels_last, on a CPU with one thread per process. A rate is computed from the median step time. For each pipeline,
the benchmark also reports the fraction of the theoretical bound that was reached. This fraction is the minimum step
time that the measured times of the stages allow, divided by the actual step time.
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
from typing import Any

import torch

from benchmarks.measure import command, interleave, points, print_value, report, result, write

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
        line += [f"steps={STEPS}", "schedule=constant", "optimizer.lr=0.01", "log_every=1", "eval_every=0"]
        line += ["save_every=0", "keep=0"]
        with command([*line, "device=cpu", "device.threads=1"]) as directory:
            bubbles, bounds = (points(directory, f"pipeline/{tag}") for tag in ("bubble", "bubble_bound"))
            # The busy time is the same in a step and its bound: the busy fractions have the ratio of the times.
            reached = [(1 - bubble) / (1 - bound) for (_, bubble), (_, bound) in zip(bubbles, bounds, strict=True)]
            if reached:
                print_value("of its bound:", statistics.median(reached[1:]))
            return BATCH / result(directory)["step_seconds"]["median"]

    return rate


def by_hand(precision: str) -> float:
    """Return images per second of `torch.distributed.pipelining` in a hand-written loop with the same settings."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "seconds.json")
        torch.multiprocessing.spawn(_rank, (precision, str(path), f"file://{scratch}/store"), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
        return BATCH / statistics.median(json.loads(path.read_text())[1:])


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


def _rank(rank: int, precision: str, path: str, init_method: str) -> None:
    from torch.distributed import pipelining
    from torchvision.models import resnet50

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
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
    if rank == 0:
        Path(path).write_text(json.dumps(seconds))
    torch.distributed.destroy_process_group()


def _pipeline(schedule: str, split: int, cuts: str = "auto") -> Callable[[str], float]:
    options = [f"parallel.schedule={schedule}", f"parallel.split_size={split}", f"parallel.cuts={cuts}"]
    return with_runner("parallel=pipeline", *options)


CONTENDERS: dict[str, Callable[[str], float]] = {
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", choices=tuple(GOALS), default="32")
    parser.add_argument("--run", choices=CONTENDERS)
    arguments = parser.parse_args()
    if arguments.run:
        print(CONTENDERS[arguments.run](arguments.precision))
        return
    passed = ["--precision", arguments.precision]
    rates = interleave("benchmarks.pipeline", list(CONTENDERS), arguments.repeats, passed)
    best = max(_SPLITS, key=lambda name: statistics.median(rates[name]))
    cut = max(_HAND_CUTS, key=lambda name: statistics.median(rates[name]))
    goals = {
        (best, "single"): GOALS[arguments.precision],
        (f"gpipe, split {SPLIT}", cut): 1.0,
        (f"cut at {CUT}", "by hand"): 0.97,
    }
    title = f"ResNet50, {SIZE}×{SIZE}, batch {BATCH}, precision {arguments.precision}, two stages of one thread each"
    table = report(title, "images/s", rates, goals)
    name = "pipeline" if arguments.precision == "32" else f"pipeline_{arguments.precision}"
    write(name, [table], f"python -m benchmarks.pipeline {' '.join(passed)} --repeats {arguments.repeats}")


if __name__ == "__main__":
    main()
