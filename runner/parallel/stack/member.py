"""A run that is computed together with others, and the passes through its network for which it asks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.modules.dropout import _DropoutNd

from runner.batching import MicroBatch
from runner.config import user_code
from runner.parallel.base import Parallel
from runner.parallel.stack.updates import form_of
from runner.seeds import random_states, set_random_states
from runner.system.generators import OwnTurn
from runner.system.section_timer import timer
from runner.system.trees import Tree, leaves_of
from runner.system.turns import own_seat
from runner.tracking.metrics import BatchSums

log = logging.getLogger(__name__)

ALONE = object()
"""The answer to a request that the run computes itself."""


class Request(NamedTuple):
    """A pass through the network of one run: with a `weight`, of training; otherwise, for outputs.

    `batch` is that of the workload, or the inputs.
    """

    member: StackMember
    model: torch.nn.Module
    batch: Tree
    weight: float | None = None

    @property
    def order(self) -> int:
        """Return the order among requests: passes of training come last."""
        return 0 if self.weight is None else 2

    def form(self) -> tuple[Any, ...]:
        """Return what has to be the same for passes that are computed together."""
        leaves = tuple(
            (name, leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else (name, repr(leaf))
            for name, leaf in leaves_of(self.batch)
        )
        return self.weight is None, self.model.training, leaves


class UpdateRequest(NamedTuple):
    """An update of the parameters of one run by its optimizer."""

    optimizer: torch.optim.Optimizer
    order = 1

    def form(self) -> tuple[Any, ...]:
        """Return what has to be the same for updates that are computed together."""
        return form_of(self.optimizer)


class StackMember(Parallel):
    """The mode of a run that is computed together with others: a single device, whose passes a `Stack` computes."""

    description = "single device, together with other runs of its sweep"

    def __init__(self) -> None:
        seat = own_seat()
        assert seat is not None
        self._seat, self._random = seat, dict[str, torch.Tensor]()
        self._own_turn: OwnTurn | None = None  # if passes that are computed alone may draw random numbers

    def of_one_run(self) -> Parallel:
        return Parallel()

    def batches(self, model: torch.nn.Module, after_step: int) -> Iterator[Any]:
        acting: Any = _Acting(model, lambda *inputs: self._infer(model, inputs))
        return super().batches(acting, after_step)

    def accumulate(self, model: torch.nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> BatchSums | None:
        with timer.section("forward"):
            sums = self._asked(Request(self, model, batch, micro.weight))
        return super().accumulate(model, batch, micro, log_due) if sums is ALONE else sums

    def _infer(self, model: torch.nn.Module, inputs: Tree) -> Any:
        outputs = self._asked(Request(self, model, inputs))
        return super()._infer(model, inputs) if outputs is ALONE else outputs

    def local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self._own_turn is None and self._random:  # the states of the generators are saved next
            set_random_states(self._random, self._session.devices)
        return super().local_state(model, optimizer)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._asked(UpdateRequest(optimizer)) is ALONE:
            super().update(optimizer)

    def _asked(self, request: Request | UpdateRequest) -> Any:
        if not self._random and isinstance(request, Request):
            self._random = random_states(self.devices)
            has_dropout = any(isinstance(each, _DropoutNd) for each in request.model.modules())
            self._own_turn = OwnTurn(self.devices) if has_dropout or user_code.given().names() else None
        if self._own_turn is not None:
            self._own_turn.end()
        # These belong to the thread, which runs have in common.
        kind, has_gradients = self._session.device.type, torch.is_grad_enabled()
        is_cast = torch.is_autocast_enabled(kind)
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled(kind, False)
        answer = self._seat.ask(request)
        torch.set_grad_enabled(has_gradients)
        torch.set_autocast_enabled(kind, is_cast)
        if self._own_turn is not None:
            self._own_turn.begin()
        return answer

    # For the stack

    def warn(self, text: str, *values: Any) -> None:
        """Log a warning in the log of the run."""
        self._seat.exchange()
        log.warning(text, *values)
        self._seat.exchange()

    @property
    def devices(self) -> list[torch.device]:
        return self._session.devices

    def dtype(self, model: torch.nn.Module) -> torch.dtype:
        """Return the dtype in which passes are computed."""
        own = next((each.dtype for each in model.parameters()), torch.float32)
        return self._session.precision.compute_dtype(self._session.device) or own

    def modules(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """Return the network, and the loss if it is a module."""
        loss = self._session.workload.loss_module()
        return [model] if loss is None else [model, loss]

    def pass_of(self, request: Request, network: Callable[..., Any], batch: Tree) -> Tree:
        """Return the outputs of `network`; in training, the loss and the sums of the metrics."""
        session = self._session
        with torch.set_grad_enabled(request.weight is not None), session.precision.autocast():
            if request.weight is None:
                return session.workload.outputs(network, batch)  # pyright: ignore[reportArgumentType]
            return session.workload.loss(network, batch)  # pyright: ignore[reportArgumentType]


class _Acting:
    """A network by which an agent acts: calling it is a pass of its stack."""

    def __init__(self, model: torch.nn.Module, infer: Callable[..., Any]):
        self._model, self._infer = model, infer

    def __call__(self, *inputs: Any) -> Any:
        return self._infer(*inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
