"""The replay buffer: transitions packed into one preallocated tensor."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch


class Transitions(NamedTuple):
    """A batch of n transitions on the device of the model."""

    observations: torch.Tensor
    """float32 [n, size]"""
    actions: torch.Tensor
    """int64 [n, 1]"""
    returns: torch.Tensor
    """float32 [n, 1]: the discounted sum of the rewards of up to `n_step` environment steps."""
    next_observations: torch.Tensor
    """float32 [n, size]"""
    discounts: torch.Tensor
    """float32 [n, 1]: the factor of the next observation's value in the TD target; 0 if the episode terminated."""
    possible_returns: tuple[float, float] = (-math.inf, math.inf)
    """The least and the greatest discounted return of an episode, as far as known when the batch was sampled."""


def row_width(observation_size: int) -> int:
    """Return the number of values in a packed transition: two observations, action, return and discount."""
    return 2 * observation_size + 3


def unpack(rows: torch.Tensor, possible_returns: tuple[float, float] = (-math.inf, math.inf)) -> Transitions:
    size = (rows.shape[1] - 3) // 2
    observations, following, actions, returns, discounts = rows.split_with_sizes((size, size, 1, 1, 1), 1)
    # Actions are stored as float32, which is exact up to 2²⁴.
    return Transitions(observations, actions.long(), returns, following, discounts, possible_returns)


class Replay:
    """A replay buffer of the last `capacity` transitions (Lin, 1992; Mnih et al., 2015).

    Each transition is one row of a float32 tensor. On the CPU, the operating system allocates memory as rows are
    filled.
    """

    def __init__(self, capacity: int, observation_size: int, device: torch.device | str = "cpu"):
        self.capacity = capacity
        self.rows = torch.zeros(capacity, row_width(observation_size), device=device)
        self._host = self.rows.numpy() if self.rows.device.type == "cpu" else None
        self._length = self._cursor = 0

    def __len__(self) -> int:
        return self._length

    def add(self, rows: np.ndarray) -> None:
        """Add packed transitions, float32 [n, row_width]; in a full buffer, they overwrite the oldest transitions."""
        rows = rows[-self.capacity :]
        first = min(len(rows), self.capacity - self._cursor)
        self._write(self._cursor, rows[:first])
        if first < len(rows):
            self._write(0, rows[first:])
        self._cursor = (self._cursor + len(rows)) % self.capacity
        self._length = min(self._length + len(rows), self.capacity)

    def _write(self, start: int, rows: np.ndarray) -> None:
        if self._host is not None:
            self._host[start : start + len(rows)] = rows
        else:
            self.rows[start : start + len(rows)].copy_(torch.from_numpy(rows))

    def at(self, indices: np.ndarray) -> torch.Tensor:
        rows = torch.from_numpy(indices)
        return self.rows.index_select(0, rows.to(self.rows.device, non_blocking=True))

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows[: self._length].to("cpu", copy=True), "cursor": self._cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned; if not all saved rows fit, keep only the newest transitions."""
        rows, cursor = state["rows"], state["cursor"]
        if len(rows) > self.capacity or (cursor != len(rows) % self.capacity and len(rows) != self.capacity):
            rows = torch.cat((rows[cursor:], rows[:cursor]))[-self.capacity :]  # oldest first
            cursor = len(rows) % self.capacity
        self.rows[: len(rows)].copy_(rows)  # not `= rows.to(…)`, which takes the memory twice on the device
        self._length, self._cursor = len(rows), cursor
