"""The single-device mode, and with it the contract: a mode overrides only its difference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from runner.batching import MicroBatch
from runner.config.errors import check, errors_under
from runner.device import Device
from runner.optimizer import trainable
from runner.parallel import full_state
from runner.parallel.context import Context, Layout
from runner.parallel.full_state import TensorDict
from runner.parallel.launch.cluster import RankInfo, external_world_size
from runner.parallel.launch.launcher import Launcher
from runner.system.section_timer import timer
from runner.tracking.metrics import MetricSums


@dataclass
class Parallel:
    """`parallel=single`: one process, one device.

    A mode changes how the work is done, never what is computed: the batches, the loss, the curve, the tags and the
    checkpoint are those of this class. Its fields are options, which never change; what it needs to know of a run is
    handed to it as a `Context`, in the order of the methods below.
    """

    description: ClassVar[str] = "single device"
    """Names the mode in the first lines of a run."""

    def launcher(self, choice: Device) -> Launcher:
        """What starts or joins the processes of the mode, on the devices of `choice`.

        Raises:
            ConfigError: with the key from the root, as by every check of a mode.
        """
        self._check_one_process()
        with errors_under("device"):
            return Launcher([choice.resolve()])

    def _check_one_process(self) -> None:
        started = external_world_size()
        why = f"{started} processes were started by torchrun or SLURM, and this mode has one"
        check(started == 1, "parallel.processes", started, why, "choose parallel=ddp or fsdp, or start one process")

    def layout(self, rank_info: RankInfo) -> Layout:
        """Which part of the work the process of `rank_info` does."""
        return Layout()

    def check(self, context: Context) -> None:
        """Do the checks that need the devices and the other components, before any data is read."""

    def check_workload(self, context: Context) -> None:
        """Do the checks that need the workload's data."""

    def num_microbatches(self, context: Context) -> int:
        """Into how many parts the mode itself splits a micro-batch of the plan."""
        return 1

    def place(self, model: torch.nn.Module, context: Context) -> torch.nn.Module:
        """Put the model where it computes: move, wrap, shard or split it.

        Returns:
            The module whose parameters are trained, under their plain names. A mode that calls it through a wrapper
            keeps the wrapper to itself.
        """
        self._context = context
        return self._place(model, context)

    def _place(self, model: torch.nn.Module, context: Context) -> torch.nn.Module:
        move(model, context.device, context.channels_last)
        if context.compile:
            model.compile()  # in place: the names of the parameters stay
        return model

    def accumulate(self, model: torch.nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> torch.Tensor:
        """Forward and backward of one micro-batch, whose gradients are weighted by its share of the global batch.

        Args:
            batch: what the workload's `batches` gave.
            log_due: whether this step is logged, so that a mode may measure itself in it.

        Returns:
            The workload's sums over the micro-batch, float32 [num_metrics], on the device.
        """
        return self._accumulate(model, batch, micro.weight)

    def _accumulate(self, module: torch.nn.Module, batch: Any, weight: float) -> torch.Tensor:
        """One forward and backward pass through `module`: the model, or a mode's wrapper of it."""
        workload, precision = self._context.workload, self._context.precision
        with timer.section("forward"), precision.autocast():
            loss, sums = workload.loss(module, batch)
        with timer.section("backward"):
            precision.backward(loss * weight if weight != 1 else loss)
        return sums

    def clip_gradients(self, model: torch.nn.Module, max_norm: float | None) -> torch.Tensor:
        """Scale the gradients down to `max_norm` if they are larger.

        Returns:
            The norm of the whole model's gradient before that, a scalar on the device.
        """
        parameters = trainable(model)
        if max_norm is None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        else:
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return full_state.full_tensor(norm)

    def combine_overflow(self, found_inf: torch.Tensor) -> None:
        """Set `found_inf`, a scalar on the device, to the largest of all ranks that hold parts of one gradient."""

    def infer(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """The forward pass of an evaluation."""
        return model(inputs)

    def evaluate(self, model: torch.nn.Module) -> tuple[dict[str, float], MetricSums]:
        """Evaluate the model, which the caller has put into evaluation mode, on the held-out data.

        Returns:
            The metrics, and the sums over all ranks that they were made of.
        """
        context = self._context
        with torch.inference_mode(), context.precision.autocast():
            sums = context.workload.evaluate(partial(self.infer, model), context.layout.eval_shard, context.device)
        sums = context.collectives.all_reduce(sums)
        return context.workload.summarize(sums), sums

    def scalars(self) -> dict[str, float]:
        """What to log of the mode itself since this was called last; called on every rank at once."""
        return {}

    def images(self, directory: Path) -> dict[str, torch.Tensor]:
        """What a step of the mode looks like: RGB images, uint8 [3, height, width], by TensorBoard tag.

        Args:
            directory: the run's, for files of the mode's own.
        """
        return {}

    def full_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[TensorDict, dict[str, Any]]:
        """The state that no mode shows in: plain names, full tensors, on the CPU; called on every rank at once.

        Returns:
            The model's tensors by name, and the optimizer's state by parameter name: `{"layer.weight":
            {"momentum_buffer": tensor, …}, …}`. Empty off rank 0, which writes them.
        """
        return full_state.collect(model, optimizer, keep=self._context.rank == 0)

    def load_full_state(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        tensors: TensorDict,
        optimizer_state: dict[str, Any],
    ) -> None:
        """Load what `full_state` returned, in this mode or another.

        Raises:
            RuntimeError: when names or shapes differ from the model's.
        """
        full_state.load(model, optimizer, tensors, optimizer_state)

    def local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What this rank alone has beside the full state."""
        return {}

    def load_local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load what `local_state` returned, after the full state; empty where this rank saved nothing."""


def move(model: torch.nn.Module, device: torch.device, channels_last: bool) -> None:
    """Move `model` to `device`, and into the NHWC memory format where that is asked for."""
    model.to(device)
    if channels_last:
        # pyright knows no overload of `to` with a memory format alone
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
