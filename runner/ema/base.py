"""The base class of averages of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    CollectState = Callable[[torch.optim.Optimizer], tuple[dict[str, torch.Tensor], dict[str, Any]]]


class Average:
    """No average: evaluations use the weights of the model itself. Also the base class of all averages.

    A subclass keeps its average as the state of a `torch.optim.Optimizer`, because parallel modes can save and load
    such a state.
    """

    def update(self) -> None:
        """Update the average with the current weights of the model; called after each optimizer step."""

    def tensors(self) -> list[torch.Tensor]:
        """Return this rank's averaged weights; empty if there is no average, or before the first step."""
        return []

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the model has the averaged weights, for an evaluation."""
        yield

    def full_tensors(self, collect: CollectState) -> dict[str, torch.Tensor]:
        """Return the full tensors of the model by name, with the averaged weights in place of the trained parameters.

        Called on every rank. The dict is empty on ranks other than 0, and if there is no average.

        Args:
            collect: function `collect(optimizer)`, which returns `full_state(model, optimizer)` of the parallel mode.
        """
        return {}

    def load(self, tensors: Mapping[str, torch.Tensor], load: Callable[[torch.optim.Optimizer, Any], None]) -> None:
        """Restore the average from `tensors`, which `full_tensors` returned on rank 0.

        Every rank must call this method.

        Args:
            tensors: the tensors; empty if the checkpoint has no average. The average then begins after the next step.
            load: function `load(optimizer, state)`, which loads `state` into `optimizer` with `load_full_state` of the
                parallel mode. `state` has the form of the optimizer state that `full_state` returns.
        """

    def local_state(self, state_of: Callable[[torch.optim.Optimizer], dict[str, Any]]) -> dict[str, Any]:
        """Return the part of the average that `full_tensors` does not include; empty if there is no average.

        For example, each rank of an ensemble returns the averaged weights of its own member. The result is saved in the
        rank's own checkpoint file.

        Args:
            state_of: function `state_of(optimizer)`, which returns `local_state(model, optimizer)` of the parallel
                mode.
        """
        return {}

    def load_local(self, state: dict[str, Any], load: Callable[[torch.optim.Optimizer, Any], None]) -> None:
        """Restore `state`, which `local_state` returned.

        Args:
            state: the state; empty if the checkpoint has none.
            load: function `load(optimizer, state)`, which calls `load_local_state(model, optimizer, state)` of the
                parallel mode.
        """
