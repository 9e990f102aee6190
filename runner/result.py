"""The outcome of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from runner.system.console import CRASHED, DIVERGED, DONE, STOPPED

EXIT_CODES = {"done": DONE, "crashed": CRASHED, "diverged": DIVERGED, "stopped": STOPPED}
"""The exit code for each status of a result."""

MEASURED = {"time/samples_per_second": "max", "time/step_seconds": "min", "time/tflops": "max", "memory/peak": "min"}
"""What a result has besides its metrics, by TensorBoard tag, and whether large or small values of it are better."""


@dataclass
class Result:
    """The outcome of a run, written to `result.json`.

    Args:
        status: `done`, `stopped` (by a signal or `stop.max_time`, after saving), `diverged` or `crashed`.
        steps: number of completed optimizer steps, including the steps before a resume.
        metrics: the latest training and evaluation metrics, by TensorBoard tag; NaN if one is not defined.
        best: the `metric`, the `value` and the `step` of the best evaluation; empty if none had a finite value.
        seconds: time in seconds from the first step of this session to the end of the session.
        samples_per_second: training throughput of all processes together, from the median step time.
        step_seconds: the `median` and the 90th percentile (`p90`) of the times of the iterations of this session, in
            seconds, without the first ones (see `StepTimer`). Empty if there was none.
        tflops: 10¹² floating-point operations per second of all processes together, from the median step time: of
            matrix products, convolutions and attention, where a backward pass counts as two forward passes. 0 if they
            are not known.
        peak_share: the share of `tflops` in what the accelerators reach in large matrix products, which are measured at
            the end; None on a CPU.
        peak_memory_bytes: peak memory usage of rank 0 on its GPU or, without a GPU, in host memory.
        world_size: number of processes.
        config_hash: see `runner.run.config_hash`.
        notes: additional results of the workload, such as the number of skipped files.
        error: the reason why the run diverged or crashed; empty if it did neither.
        stopped_by: the rule of `stop` that ended the run before its last step, in words; empty if no rule did.
        directory: the run directory; None in the result that a rank returns, and if the directory was removed or
            renamed. Neither `directory` nor `cause` is written to `result.json`.
        cause: the exception that crashed the run; None if the run has not crashed.
    """

    status: str
    steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    samples_per_second: float = 0.0
    step_seconds: dict[str, float] = field(default_factory=dict)
    tflops: float = 0.0
    peak_share: float | None = None
    peak_memory_bytes: int = 0
    world_size: int = 1
    config_hash: str = ""
    notes: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    stopped_by: str = ""
    directory: Path | None = field(default=None, init=False, compare=False)
    cause: BaseException | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]

    @property
    def evaluation(self) -> dict[str, float]:
        """The metrics of the latest evaluation, by TensorBoard tag."""
        return {tag: value for tag, value in self.metrics.items() if tag.startswith("eval/")}

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values, for JSON, without `directory` and `cause`; None for what is not finite."""
        metrics = {tag: value if math.isfinite(value) else None for tag, value in self.metrics.items()}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init} | {"metrics": metrics}


def measured(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics in the content of a `result.json`, and what is `MEASURED` over the whole session, by tag."""
    step_seconds = result.get("step_seconds", {}).get("median")
    numbers = result.get("samples_per_second"), step_seconds, result.get("tflops"), result.get("peak_memory_bytes")
    return {tag: number for tag, number in zip(MEASURED, numbers, strict=True) if number} | result.get("metrics", {})


class CrashedError(Exception):
    """Raised when an error has ended a run; `__cause__` is that error, and `result` is the run's result so far."""

    def __init__(self, result: Result):
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        return self.result.error
