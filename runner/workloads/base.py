"""The contract between a workload and the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from runner.batching import Plan

Sums = dict[str, "torch.Tensor"]
"""Metrics as sums and counts, which add up over batches and ranks; means are taken at the end."""


@dataclass
class Workload:
    """A learning problem. It knows no mode, no rank and no precision.

    A workload whose loss is `criterion(model(inputs), targets)` exposes that `criterion`, which is all that a pipeline
    needs. What is to be placed, sharded and saved with the model (a target network) is a child of the model.
    """

    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    """The names of the training sums; the first is the loss."""

    best: ClassVar[tuple[str, str]] = ("loss", "min")
    """Which evaluation metric says which checkpoint is best, and whether it should be `min` or `max`."""

    how: ClassVar[tuple[str, ...]] = ()
    """Options that change how the work is done, not what is computed: they may differ on a resume."""

    criterion: ClassVar[Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None] = None

    def prepare(self) -> None:
        """Load or find the data; raises `ConfigError` (keys from the root) when that cannot be."""

    def steps_per_epoch(self, batch_size: int) -> float | None:
        """Optimizer steps that see every sample once; None where there are no epochs."""
        return None

    def num_steps(self, batch_size: int) -> int | None:
        """Optimizer steps of a whole run, where the workload has its own measure of one; None: epochs are it."""
        return None

    def build_model(self) -> torch.nn.Module:
        """The model with fresh weights, on the CPU, drawn from torch's global generator."""
        raise NotImplementedError

    def batches(self, model: torch.nn.Module, plan: Plan, after_step: int, device: torch.device) -> Iterator[Any]:
        """This process's micro-batches of every step after `after_step`, in the order of `plan`, without end."""
        raise NotImplementedError

    def loss(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss over a micro-batch, and its sums: float32 [len(metrics)], detached, both on the device."""
        raise NotImplementedError

    def evaluate(
        self, infer: Callable[[torch.Tensor], torch.Tensor], shard: tuple[int, int], device: torch.device
    ) -> Sums:
        """Sums over part `shard` = (index, count) of the held-out data, each sample exactly once."""
        raise NotImplementedError

    def summarize(self, sums: Sums) -> dict[str, float]:
        """The evaluation's metrics from the sums of all ranks."""
        raise NotImplementedError

    def vote(self, outputs: torch.Tensor) -> torch.Tensor:
        """What several models say together: of outputs [num_models, n, …], [n, …]."""
        return outputs.mean(0)

    def pictures(self, sums: Sums) -> dict[str, torch.Tensor]:
        """What the last evaluation looks like, by TensorBoard tag.

        Returns:
            RGB images, uint8 [3, height, width], and films, uint8 [frames, 3, height, width].
        """
        return {}

    def check_plan(self, plan: Plan) -> None:
        """Refuse a number of processes that this workload's work cannot be dealt out to.

        Raises:
            ConfigError: with the key from the root.
        """

    def after_step(self, model: torch.nn.Module, step: int) -> None:
        """Whatever follows an update (a target network's)."""

    def scalars(self) -> dict[str, float]:
        """What to log beside the metrics (`episode/return`)."""
        return {}

    def notes(self) -> dict[str, Any]:
        """What `result.json` must tell of this run (images that were skipped)."""
        return {}

    def offending(self, plan: Plan, step: int, device: torch.device) -> Any:
        """The batches of `step` again, to be saved when its loss was not finite; None where they are gone."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs beside the model: plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state_dict()`'s."""
