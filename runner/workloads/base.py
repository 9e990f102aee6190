"""The interface between a workload and the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from runner.config.errors import ABSENT, ConfigError, check
from runner.system.trees import Tree, call
from runner.tracking.metrics import BatchSums, MetricSums
from runner.workloads.phases import Phase

if TYPE_CHECKING:
    import torch

    from runner.batching import Plan
    from runner.storage.checkpoint import Part


@dataclass
class Workload(ABC):
    """The base class of learning problems, which are independent of the parallel mode, the rank and the precision.

    Tensors that have to be moved, sharded and saved with the model must be parameters or buffers of the model. For all
    errors that a user can correct, methods raise `ConfigError`; for samples that cannot be read, `DataError`.
    """

    train_metrics: ClassVar[tuple[str, ...]] = ("loss",)
    """The names of the training metrics; the first is the loss. A metric that is not finite ends the run."""

    best: ClassVar[tuple[str, str]] = ("loss", "min")
    """The evaluation metric that selects the best checkpoint, and whether its `min` or its `max` is best."""

    best_possible: ClassVar[Mapping[str, float]] = {}
    """The best value that an evaluation metric can have, of those that have one."""

    other_metrics: ClassVar[str] = ""
    """What a refusal adds to the list of evaluation metrics: how a run gets others."""

    not_in_passes: ClassVar[tuple[str, ...]] = ()
    """The options on which a pass through the network, forward and backward, does not depend."""

    forward_passes: ClassVar[int] = 3
    """The forward passes that take as many operations as training on one sample. A backward pass counts as two."""

    outputs_are_scores: ClassVar[bool] = False
    """Whether the prediction is the index of the largest output."""

    may_change_on_resume: ClassVar[tuple[str, ...]] = ()
    """Options that may differ on resume."""

    has_steps: ClassVar[bool] = False
    """Whether `loss` and `outputs` are code of a user that may call parts of the network by themselves."""

    phase: str = field(default="", init=False)
    """The name of the phase whose loss `loss` is; empty if there is only one."""

    split: str = field(default="", init=False)
    """The part of the data that is evaluated (see `session_with_data`); empty in training, or without parts."""

    # What is trained, and how long

    def prepare(self) -> None:
        """Load the data, and check that the model and the options suit it."""

    @property
    def num_data_workers(self) -> int:
        """The number of worker processes of each process of the run; known after `prepare`."""
        return 0

    def steps_per_epoch(self, batch_size: int) -> float | None:
        """Return the number of optimizer steps per epoch; None if the workload has no epochs."""
        return None

    def num_steps(self, batch_size: int) -> int | None:
        """Return the number of optimizer steps of a run; None if it follows from the option `epochs` or `steps`."""
        return None

    def check_plan(self, plan: Plan) -> None:
        """Raise `ConfigError` if the batches of this workload cannot be split according to `plan`."""

    @abstractmethod
    def build_model(self) -> torch.nn.Module:
        """Create the model on the CPU, initialized from the global random number generator of torch."""

    def phases(self, model: torch.nn.Module) -> list[Phase]:
        """Return the phases of a step, in their order; raises `ConfigError` if they do not fit the whole `model`."""
        return [Phase()]

    def input_shape(self) -> tuple[int, ...] | None:
        """Return the shape of one input; None (the default) if the model takes anything other than one tensor."""
        return None

    @abstractmethod
    def batches(self, model: torch.nn.Module, plan: Plan, after_step: int, device: torch.device) -> Iterator[Any]:
        """Yield this process's micro-batches, on `device`, of all steps after `after_step`, without end.

        `model` is the one that is trained, for workloads whose data depends on it.
        """

    def fake_batches(self, model: torch.nn.Module, plan: Plan, device: torch.device) -> Iterator[Any] | None:
        """Return what `batches` does, as `fake_tensors`; None (the default) if `batches` itself works with them."""
        return None

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, BatchSums]:
        """Return the loss of a micro-batch per sample, and the detached sums of its metrics (see `batch_sums`).

        The loss is a mean over samples, or a sum divided by the number of samples; see `loss_form`.
        """

    @property
    def loss_form(self) -> tuple[tuple[str, ...], bool] | None:
        """The names of the training metrics, and whether the loss is a mean over something else than samples.

        Then, such as for a mean over tokens, the gradients of a step are divided by the count in its metric sums. None
        as long as it is not known, before the first call of `loss` in this process.
        """
        return self.train_metrics, False

    @property
    def user_loss(self) -> Any:
        """The function, module or object of the user that computes the loss; None if there is none."""
        return None

    def loss_module(self) -> torch.nn.Module | None:
        """Return the loss if it is a module: checkpoints save its state, and it is evaluated in evaluation mode."""
        return None

    def after_step(self, model: torch.nn.Module, step: int) -> None:
        """Do additional work after optimizer step `step`; steps that loss scaling skipped do not count."""

    def close(self) -> None:
        """End the processes that were started for batches and evaluations; they are started again when needed."""

    # Evaluation

    @classmethod
    def best_for(cls, options: Mapping[str, Any]) -> tuple[str, str]:
        """Return what `best` is with these `options`, the fields of a workload or its saved config."""
        return cls.best

    @property
    def selection(self) -> tuple[str, str]:
        """What `best` is with the options of this workload."""
        return self.best_for(vars(self))

    def eval_metrics(self) -> dict[str, str]:
        """Return the `min` or `max` of each metric by which a run may end early; every evaluation measures them."""
        return dict([self.selection])

    def few_samples(self, count: int, device: torch.device) -> AbstractContextManager[None] | None:
        """Return a context in which `evaluate` takes only `count` samples, to find mistakes of a user's code early.

        None (the default) if an evaluation runs no code of a user but the network.
        """
        return None

    def all_samples(self) -> AbstractContextManager[None] | None:
        """Return a context in which `evaluate` finds mistakes for which `few_samples` were too few; None if none."""
        return None

    def outputs(self, model: torch.nn.Module, inputs: Tree) -> Any:
        """Return what `model` returns for `inputs` in an evaluation."""
        return call(model, inputs)

    @abstractmethod
    def evaluate(self, infer: Callable[[Tree], Any], shard: tuple[int, int], device: torch.device) -> MetricSums:
        """Return the metric sums over the `shard` (index, number of shards) of the evaluation data, each sample once.

        `infer` returns the outputs of the model for inputs on `device`.
        """

    @abstractmethod
    def summarize(self, sums: MetricSums) -> dict[str, float]:
        """Return the evaluation metrics by name, given the sums over all ranks."""

    def vote(self, outputs: torch.Tensor) -> torch.Tensor:
        """Combine the outputs of several models, [num_models, n, …], into one output per sample, [n, …].

        By default, it is the mean, or of whole numbers, what most models gave. It is called for each tensor of outputs.
        """
        return outputs.mean(0) if outputs.is_floating_point() or outputs.is_complex() else outputs.mode(0).values

    def images(self, sums: MetricSums) -> dict[str, torch.Tensor]:
        """Return pictures of the last evaluation, as in `Tracker.images`, given the sums over all ranks; on rank 0."""
        return {}

    def texts(self, sums: MetricSums) -> dict[str, str]:
        """Return texts of the last evaluation by tag, given the sums over all ranks; on rank 0."""
        return {}

    def details(self, sums: MetricSums) -> dict[str, Any]:
        """Return tables of an evaluation as plain values that JSON has, given the sums over all ranks; on rank 0.

        `classes` is a list of a dict for each class, and `confusion` counts of true (rows) and predicted classes.
        """
        return {}

    # What a checkpoint says about the data

    def signature(self) -> dict[str, Any]:
        """Return what a program needs to know to use the trained model, saved as JSON with every checkpoint.

        `inputs` is the shape of an input. For classification, `classes` are the names of the outputs, and `image` the
        fields of an `ImageInput` or None. For regression, `targets` and `columns` are the names of outputs and inputs,
        and `scale` is that of `RegressionSamples.standardization`. Classes without names have their number, `outputs`.
        """
        return {}

    def samples_identity(self) -> dict[str, Any]:
        """Return the numbers of `training` and `held_out` samples, and `sha256`, their `Samples.fingerprint`.

        Empty (the default) if a resumed run cannot have other samples.
        """
        return {}

    def continue_with(self, saved: Mapping[str, Any]) -> None:
        """Use the normalization and the order of columns in `saved`, the signature of the checkpoint to resume."""

    def check_same_samples(self, saved: Mapping[str, Any]) -> str:
        """Refuse other samples than those of the signature `saved`, or return in words what is accepted; on rank 0."""
        return ""

    def session_with_data(self, saved: Mapping[str, Any], split: str | None, is_other: bool) -> None:
        """Prepare for the evaluation of a checkpoint with the signature `saved`; called instead of `prepare`.

        `split` is `train`, `val`, `test` or `all`. None is the held-out samples or, if the user has named other data
        (`is_other`), the first of `Data.splits`.
        """
        check(split is None, "--split", split, f"{type(self).__name__} does not divide its data", "leave it out")
        self.prepare()

    def saved_model(self, signature: Mapping[str, Any]) -> torch.nn.Module:
        """Return a new model on the CPU, into which the caller loads the weights of a checkpoint.

        This implementation loads the data; a workload that needs only `signature`, which may be empty, overrides it.
        """
        self.prepare()
        return self.build_model()

    # Reports and state

    def describe(self) -> dict[str, str]:
        """Return descriptions to show at the start, such as {"data": "Digits, 1,438 training and 359 held-out …"}."""
        return {}

    def scalars(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Return scalars to log in addition to the metrics, such as `episode/return`, and to the `rates` of steps."""
        return {}

    def extra_results(self, all_gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Return additional entries for `result.json`; called on every rank. `all_gather` returns all ranks' values."""
        return {}

    def diverged_batch(self, plan: Plan, step: int, device: torch.device) -> dict[str, Tree] | None:
        """Return the tensors of this process's batch of `step`, to save after the run has diverged; None if unknown."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank that checkpoints save besides the model, as plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned; raises `UnexpectedContentError` if it is another one."""

    def shared_state(self) -> dict[str, Any]:
        """Return the plain values and tensors that checkpoints save for all ranks, of any number of processes."""
        return {}

    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Restore what `shared_state` returned; raises `UnexpectedContentError` if it is something else."""

    def parts(self) -> dict[str, Part]:
        """Return large state of this rank that grows, but does not change, by name: checkpoints share its files."""
        return {}

    def state_bytes(self) -> tuple[int, int]:
        """Return what the state of all ranks adds to each checkpoint, and to a run by `parts`, at most, in bytes."""
        return 0, 0

    def check_disk(self, free_bytes: int) -> None:
        """Raise a `ConfigError` if the state cannot be saved where `free_bytes` are free, when a run begins."""

    def load_parts(self, files: dict[str, Path]) -> None:
        """Take the files of a checkpoint with what `parts` returned, after `load_state_dict`."""


def check_metrics(workload: Workload, measured: Collection[str] | None = None) -> None:
    """Raise `ConfigError` unless `best` and `eval_metrics` of `workload` agree, and an evaluation has `measured` them.

    Before the first evaluation, `measured` is None.
    """
    (metric, goal), listed, name = workload.selection, workload.eval_metrics(), type(workload).__name__
    if listed.get(metric) != goal or not {*listed.values()} <= {"min", "max"}:
        why = f"best of {name} is {(metric, goal)}, and its eval_metrics() returns {listed}"
        raise ConfigError("workload", ABSENT, why, "let both name the same metric, and say min or max of each")
    if measured is not None and not listed.keys() <= {*measured}:
        why = f"{name} lists {', '.join(listed)}, but its evaluations measure {', '.join(measured)}"
        raise ConfigError("workload", ABSENT, why, "correct best and eval_metrics(), or what summarize() returns")
