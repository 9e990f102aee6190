"""The contract between a workload and the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from runner.data.base import Batch
from runner.tracking.metrics import MetricSums

if TYPE_CHECKING:
    import torch

    from runner.batching import Plan


@dataclass
class Workload(ABC):
    """A learning problem. It knows no mode, no rank and no precision.

    What is to be moved, sharded and saved with the model (a target network) is a child of the model.
    """

    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    """The names of the training metrics; the first is the loss."""

    best: ClassVar[tuple[str, str]] = ("loss", "min")
    """The evaluation metric by which the best checkpoint is chosen, and whether it should be `min` or `max`."""

    may_change_on_resume: ClassVar[tuple[str, ...]] = ()
    """Options that change how the work is done, not what is computed."""

    def prepare(self) -> None:
        """Load or find the data.

        Raises:
            ConfigError: with the key from the root, when it is not there.
        """

    def steps_per_epoch(self, batch_size: int) -> float | None:
        """Optimizer steps that see every sample once; None where there are no epochs."""
        return None

    def num_steps(self, batch_size: int) -> int | None:
        """Optimizer steps of a whole run, where the workload's own options say; None: `epochs` or `steps` do."""
        return None

    @abstractmethod
    def build_model(self) -> torch.nn.Module:
        """The model with fresh weights, on the CPU, drawn from torch's global generator."""

    @abstractmethod
    def batches(self, model: torch.nn.Module, plan: Plan, after_step: int, device: torch.device) -> Iterator[Any]:
        """This process's micro-batches of every step after `after_step`, in the order of `plan`, without end."""

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss of a micro-batch, a scalar, and its metric sums: float32 [len(metrics)], detached."""

    @abstractmethod
    def evaluate(
        self, infer: Callable[[torch.Tensor], torch.Tensor], shard: tuple[int, int], device: torch.device
    ) -> MetricSums:
        """Sums over part `shard` = (index, count) of the held-out data, each sample exactly once.

        Args:
            infer: the model's outputs for inputs on the device.
        """

    @abstractmethod
    def summarize(self, sums: MetricSums) -> dict[str, float]:
        """The evaluation's metrics from the sums of all ranks."""

    def vote(self, outputs: torch.Tensor) -> torch.Tensor:
        """The common outputs of several models: [n, …] from [num_models, n, …]."""
        return outputs.mean(0)

    def images(self, sums: MetricSums) -> dict[str, torch.Tensor]:
        """Pictures of the last evaluation, by TensorBoard tag.

        Returns:
            RGB images, uint8 [3, height, width], and films, uint8 [frames, 3, height, width].
        """
        return {}

    def check_plan(self, plan: Plan) -> None:
        """Refuse a number of processes over which this workload cannot be divided.

        Raises:
            ConfigError: with the key from the root.
        """

    def after_step(self, model: torch.nn.Module, step: int) -> None:
        """Whatever follows this process's update of `step` (moving a target network)."""

    def describe(self) -> dict[str, str]:
        """What is learned from, for the first lines of a run: {"data": "Digits, 1,438 training samples, …"}."""
        return {}

    def scalars(self) -> dict[str, float]:
        """What to log beside the metrics (`episode/return`)."""
        return {}

    def extra_results(self) -> dict[str, Any]:
        """What `result.json` should say of this run beside the metrics (images that were skipped)."""
        return {}

    def diverged_batch(self, plan: Plan, step: int, device: torch.device) -> dict[str, torch.Tensor] | None:
        """This process's batch of `step` again, to be saved when its loss was not finite; None where it is gone."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs beside the model: plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""


@dataclass
class SupervisedWorkload(Workload):
    """A workload whose loss is `criterion(model(inputs), targets)`: its network can be split into stages.

    Its batches have `inputs` and `targets` (`runner.data.base.Batch`).
    """

    @abstractmethod
    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of outputs [n, …], a scalar."""

    @abstractmethod
    def metric_sums(self, outputs: torch.Tensor, targets: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """The metric sums of a micro-batch whose mean loss is `loss`: float32 [len(metrics)], detached."""

    def loss_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss and the metric sums of a micro-batch, from the network's outputs."""
        loss = self.criterion(outputs, targets)
        return loss, self.metric_sums(outputs, targets, loss)

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loss_of(model(batch.inputs), batch.targets)
