"""Exponential moving averages of the weights. Evaluations use the average; checkpoints hold it beside the weights."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from runner.config.limits import Range

log = logging.getLogger(__name__)


@dataclass
class Ema:
    """An exponential moving average of the weights (Polyak averaging; Tarvainen and Valpola, Mean Teacher, 2017).

    As `torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))`: it begins with the
    weights after the first step; buffers are not averaged. Evaluations, and so the best checkpoint, use the averaged
    weights.
    """

    decay: Annotated[float, Range(above=0, below=1)] | None = None

    def build(self, model: torch.nn.Module) -> Average:
        """Return the average for `model`, which the parallel mode has placed; without `decay`, it has no effect."""
        return Average(model, self.decay)

    def too_slow(self, num_steps: int) -> str:
        """Return a warning if the weights after the first step keep a share of 10 %, decay^(num_steps − 1), or more."""
        share = 0.0 if self.decay is None else self.decay ** (num_steps - 1)
        if share < 0.1:
            return ""
        window = max(2.0, num_steps / 10)
        return (
            f"ema.decay={self.decay} is too large for {num_steps:,} steps: {share:.0%} of the last average are the "
            f"weights after the first step; ema.decay={1 - 1 / window:.4g} averages over about {window:.0f} steps"
        )


class Average:
    """The average of the trainable parameters: the state of an optimizer, which modes can shard, gather and save.

    Without a `decay`, there is none, and evaluations use the weights of the model itself.

    Attributes:
        optimizer: it has the averages, as the state of the weights.
    """

    def __init__(self, model: torch.nn.Module, decay: float | None):
        self._trained = {} if decay is None else {name: p for name, p in model.named_parameters() if p.requires_grad}
        group = {"params": [*self._trained.values()], "decay": decay}
        self.optimizer = _averages_class()([group], {})

    def update(self) -> None:
        """Update the average with the current weights of the model; called after each optimizer step."""
        if self._trained:
            self.optimizer.step()

    def pairs(self) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], bool]:
        """Return each average, zeros before the first step, and its weights; and whether there has been a step."""
        weights, state = self._trained.values(), self.optimizer.state
        has_begun = all(state[weight] for weight in weights)
        for weight in weights:
            if not has_begun:
                state[weight]["average"] = torch.zeros_like(weight)
        return [(state[weight]["average"], weight) for weight in weights], has_begun

    def tensors(self) -> list[torch.Tensor]:
        """Return this rank's averaged weights; empty if there is no average, or before the first step."""
        return [state["average"] for state in self.optimizer.state.values()]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the model has the averaged weights, for an evaluation."""
        weights = {p: p.detach().clone() for p in self.optimizer.state}
        _copy({p: state["average"] for p, state in self.optimizer.state.items()})
        try:
            yield
        finally:
            _copy(weights)

    def full_tensors(self, collect: Callable[..., tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, torch.Tensor]:
        """Return the full tensors of the model by name, with the averaged weights; empty on ranks other than 0.

        `collect(optimizer)` returns the `full_state` of the parallel mode.
        """
        if not self._trained:
            return {}
        with self.applied():  # so that a tied weight is averaged under all of its names
            return collect(self.optimizer)[0]

    def load(self, tensors: Mapping[str, torch.Tensor], load: Callable[..., None]) -> None:
        """Restore the average from `tensors`, which `full_tensors` returned on rank 0; called on every rank.

        `load(optimizer, state)` loads a state with the parallel mode.
        """
        if self._trained and not tensors:
            log.info("the checkpoint has no average of the weights: it begins after the next step (ema.decay)")
        elif self._trained:
            load(self.optimizer, {name: {"average": tensors[name]} for name in self._trained})


@functools.cache
def _averages_class() -> Any:
    """Return the class `Averages`; its base class would load torch on import."""

    class Averages(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                parameters = group["params"]
                for parameter in parameters:
                    if not self.state[parameter]:
                        self.state[parameter]["average"] = parameter.detach().clone()
                averages = [_local(self.state[parameter]["average"]) for parameter in parameters]
                update = torch.optim.swa_utils.get_ema_multi_avg_fn(group["decay"])
                update(averages, [*map(_local, parameters)], None)

    return Averages


def _copy(values: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Copy each value to the parameter that is its key: in place, because parallel modes hold views of parameters."""
    with torch.no_grad():
        for parameter, value in values.items():
            _local(parameter).copy_(_local(value))


def _local(tensor: Any) -> torch.Tensor:
    """Return the part of a DTensor that this process holds, or any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
