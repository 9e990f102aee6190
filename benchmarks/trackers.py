"""The cost of a second tracker in the training loop, and of starting a run from Python.

`python -m benchmarks.trackers [--repeats 15] [--steps 6000]` trains the small network of `benchmarks.overhead` with one
thread, and logs every 50 steps. It compares three contenders:

- `tensorboard`: the command, which writes to TensorBoard;
- `two trackers`: the command, which writes to TensorBoard and to a CSV file;
- `from Python`: `runner.train`, which writes to TensorBoard.

The time of a single log is also measured, for TensorBoard and for the CSV file.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import runner
from benchmarks import overhead
from benchmarks.measure import interleave, report, write
from runner.tracking.base import Tracker
from runner.tracking.csv_file import CsvFile
from runner.tracking.tensorboard import TensorBoard

GOALS = {("two trackers", "tensorboard"): 0.99, ("from Python", "tensorboard"): 0.99}


def tensorboard(steps: int) -> float:
    """Return steps per second of the command with its default tracker."""
    return overhead.with_runner(steps)


def two_trackers(steps: int) -> float:
    """Return steps per second with a CSV file in addition to TensorBoard."""
    return overhead.with_runner(steps, "tracking=several", "tracking.names=[tensorboard,csv]")


def from_python(steps: int) -> float:
    """Return steps per second of `runner.train`."""
    return overhead.with_runner(steps, start=lambda options: runner.train(options).status != "done")


CONTENDERS: dict[str, Callable[[int], float]] = {
    "tensorboard": tensorboard,
    "two trackers": two_trackers,
    "from Python": from_python,
}


def log_microseconds(tracker: Tracker, logs: int = 2000) -> float:
    """Return the time to log nine scalars in one call, as the training loop does, in microseconds."""
    tags = ["train/loss", "train/accuracy", "train/gradient_norm", "lr", "epoch"]
    tags += ["time/samples_per_second", "time/step_seconds", "time/data_share", "memory/peak"]
    with tempfile.TemporaryDirectory() as directory:
        tracker.open(Path(directory), 1)
        began = time.perf_counter()
        for step in range(1, logs + 1):
            tracker.scalars(dict.fromkeys(tags, 0.1), step)
        seconds = time.perf_counter() - began
        tracker.close(True)
    return 1e6 * seconds / logs


def main() -> None:
    """Measure all contenders, or with `--run` a single one in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--run", choices=CONTENDERS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.run:
        print(CONTENDERS[arguments.run](arguments.steps))
        return
    passed = ["--steps", str(arguments.steps)]
    rates = interleave("benchmarks.trackers", list(CONTENDERS), arguments.repeats, passed)
    for tracker in (TensorBoard(), CsvFile()):
        times = sorted(log_microseconds(tracker) for _ in range(5))
        print(f"  a log of {type(tracker).__name__}: {times[2]:.0f} µs ({times[0]:.0f} – {times[-1]:.0f})")
    table = report("small network on digits, one thread, logs every 50 steps", "steps/s", rates, GOALS)
    write("trackers", [table], " ".join(["python -m benchmarks.trackers", *passed, f"--repeats {arguments.repeats}"]))


if __name__ == "__main__":
    main()
