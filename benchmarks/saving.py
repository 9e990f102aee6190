"""The cost of saving a checkpoint of ResNet50 (205 MB with momentum) every ten steps, compared with saving none.

`python -m benchmarks.saving`: 128×128, batch size 16, channels_last, float32, on a CPU. It also reports the time for
which a save pauses the training, the time until the checkpoint is committed, and their ratio.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time

import torch

from benchmarks.measure import interleave, print_value, report, write
from benchmarks.overhead import run
from runner.state import State

BATCH, WARMUP, STEPS = 16, 4, 45
EVERY = {"never": 0, "every ten steps": 10}
GOALS = {("every ten steps", "never"): 0.97}
MOST_PAUSE = 0.15
"""The goal for the pause, as a share of the time until the checkpoint is committed."""


class WriteTimes(logging.Handler):
    """A log handler that collects how many seconds it took to write each checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "to write" in record.msg and isinstance(record.args, tuple):
            self.seconds.append(float(str(record.args[1])))


def measure(name: str) -> float:
    """Return the images per second of one run. If the run saves checkpoints, also print how long a save takes.

    Three medians over the saves are printed: the seconds for which a save pauses the training, the seconds until the
    checkpoint is written, and the ratio of the two.

    Args:
        name: key of `EVERY`; the value of this key is the number of steps between saves, or 0 for no saves.
    """
    pauses: list[float] = []
    save, writes = State.save, WriteTimes()
    logging.getLogger("runner.storage.checkpoint").addHandler(writes)

    def timed(self: State) -> None:
        since = time.perf_counter()
        save(self)
        pauses.append(time.perf_counter() - since)

    State.save = timed
    options = ["model=resnet50", "data=synthetic", "data.size=128", f"data.num_samples={BATCH * 4}", "device=cpu"]
    options += [f"batch_size={BATCH}", "schedule=constant", "optimizer.lr=0.01", "log_every=5", "eval_every=0"]
    options += [f"steps={STEPS}", f"save_every={EVERY[name]}"]
    rate = BATCH * run(options, WARMUP)
    if EVERY[name]:
        pause, whole = pauses[:-1], [p + w for p, w in zip(pauses, writes.seconds, strict=True)][:-1]
        print_value("pause s", statistics.median(pause))
        print_value("pause and write s", statistics.median(whole))
        print_value("share", statistics.median(a / b for a, b in zip(pause, whole, strict=True)))
    return rate


def main() -> None:
    """Run the benchmark: compare runs with and without checkpoints, print the result, and write it.

    With `--run NAME`, only measure the run `NAME` of `EVERY` in this process, and print its images per second.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--run", choices=EVERY)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    if arguments.run:
        print(measure(arguments.run))
        return
    rates = interleave("benchmarks.saving", list(EVERY), arguments.repeats)
    table = report(f"ResNet50 on the CPU, 128×128, batch {BATCH}, checkpoints", "images/s", rates, GOALS)
    share = statistics.median(rates.beside["share"]["every ten steps"])
    print(f"  pause / whole: {share:.3f}, goal {MOST_PAUSE}: {'reached' if share <= MOST_PAUSE else 'MISSED'}")
    write("saving", [table], f"python -m benchmarks.saving --repeats {arguments.repeats}")


if __name__ == "__main__":
    main()
