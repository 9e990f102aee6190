"""The single-device mode, and with it the contract: a mode overrides only its difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from runner.batching import MicroBatch
from runner.clock import clock
from runner.device import Device
from runner.optimizer import trainable
from runner.precision import Precision
from runner.workloads.base import Sums, Workload

if TYPE_CHECKING:
    from runner.run import Result, Run


@dataclass
class Parallel:
    """`parallel=single`: one process, one device.

    A mode changes how the work is done, never what is computed: the batches, the loss, the curve, the tags and the
    checkpoint are those of this class.
    """

    def launch(self, train: Callable[[Run], Result], run: Run) -> Result:
        """Call `train(run)` in every process of the mode; returns rank 0's result."""
        return train(run)

    @property
    def rank(self) -> int:
        """This process among those of the run; rank 0 writes."""
        return 0

    @property
    def world_size(self) -> int:
        """How many processes the run has."""
        return 1

    @property
    def data_shard(self) -> tuple[int, int]:
        """(index, count): which part of every global batch this process trains on; (0, 1) where all see the whole."""
        return (0, 1)

    def device(self, choice: Device) -> torch.device:
        """The device of this process."""
        return choice.resolve()

    def place(
        self, model: torch.nn.Module, device: torch.device, channels_last: bool, compile: bool
    ) -> torch.nn.Module:
        """Put the model where it computes: move, wrap, shard or cut it."""
        model.to(device)
        if channels_last:
            # pyright knows no overload of `to` with a memory format alone
            model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        if compile:
            model.compile()  # in place: the names of the parameters stay
        return model

    def accumulate(
        self, model: torch.nn.Module, workload: Workload, batch: Any, precision: Precision, micro: MicroBatch
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch, weighted by its share of the global batch.

        Returns:
            The workload's sums over the micro-batch, float32 [num_metrics], on the device.
        """
        with clock.section("forward"), precision.autocast():
            loss, sums = workload.loss(model, batch)
        with clock.section("backward"):
            precision.backward(loss * micro.weight if micro.weight != 1 else loss)
        return sums

    def clip_gradients(self, model: torch.nn.Module, max_norm: float | None) -> torch.Tensor:
        """Scale the gradients down to `max_norm` if they are larger; returns the whole model's norm before."""
        parameters = trainable(model)
        if max_norm is None:
            return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def infer(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """The forward pass of an evaluation; the caller has put the model into evaluation mode."""
        return model(inputs)

    def reduce(self, sums: Sums) -> Sums:
        """Add up sums over all ranks: as sums and counts, ragged shards stay exact."""
        return sums

    def agree(self, flag: bool) -> bool:
        """Whether any rank says so: all ranks must leave a loop at the same step."""
        return flag

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def full_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Sums, dict[str, Any]]:
        """The mode-free state: plain names, whole tensors, on the CPU.

        Returns:
            The model's tensors by name, and the optimizer's state by parameter name: `{"layer.weight":
            {"momentum_buffer": tensor, …}, …}`.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        moments = {names[id(parameter)]: _on_cpu(state) for parameter, state in optimizer.state.items()}
        return _on_cpu(model.state_dict()), moments

    def load_full_state(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        tensors: Sums,
        moments: dict[str, Any],
    ) -> None:
        """Take over a mode-free state.

        Raises:
            RuntimeError: when names or shapes differ from the model's.
        """
        model.load_state_dict(tensors)
        parameters = dict(model.named_parameters())
        places = {name: i for i, name in enumerate(_names_in_order(model, optimizer))}
        packed = optimizer.state_dict()
        packed["state"] = {places[name]: _laid_out_as(parameters[name], state) for name, state in moments.items()}
        optimizer.load_state_dict(packed)


def _names_in_order(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in the order that its state counts them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _laid_out_as(parameter: torch.nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with its tensors in the memory layout of their parameter.

    The fused CPU kernels walk through memory, and pair the numbers of two layouts wrongly, without a word.
    """
    return {
        key: torch.empty_like(parameter, dtype=value.dtype, device="cpu").copy_(value)
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        else value
        for key, value in state.items()
    }


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of `state` that later steps do not change."""
    return {
        key: value.detach().to("cpu", copy=True).contiguous() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }
