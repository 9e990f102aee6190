"""The single-device mode, which is also the base class of all parallel modes: a mode overrides only what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from runner.batching import MicroBatch, Plan
from runner.config.errors import ConfigError, errors_under
from runner.device import Device
from runner.models.blocks import blocks_of
from runner.optimizer import trainable
from runner.parallel import full_state
from runner.parallel.compiling import compile_in_place
from runner.parallel.full_state import TensorDict
from runner.parallel.launch.cluster import external_world_size
from runner.parallel.launch.processes import Launcher
from runner.parallel.session import Session
from runner.system.section_timer import timer
from runner.system.trees import Tree
from runner.tracking.metrics import BatchSums, MetricSums
from runner.workloads.phases import Phase


@dataclass
class Parallel:
    """The mode `parallel=single`: one process with one device. It is also the base class of all other parallel modes.

    A parallel mode changes how a step is computed, not what is computed: batches, losses, tags and checkpoints are the
    same as on a single device. The fields of a mode are its options. The methods are defined roughly in the order in
    which a run calls them.
    """

    description: ClassVar[str] = "single device"
    """The name of the mode in the first lines of the log."""

    difference: ClassVar[str] = ""
    _is_divided = False  # whether the gradients of this step are those of a mean already
    """Why the results of several processes differ from those of a single device; empty if they are equal but for
    rounding."""

    def launcher(self, choice: Device) -> Launcher:
        """Return the launcher that starts or joins the processes of the mode, on the devices that `choice` selects.

        Raises:
            ConfigError: if they do not fit the mode.
        """
        return Launcher(self._devices(choice)[:1])

    def _devices(self, choice: Device) -> list[torch.device]:
        """Return the devices that `choice` selects for the one process of the mode."""
        if (started := external_world_size()) != 1:
            why = f"torchrun or SLURM started {started} processes, and this mode takes one"
            remedy = "choose parallel=ddp, fsdp or pipeline, or start one process"
            raise ConfigError("parallel.processes", started, why, remedy)
        with errors_under("device"):
            return choice.resolve_all()

    def divide(self, session: Session) -> Plan:
        """Return the part of `session.plan`, which is that of a single process, that the process of `session` does.

        Raises:
            ConfigError: if the batch, the devices, the workload or an option does not fit the mode. No data has been
                read yet; what depends on it is checked in `check`.
        """
        return session.plan

    def check(self, session: Session) -> None:
        """Raise a `ConfigError` if the mode does not fit the network of the workload. Its data has been read."""

    def continue_with(self, saved: Mapping[str, Any]) -> None:
        """Divide the network as in the session that wrote the checkpoint to resume, whose signature is `saved`."""

    def place(self, model: torch.nn.Module, session: Session) -> torch.nn.Module:
        """Move, wrap, shard or split the model, and return the module whose parameters are trained.

        The parameters keep their names: a mode that wraps the module, as DDP does, keeps the wrapper for itself.
        """
        self._session, self._others_of = session, dict[str, list[torch.nn.Parameter]]()
        return self._place(model, session)

    def _place(self, model: torch.nn.Module, session: Session) -> torch.nn.Module:
        move(model, session.device, session.channels_last)
        compile_in_place(model, session.compile)
        return model

    def of_one_run(self) -> Parallel:
        """Return the mode that computes the same without other runs."""
        return self

    def batches(self, model: torch.nn.Module, after_step: int) -> Iterator[Any]:
        """Yield the micro-batches of this process for all steps after `after_step`; see `Session.batches`."""
        return self._session.batches(model, after_step)

    @contextmanager
    def phase(self, model: torch.nn.Module, phase: Phase) -> Iterator[None]:
        """A context in which only the parameters of `phase` are trained, on its loss."""
        if phase.parameters is None:
            yield
            return
        self._session.workload.phase = phase.name
        if phase.name not in self._others_of:  # once, as names take longer to find than a small step
            named = model.named_parameters()
            others = [p for name, p in named if p.requires_grad and name not in phase.parameters]
            self._others_of[phase.name] = others
        with self._not_trained(self._others_of[phase.name]):
            yield

    @contextmanager
    def _not_trained(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        for parameter in parameters:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)

    def measured(self, micro: MicroBatch) -> AbstractContextManager:
        """Return a context for the forward and the backward pass of `micro`, in which the mode may measure the step."""
        return nullcontext()

    def accumulate(self, model: torch.nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> BatchSums | None:
        """Run the forward and the backward pass of a micro-batch, and add its weighted gradients to `grad`.

        Args:
            model: the model that `place` returned.
            batch: the samples of `micro`, as yielded by the workload's `batches`.
            micro: the micro-batch.
            log_due: whether this step is logged; if so, the mode may measure it.

        Returns:
            The sums and counts of the training metrics over the micro-batch, on the device; None on a rank without the
            loss, as in a pipeline.
        """
        precision = self._session.precision
        with timer.section("forward"), precision.autocast():
            loss, sums = self._loss(model, batch)
            mean = self.of_batch(loss, sums)
        self._is_divided, loss = mean is not loss, mean
        with timer.section("backward"):
            precision.backward(loss * micro.weight if micro.weight != 1 else loss)
        return sums

    def _loss(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, BatchSums]:
        return self._session.workload.loss(model, batch)

    def of_batch(self, loss: torch.Tensor, sums: BatchSums) -> torch.Tensor:
        """Return the `loss` per sample divided by the mean count per sample, if one pass computes the whole batch.

        What clips gradients in the backward pass, as a hook does, then sees those of the mean.
        """
        plan, form = self._session.plan, self._session.workload.loss_form
        if plan.num_parts > 1 or form is None or not form[1]:
            return loss
        return loss * (plan.batch_size / sums[1, 0]).to(loss.dtype)

    def divide_gradients(self, model: torch.nn.Module, count: torch.Tensor) -> None:
        """Divide the gradients, which are those of a loss per sample, by the mean count per sample.

        `count`, a scalar on the device, is that of this process: the processes that share the batch add up theirs.
        """
        plan, is_divided, self._is_divided = self._session.plan, self._is_divided, False
        if is_divided:
            return
        if plan.data_shard[1] > 1 or plan.splits_network:
            count = self._session.collectives.all_reduce({"count": count})["count"]
        factor = plan.batch_size / count
        for parameter in trainable(model):
            if parameter.grad is not None:
                gradient = full_state.local_part(parameter.grad)
                gradient.mul_(factor.to(gradient.device))  # not non_blocking, as it may be in host memory

    def clip_gradients(self, model: torch.nn.Module, max_norm: float | None) -> torch.Tensor:
        """Clip the gradients to `max_norm`, if given; return their norm before, over the whole model, on the device."""
        parameters = trainable(model)
        if max_norm is None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        else:
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return full_state.full_tensor(norm)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters; the gradients are divided and clipped."""
        optimizer.step()

    def calling_hooks(self) -> AbstractContextManager[None]:
        """A context for the hooks of the user, which see and change whole weights and gradients."""
        return nullcontext()

    def evaluate(self, model: torch.nn.Module) -> tuple[dict[str, float], MetricSums]:
        """Evaluate the model, which the caller has put into evaluation mode, on the held-out data.

        Returns:
            The metrics by name, and the sums over all ranks from which they were computed; some modes have the sums
            only on rank 0.
        """
        sums = self._session.collectives.all_reduce(self._sums(partial(self._infer, model)))
        return self._session.workload.summarize(sums), sums

    def _infer(self, model: torch.nn.Module, inputs: Tree) -> Any:
        return self._session.workload.outputs(model, inputs)

    def _sums(self, infer: Callable[[Tree], Any]) -> MetricSums:
        session = self._session
        with torch.no_grad(), session.precision.autocast():
            return session.workload.evaluate(infer, session.plan.eval_shard, session.device)

    def scalars(self) -> dict[str, float]:
        """Return what the mode has measured since the last call, by TensorBoard tag; called on every rank."""
        return {}

    def images(self, directory: Path) -> dict[str, torch.Tensor]:
        """Return RGB images, uint8 [3, height, width], of how a step was computed, by tag; called on rank 0.

        The mode may also write files to `directory`, the run directory.
        """
        return {}

    def blocks(self, model: torch.nn.Module) -> list[str]:
        """Return the names of the blocks of `model` that this process computes, if they have parameters."""
        return [name for name, block in blocks_of(model) if any(True for _ in block.parameters())]

    def signature(self) -> dict[str, Any]:
        """Return what `continue_with` needs in another session of this run: the entries that the mode saves."""
        return {}

    def full_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[TensorDict, dict[str, Any]]:
        """Return the state of the model and the optimizer in the format of all modes; called on every rank.

        Returns:
            Full tensors on the CPU: those of the model by name, and the optimizer state by parameter name, such as
            `{"layer.weight": {"momentum_buffer": tensor, …}, …}`. Both are empty except on rank 0, which saves them.
        """
        return full_state.collect(model, optimizer, keep=self._session.rank == 0)

    def load_full_state(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: TensorDict, states: dict[str, Any]
    ) -> None:
        """Load what `full_state` of this or another mode returned; called on every rank.

        Raises:
            UnexpectedContentError: as in `full_state.load`.
        """
        full_state.load(model, optimizer, tensors, states)

    def local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return a copy of the part of this rank's state that `full_state` does not include."""
        return {}

    def load_local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load what `local_state` returned, after `load_full_state`; `state` is empty if this rank saved nothing.

        Raises:
            ConfigError: if `state` does not fit the number of processes.
            UnexpectedContentError: if `state` does not have the expected form.
        """


def move(model: torch.nn.Module, device: torch.device, channels_last: bool) -> None:
    """Move `model` to `device`, and convert the weights of its 2-d convolutions to NHWC if `channels_last` is true.

    The outputs of a convolution have the memory format of its weights.
    """
    model.to(device)
    for module in model.modules() if channels_last else ():
        weight = module._parameters.get("weight") if isinstance(module, torch.nn.modules.conv._ConvNd) else None
        if weight is not None and weight.dim() == 4:
            weight.data = weight.data.to(memory_format=torch.channels_last)
