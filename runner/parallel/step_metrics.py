"""The metric sums of training steps on one process, for each phase of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from runner.parallel.session import Session
from runner.storage.value_checks import TensorSpec
from runner.tracking.metrics import BatchSums, MetricBuffer
from runner.workloads.phases import Phase


class StepMetrics:
    """The metric sums since the last log, in a `MetricBuffer` for each of the `phases`."""

    def __init__(self, phases: Sequence[Phase], session: Session):
        self._session, names = session, session.workload.train_metrics
        self._buffers = {each.name: MetricBuffer(each.prefixed(names), session.device) for each in phases}
        self.has_own_count: dict[str, bool] = {}
        """Whether the loss of a phase is a mean over something else than samples, once all ranks have agreed on it."""

    def add(self, phase: Phase, sums: BatchSums | None) -> None:
        """Add the metric sums of a micro-batch, if this rank has some."""
        self._buffers[phase.name].add(sums)

    def end_phase(self, phase: Phase, number: int) -> BatchSums:
        """End the sums of `phase` of step `number`, and return those of this process.

        Called on every rank, which learns in the first step what the loss returns, if another rank computes it.

        Raises:
            ConfigError: if the loss returns something else than before.
        """
        buffer = self._buffers[phase.name]
        if phase.name not in self.has_own_count:
            for form in self._session.collectives.all_gather(self._session.workload.loss_form):
                if form is not None:
                    names, self.has_own_count[phase.name] = form
                    buffer.names = phase.prefixed(names)
        return buffer.end_step(number)

    def peek(self) -> dict[str, torch.Tensor]:
        """Return the sums of each phase by name, as `MetricBuffer.peek`; called on every rank.

        Raises:
            DivergedError: if one is not finite.
        """
        return {phase: each.peek(self._session.collectives.all_reduce) for phase, each in self._buffers.items()}

    def flush(self) -> dict[str, float]:
        """Return the mean of each metric by its tag, and forget the sums; called on every rank.

        The loss of several phases is the sum of theirs, if each was due.

        Raises:
            DivergedError: if a metric is not finite.
        """
        means: dict[str, float] = {}
        for buffer in self._buffers.values():
            means |= buffer.flush(self._session.collectives.all_reduce)
        losses = [each.names[0] for each in self._buffers.values()]
        total = {"loss": sum(means[name] for name in losses)} if {*losses} <= means.keys() else {}
        return {f"train/{name}": value for name, value in (total | means).items()}

    # For checkpoints

    def window(self) -> Any:
        """Return what `peek` does; of the only phase, its sums."""
        rows = self.peek()
        return rows.get("", rows)

    def form(self) -> Any:
        """Return the form of `window`, as in `check_like`."""
        known = self._session.workload.loss_form
        spec = TensorSpec(torch.float64, (None, 2, None if known is None else len(known[0])))
        return spec if "" in self._buffers else {str: spec}

    def load(self, window: Any, step: int) -> None:
        """Take this rank's share of the `window` in the checkpoint of `step`, whose phases may be others."""
        for name, rows in (window if isinstance(window, dict) else {"": window}).items():
            if name in self._buffers:
                self._buffers[name].load(self._session.collectives.local_share(rows), step)
