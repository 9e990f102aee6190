"""The base class of averages of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    CollectState = Callable[[torch.optim.Optimizer], tuple[dict[str, torch.Tensor], dict[str, Any]]]


class Average:
    """The base class of averages, which computes no average: evaluations use the weights of the model itself."""

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
        """Return a dict of the full tensors of the model by name, in which averages replace the trained parameters.

        The result is empty if there is no average, and on ranks other than 0. Called on every rank.

        Args:
            collect: the parallel mode's `full_state` for the model. This method calls it with the optimizer that holds
                the average. It returns a pair of dicts: the full tensors of the model by name, and the state of the
                optimizer by parameter name. Both dicts are empty except on rank 0.
        """
        return {}

    def load(self, tensors: Mapping[str, torch.Tensor], load: Callable[[torch.optim.Optimizer, Any], None]) -> None:
        """Restore the average from `tensors`, which `full_tensors` returned.

        Args:
            tensors: the tensors; empty if the checkpoint has no average. The average then begins after the next step.
            load: function that loads the state of an optimizer from full tensors by parameter name; called on every
                rank.
        """

    def local_state(self, state_of: Callable[[torch.optim.Optimizer], dict[str, Any]]) -> dict[str, Any]:
        """Return the part of the average that `full_tensors` does not include, for this rank's own checkpoint file.

        An example is the averaged weights of this rank's ensemble member. The result is empty if there is no average.

        Args:
            state_of: the parallel mode's `local_state` for the model. This method calls it with the optimizer that
                holds the average. It returns the part of this rank's state that `full_state` does not include.
        """
        return {}

    def load_local(self, state: dict[str, Any], load: Callable[[torch.optim.Optimizer, Any], None]) -> None:
        """Restore `state`, which `local_state` returned.

        Args:
            state: the state; empty if the checkpoint has none.
            load: the parallel mode's `load_local_state` for the model. This method calls it with the optimizer that
                holds the average, and the state to load into it.
        """
