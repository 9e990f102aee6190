"""The interface between a workload and the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from runner.config.errors import ConfigError
from runner.data.base import Batch
from runner.tracking.metrics import BatchSums, MetricSums, batch_sums

if TYPE_CHECKING:
    import torch

    from runner.batching import Plan


@dataclass
class Workload(ABC):
    """The base class of learning problems, which are independent of the parallel mode, the rank and the precision.

    Tensors that have to be moved, sharded and saved with the model, such as those of a target network, must be
    parameters or buffers of the model.
    """

    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    """The names of the training metrics; the first is the loss. A metric that is not finite ends the run."""

    best: ClassVar[tuple[str, str]] = ("loss", "min")
    """The evaluation metric that selects the best checkpoint, and whether the `min` or the `max` of it is best."""

    best_possible: ClassVar[Mapping[str, float]] = {}
    """The best value that an evaluation metric can have, such as 1 for an accuracy, of those that have one."""

    outputs_are_scores: ClassVar[bool] = False
    """Whether the prediction is the index of the largest output, as in classification and Q-learning."""

    may_change_on_resume: ClassVar[tuple[str, ...]] = ()
    """Options that may differ on resume: those that do not affect the training, and the length of the run."""

    split: str = field(default="", init=False)
    """The part of the data that is evaluated (see `prepare_evaluation`); empty in training, or without parts."""

    # -----------------------------------------------------------------------------------------------------------------
    # What is trained, and how long

    def prepare(self) -> None:
        """Load the data, and check that the model and the options of the workload suit the data.

        Raises:
            ConfigError: if the data is missing or cannot be used, or the model or an option does not suit the data; the
                error names the key, such as `data.root` or `model`.
        """

    @property
    def num_data_workers(self) -> int:
        """The number of worker processes that load batches, in each process of the run; called after `prepare`."""
        return 0

    def steps_per_epoch(self, batch_size: int) -> float | None:
        """Return the number of optimizer steps per epoch; None if the workload has no epochs.

        Raises:
            ConfigError: if `batch_size` is larger than the number of training samples.
        """
        return None

    def num_steps(self, batch_size: int) -> int | None:
        """Return the number of optimizer steps of a run; None if it follows from the option `epochs` or `steps`.

        Raises:
            ConfigError: if the workload cannot sample batches of this size.
        """
        return None

    def check_plan(self, plan: Plan) -> None:
        """Raise `ConfigError` if the batches of this workload cannot be split according to `plan`."""

    @abstractmethod
    def build_model(self) -> torch.nn.Module:
        """Create the model on the CPU, initialized from the global random number generator of torch.

        Raises:
            ConfigError: if the network cannot be built for this data, or its initial weights cannot be loaded.
        """

    def input_shape(self) -> tuple[int, ...] | None:
        """Return the shape of one input; None (the default) if the model takes anything other than one tensor."""
        return None

    @abstractmethod
    def batches(self, model: torch.nn.Module, plan: Plan, after_step: int, device: torch.device) -> Iterator[Any]:
        """Yield the micro-batches of this process for all steps after `after_step`, without end.

        Args:
            model: the model that is trained, for workloads whose data depends on it.
            plan: how batches are split over processes and micro-batches.
            after_step: the last optimizer step that has been done; 0 at the start of a run.
            device: device of the batches.

        Raises:
            ConfigError: if no batches can be produced, for example because a replay buffer does not fit into memory.
            DataError, EnvironmentBrokenError: if samples cannot be read, or an environment fails.
        """

    def fake_batches(self, model: torch.nn.Module, plan: Plan, device: torch.device) -> Iterator[Any] | None:
        """Return micro-batches of the sizes of `batches`, without end, but made of fake tensors, which have no values.

        Called inside `runner.system.fake_tensors.fake_tensors`, so that new tensors are fake. None (the default) means
        that `batches` itself works with fake tensors: it depends on no values of tensors, environments or files.
        """
        return None

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, BatchSums]:
        """Return the mean loss of a micro-batch, a scalar to differentiate, and the sums of its metrics.

        The sums are over samples: a detached float32 tensor [len(metrics)] (see `batch_sums`).
        """

    def after_step(self, model: torch.nn.Module, step: int) -> None:
        """Do additional work, such as an update of a target network, after optimizer step `step` of this process.

        Steps whose update was skipped, because the gradients overflowed under loss scaling, do not count.
        """

    def close(self) -> None:
        """End the processes that were started for batches and evaluations; they are started again when needed."""

    # -----------------------------------------------------------------------------------------------------------------
    # Evaluation

    def eval_metrics(self) -> dict[str, str]:
        """Return the evaluation metrics by which a run may end early, as a dict from names to `min` or `max`.

        All of them must be measured by each evaluation, and `best` is one of them. Called after `prepare`.
        """
        return dict([self.best])

    @abstractmethod
    def evaluate(
        self, infer: Callable[[torch.Tensor], torch.Tensor], shard: tuple[int, int], device: torch.device
    ) -> MetricSums:
        """Return the metric sums over one shard of the evaluation data; each sample of the shard counts once.

        Args:
            infer: function that returns the outputs of the model for inputs on the device.
            shard: (index of the shard, number of shards).
            device: device of the model.

        Raises:
            DataError, EnvironmentBrokenError: if samples cannot be read, or an environment fails.
        """

    @abstractmethod
    def summarize(self, sums: MetricSums) -> dict[str, float]:
        """Return the evaluation metrics by name, given the sums over all ranks."""

    def vote(self, outputs: torch.Tensor) -> torch.Tensor:
        """Combine the outputs of several models, [num_models, n, …], into one output per sample, [n, …]."""
        return outputs.mean(0)

    def images(self, sums: MetricSums) -> dict[str, torch.Tensor]:
        """Return images and videos of the last evaluation by TensorBoard tag, given the sums over all ranks.

        Called on rank 0. Images are RGB, uint8 [3, height, width]; videos are uint8 [frames, 3, height, width].
        """
        return {}

    # -----------------------------------------------------------------------------------------------------------------
    # What a checkpoint says about the data

    def signature(self) -> dict[str, Any]:
        """Return what a program needs to know to use the trained model, saved as JSON with every checkpoint.

        The key `inputs` is the shape of an input. For classification, `classes` are the names of the outputs, and
        `image` has the fields of the `ImageInput` that converts image files to inputs, or is None. For regression,
        `targets` are the names of the outputs, `columns` those of the inputs if they have names, and `scale` is the
        result of `RegressionSamples.standardization`. Empty (the default) if nothing is known.
        """
        return {}

    def samples_identity(self) -> dict[str, Any]:
        """Return what identifies the samples: the entry `data` of the signature in a checkpoint.

        It has the numbers of `training` and `held_out` samples, and `sha256`, the `Samples.fingerprint`. It is empty
        (the default) if a resumed run cannot have other samples.
        """
        return {}

    def continue_with(self, saved: Mapping[str, Any]) -> None:
        """Use the normalization and the order of columns in `saved`, the signature of the checkpoint to resume.

        Raises:
            ConfigError: with the key `data`, if the data now has other classes, targets or columns.
        """

    def check_same_samples(self, saved: Mapping[str, Any]) -> str:
        """Check on rank 0 that the samples are those of the checkpoint with the signature `saved`.

        Return what has changed, in words, if the user accepts other samples; otherwise an empty string.

        Raises:
            ConfigError: with the key `data`, if they are others, and the user does not accept them.
        """
        return ""

    def prepare_evaluation(self, saved: Mapping[str, Any], split: str | None, is_other: bool) -> None:
        """Prepare for the evaluation of a checkpoint, without training; called instead of `prepare`.

        Args:
            saved: the signature of the checkpoint; empty if it has none.
            split: the samples to evaluate on: `train`, `val`, `test` or `all`. None chooses the held-out samples, as in
                training; or, if the data is not that of the checkpoint, the first of `Data.splits`.
            is_other: whether the user has named data for the evaluation.

        Raises:
            ConfigError: as in `prepare`; or with the key `--split`, if there is no such split.
        """
        if split is not None:
            raise ConfigError("--split", split, f"{type(self).__name__} does not divide its data", "leave it out")
        self.prepare()

    def saved_model(self, signature: Mapping[str, Any]) -> torch.nn.Module:
        """Return a new model on the CPU, into which the caller loads the weights of a checkpoint.

        This implementation loads the data; a workload that needs only `signature`, which may be empty, overrides it.

        Raises:
            ConfigError: if the data is needed and missing, or the network cannot be built.
        """
        self.prepare()
        return self.build_model()

    # -----------------------------------------------------------------------------------------------------------------
    # Reports and state

    def describe(self) -> dict[str, str]:
        """Return descriptions to show at the start, such as {"data": "Digits, 1,438 training and 359 held-out …"}."""
        return {}

    def scalars(self) -> dict[str, float]:
        """Return scalars to log in addition to the metrics, such as `episode/return`."""
        return {}

    def extra_results(self, all_gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Return additional entries for `result.json`; called on every rank at the end of a session.

        `all_gather` returns the value of each rank; only that of this rank if the run has crashed or diverged.
        """
        return {}

    def diverged_batch(self, plan: Plan, step: int, device: torch.device) -> dict[str, torch.Tensor] | None:
        """Return the tensors of this process's batch of `step` by name, to be saved after the run has diverged.

        None (the default) if the batch is not available.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank that checkpoints save besides the model, as plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            UnexpectedContentError: if `state` is not the state of a workload of this class.
        """


@dataclass
class SupervisedWorkload(Workload):
    """A workload whose loss is `criterion(model(inputs), targets)`, so that its network can be split into stages.

    Batches are of type `runner.data.base.Batch`.
    """

    @abstractmethod
    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar: the mean over the n samples of `outputs` and `targets`, both [n, …]."""

    def sample_metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the training metrics of each sample except the loss: numbers or booleans, [n, len(metrics) − 1].

        The default is for a workload whose only training metric is the loss. `outputs` and `targets`, both [n, …], are
        detached.
        """
        return outputs.new_zeros(len(outputs), 0)

    def loss_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, BatchSums]:
        """Return the mean loss and the metric sums of a micro-batch, given the outputs of the network."""
        loss = self.criterion(outputs, targets)
        return loss, batch_sums(loss.detach(), self.sample_metrics(outputs.detach(), targets))

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, BatchSums]:
        return self.loss_of(model(batch.inputs), batch.targets)
