"""Measures the CPU time of each part of a training step other than the forward pass, the backward pass and the update.

`python -m benchmarks.step_costs [--rounds 1000]`. One run trains the small network of `benchmarks.overhead`. A round
has 10 unchanged steps and, for each part of the loop, 10 steps in which the part is replaced by a no-op. The order is
random in each round. The cost of a part in a round is the time of an unchanged step minus the time of a step without
the part, in microseconds. The result is the median cost over all rounds. All times are CPU times of the training
thread, because other programs on the machine affect CPU time less than wall-clock time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import cross_entropy

from benchmarks.measure import write
from runner import training
from runner.batching import Step
from runner.precision import _drop_gradients
from runner.state import State
from runner.tracking.metrics import Measured

STEPS = 10
"""Steps of one measurement, the last of which logs."""

OPTIONS = (
    *("model=tiny", "data.size=8", "data.crop=0", "batch_size=64", "schedule=constant", "optimizer.lr=0.05"),
    *("device=cpu", "device.threads=1", f"log_every={STEPS}", "eval_every=0", "save_every=0"),
)
Part = list[tuple[Any, str, Any]]
"""The attributes that are replaced while a part is measured, as arguments of `patch.object`."""


def nothing(*_: Any, **__: Any) -> None:
    pass


class Batches:
    """An iterator over batches, which repeats the last batch while `stands` is true."""

    def __init__(self, batches: Iterator[Any]):
        self._batches, self.last, self.stands = batches, None, False

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if not self.stands:
            self.last = next(self._batches)
        return self.last


def parts(state: State, batches: Batches) -> dict[str, Part]:
    """Return the parts of the loop by name, each with its replacements."""
    session, run = state.session, state.session.run
    ones, null = torch.ones(2048, len(run.workload.metrics) - 1), nullcontext()
    found: dict[str, Part] = {
        "batch: gather 64 samples": [(batches, "stands", True)],
        "metrics: loss and accuracy of the batch": [
            (run.workload, "sample_metrics", lambda _, targets: ones[: len(targets)])
        ],
        "metrics: keep the sums of each step": [
            (state.metric_buffer, "add", nothing),
            (state.metric_buffer, "end_step", nothing),
        ],
        "section timer": [(training.timer, "section", lambda _: null)],
        "step timer": [(state.step_timer, "lap", nothing), (state.step_timer, "rates", lambda _: {})],
        "learning rate": [(run.schedule, "set_lr", nothing)],
        "moving average, target network, skipped updates": [
            (state.average, "update", nothing),
            (run.workload, "after_step", nothing),
            (run.precision, "num_skipped", lambda: 0),
        ],
        "stop signal, stop rules, background writes, profiler": [
            (session.collectives, "any_rank", nothing),
            (state.stopping, "out_of_time", nothing),
            (state.step_timer, "elapsed", lambda: 0.0),
            (state.checkpoints, "check", nothing),
            (run.profiler, "after_step", nothing),
        ],
        f"log (one in {STEPS} steps)": [(training, "log_training", nothing)],
    }
    everything = [each for part in found.values() for each in part]

    def bare(state: State, batches: Iterator[Any], step: Step, log_due: bool) -> None:
        batch = next(batches)
        cross_entropy(state.model(batch.inputs), batch.targets).backward()
        state.optimizer.step()
        _drop_gradients(state.optimizer)
        state.step = step.number

    return found | {"all of these, and the rest of train_step": [*everything, (training, "train_step", bare)]}


def measured(rounds: int) -> dict[str, list[float]]:
    """Return the CPU time of a step in microseconds in each round, by the name of the part that is left out."""
    seconds: dict[str, list[float]] = {}
    queue: list[str] = []
    now: dict[str, Any] = {"name": "", "began": 0.0, "parts": {}, "stack": ExitStack()}
    initial_state, step_done = training.prepare, training.Progress.step

    def prepare(*arguments: Any, **options: Any) -> State:
        state = initial_state(*arguments, **options)
        workload = state.session.run.workload
        own = workload.batches

        def batches(*given: Any) -> Batches:
            found = Batches(own(*given))
            now["parts"] = {"": [], **parts(state, found)}
            return found

        workload.batches = batches  # pyright: ignore[reportAttributeAccessIssue]
        return state

    def done(self: training.Progress, step: int, measured: Measured) -> None:
        step_done(self, step, measured)
        if step % STEPS:
            return
        spent = time.thread_time() - now["began"]
        if step > 10 * STEPS:
            seconds.setdefault(now["name"], []).append(spent / STEPS * 1e6)
        now["stack"].close()
        if not queue:
            queue.extend(random.sample(sorted(now["parts"]), len(now["parts"])))
        now["name"] = queue.pop() if step >= 10 * STEPS else ""
        now["stack"] = ExitStack()
        for target, name, other in now["parts"][now["name"]]:
            now["stack"].enter_context(patch.object(target, name, other))
        now["began"] = time.thread_time()

    # The last step, with the final evaluation and checkpoint, is not part of a measurement.
    count = STEPS * (10 + rounds * 11) + 1
    with patch.object(training, "prepare", prepare), patch.object(training.Progress, "step", done):
        with tempfile.TemporaryDirectory() as root:
            from runner.commands.train import main as command

            with patch.object(sys, "argv", ["runner", *OPTIONS, f"steps={count}", f"output_root={root}"]):
                if command():
                    raise SystemExit(1)
    return seconds


def main() -> None:
    """Measure all parts, print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    rounds = parser.parse_args().rounds
    if rounds < 2:
        parser.error("--rounds: at least 2 are needed for the uncertainty")
    torch.set_num_threads(1)
    random.seed(0)
    seconds = measured(rounds)
    whole = seconds.pop("")
    print(f"a step takes {statistics.median(whole):.0f} µs of CPU time")
    rows = []
    for name, values in seconds.items():
        saved = [a - b for a, b in zip(whole, values, strict=False)]
        low, cost, high = statistics.quantiles(saved, n=4)
        error = 1.2533 * (high - low) / 1.349 / len(saved) ** 0.5
        rows.append({"part": name, "microseconds": cost, "error": error, "rounds": len(saved)})
        print(f"  {name:<56} {cost:6.1f} ± {error:.1f} µs")
    table = {"title": "what a step costs beyond forward, backward and update", "unit": "µs", "rows": rows}
    table["step"] = statistics.median(whole)
    write("step_costs", [table], f"python -m benchmarks.step_costs --rounds {rounds}")


if __name__ == "__main__":
    main()
