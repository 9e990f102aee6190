"""The exponential moving average of the weights, kept as the state of an optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from runner.ema.base import Average
from runner.system.dtensor import local_part

if TYPE_CHECKING:
    from runner.ema.base import CollectState

log = logging.getLogger(__name__)


class MovingAverage(Average):
    """The exponential moving average of the trainable parameters of a model.

    The first update copies the parameters; each later update computes `decay · average + (1 − decay) · parameter`.

    Args:
        model: the model, as the parallel mode has placed it.
        decay: the weight of the previous average, above 0 and below 1.
    """

    def __init__(self, model: torch.nn.Module, decay: float):
        self._model = model
        self._optimizer = _Averages([p for p in model.parameters() if p.requires_grad], decay)

    def update(self) -> None:
        self._optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        return [state["average"] for state in self._optimizer.state.values()]

    @contextmanager
    def applied(self) -> Iterator[None]:
        weights = {p: p.detach().clone() for p in self._optimizer.state}
        _copy({p: state["average"] for p, state in self._optimizer.state.items()})
        try:
            yield
        finally:
            _copy(weights)

    def full_tensors(self, collect: CollectState) -> dict[str, torch.Tensor]:
        tensors, averages = collect(self._optimizer)
        return tensors | {name: state["average"] for name, state in averages.items()}

    def load(self, tensors: Mapping[str, torch.Tensor], load: Callable[[torch.optim.Optimizer, Any], None]) -> None:
        if not tensors:
            log.info("the checkpoint has no average of the weights: it begins after the next step (ema.decay)")
            return
        trained = [name for name, parameter in self._model.named_parameters() if parameter.requires_grad]
        load(self._optimizer, {name: {"average": tensors[name]} for name in trained})

    def local_state(self, state_of: Callable[[torch.optim.Optimizer], dict[str, Any]]) -> dict[str, Any]:
        return state_of(self._optimizer)

    def load_local(self, state: dict[str, Any], load: Callable[[torch.optim.Optimizer, Any], None]) -> None:
        if state:
            load(self._optimizer, state)


class _Averages(torch.optim.Optimizer):
    """The averages, as the state of an optimizer: parallel modes can shard, gather, save and load such a state."""

    def __init__(self, parameters: list[torch.nn.Parameter], decay: float):
        super().__init__(parameters, {"decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the average of each parameter; the first update copies the parameter."""
        for group in self.param_groups:
            parameters = group["params"]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["average"] = parameter.detach().clone()
            averages = [local_part(self.state[parameter]["average"]) for parameter in parameters]
            torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage]
                averages, [local_part(parameter) for parameter in parameters], 1 - group["decay"]
            )


@torch.no_grad()
def _copy(values: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Copy each value to the parameter that is its key: in place, because parallel modes hold views of parameters."""
    for parameter, value in values.items():
        local_part(parameter).copy_(local_part(value))
