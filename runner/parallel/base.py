"""The single-device mode, and with it the contract: a mode overrides only its difference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from runner.batching import MicroBatch
from runner.clock import clock
from runner.config import check
from runner.device import Device
from runner.optimizer import trainable
from runner.parallel.cluster import outer_processes
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

    def prepare(self, device: torch.device, run: Run) -> None:
        """Do the checks that need the device and the other parts; `device` is rank 0's.

        Raises:
            ConfigError: with the bare name of a field.
        """
        started = outer_processes()
        why = f"{started} processes were started by torchrun or SLURM, and this mode has one"
        check(started == 1, "processes", started, why, "choose parallel=ddp or fsdp, or start one process")

    def check_workload(self, run: Run) -> None:
        """Do the checks that need the workload, whose data is there.

        Raises:
            ConfigError: with the key from the root.
        """

    def joined(self, run: Run) -> AbstractContextManager:
        """A context in which the processes that another launcher started are one run; nothing without such a launcher.

        Raises:
            ConfigError: when they were started with different configs.
        """
        return nullcontext()

    def launch(self, train: Callable[[Run], Result], run: Run) -> Result:
        """Call `train(run)` in every process of the mode; returns rank 0's result.

        Args:
            train: a function of a module: it is called in other processes too.

        Raises:
            RankError: when one of several processes fails, or dies.
        """
        return train(run)

    def on_rank_0(self, make: Callable[[], Any]) -> Any:
        """What `make()` gives or raises on rank 0, on every rank."""
        return make()

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

    @property
    def turn(self) -> tuple[int, int]:
        """(index, count): this process trains on one of every `count` global batches; (0, 1) where it does on each."""
        return (0, 1)

    @property
    def eval_shard(self) -> tuple[int, int]:
        """(index, count): which part of the held-out data this process evaluates."""
        return self.data_shard

    @property
    def num_parts(self) -> int:
        """Into how many parts the mode splits each micro-batch, one after the other."""
        return 1

    @property
    def incomparable(self) -> str:
        """Why no single device computes the same; empty where one does."""
        return ""

    @property
    def random_stream(self) -> int:
        """Which stream of random numbers this process draws from, once the weights are made."""
        return self.rank

    def device(self, choice: Device) -> torch.device:
        """The device of this process."""
        return choice.resolve()

    def place(self, model: torch.nn.Module, device: torch.device, run: Run) -> torch.nn.Module:
        """Put the model where it computes: move, shard or cut it.

        Returns:
            The module whose parameters are trained, under their plain names. A mode that calls it through a wrapper
            keeps the wrapper to itself.
        """
        move(model, device, run.channels_last)
        if run.compile:
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
            return self.whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        return self.whole(torch.nn.utils.clip_grad_norm_(parameters, max_norm))

    def infer(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """The forward pass of an evaluation."""
        return model(inputs)

    def evaluate(
        self, model: torch.nn.Module, workload: Workload, precision: Precision, device: torch.device
    ) -> tuple[dict[str, float], Sums]:
        """Evaluate the model, which the caller has put into evaluation mode, on the held-out data.

        Returns:
            The metrics, and the sums over all ranks that they were made of.
        """
        with torch.inference_mode(), precision.autocast():
            sums = workload.evaluate(partial(self.infer, model), self.eval_shard, device)
        sums = self.reduce(sums)
        return workload.summarize(sums), sums

    def reduce(self, sums: Sums) -> Sums:
        """Add up sums over all ranks: as sums and counts, ragged shards stay exact."""
        return sums

    def share_of(self, sums: torch.Tensor) -> torch.Tensor:
        """This rank's share of what `reduce` gave: those of all ranks give it again."""
        return sums if self.rank == 0 else torch.zeros_like(sums)

    def agree(self, flag: bool) -> bool:
        """Whether any rank has said so: all must leave a loop at the same step. The answer may come a call later."""
        return flag

    def anywhere(self, flag: torch.Tensor) -> None:
        """Set `flag`, a scalar on the device, to the largest of all ranks that hold parts of one gradient."""

    def scalars(self) -> dict[str, float]:
        """What to log of the mode itself, since it was asked last; every rank asks at once."""
        return {}

    def pictures(self) -> dict[str, torch.Tensor]:
        """What a step of the mode looks like: RGB images, uint8 [3, height, width], by TensorBoard tag."""
        return {}

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def full_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Sums, dict[str, Any]]:
        """The mode-free state: plain names, whole tensors, on the CPU.

        Returns:
            The model's tensors by name, and the optimizer's state by parameter name: `{"layer.weight":
            {"momentum_buffer": tensor, …}, …}`. Off rank 0, which writes them, they hold nothing.
        """
        return self._state_on_cpu(model, optimizer, kept=self.rank == 0)

    def _state_on_cpu(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, kept: bool
    ) -> tuple[Sums, dict[str, Any]]:
        """The full state as whole copies that later steps do not change; every rank takes part in making them."""

        def copied(state: dict[str, Any]) -> dict[str, Any]:
            copies = {}
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    value = self.whole(value.detach())
                    value = value.to("cpu", copy=True).contiguous() if kept else None
                copies[key] = value
            return copies if kept else {}

        names = {id(parameter): name for name, parameter in model.named_parameters()}
        states = {names[id(parameter)]: state for parameter, state in optimizer.state.items()}
        moments = {name: copied(states[name]) for name in names.values() if name in states}
        return copied(model.state_dict()), moments if kept else {}

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
        own = model.state_dict()
        model.load_state_dict({name: self.part(own[name], t) if name in own else t for name, t in tensors.items()})
        self._load_moments(model, optimizer, moments)

    def _load_moments(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, moments: dict[str, Any]) -> None:
        """Take over an optimizer's state by parameter name."""
        parameters = dict(model.named_parameters())
        places = {name: i for i, name in enumerate(_names_in_order(model, optimizer))}
        packed = optimizer.state_dict()
        packed["state"] = {places[name]: self._moments_of(parameters[name], moments[name]) for name in moments}
        optimizer.load_state_dict(packed)

    def local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What this rank alone has, beside the full state."""
        return {}

    def load_local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Take over `local_state()`'s, after the full state; empty where this rank had none."""

    def gathered(self, tensors: Sums) -> Sums:
        """Tensors of the model by name, whole, on the CPU, from all ranks that have some; on rank 0."""
        return {name: self.whole(tensor).to("cpu", copy=True) for name, tensor in tensors.items()}

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the model, the gradients or the optimizer, whole; every rank asks at once."""
        return tensor

    def part(self, like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank keeps of the whole `tensor`, in the manner of `like`."""
        return tensor

    def _moments_of(self, parameter: torch.nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's state with its tensors in the memory layout of their parameter.

        The fused CPU kernels walk through memory, and pair the numbers of two layouts wrongly, without a word.
        """
        return {
            key: _laid_out_as(parameter, self.part(parameter, value))
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape
            else value
            for key, value in state.items()
        }


def move(model: torch.nn.Module, device: torch.device, channels_last: bool) -> None:
    """Bring `model` to `device`, and into its memory layout."""
    model.to(device)
    if channels_last:
        # pyright knows no overload of `to` with a memory format alone
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def _names_in_order(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in the order that its state counts them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _laid_out_as(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` in the memory layout of `parameter`."""
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
