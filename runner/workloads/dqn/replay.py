"""What an agent remembers: transitions, packed into one preallocated tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch


class Transitions(NamedTuple):
    """n transitions on the device; views of one packed tensor."""

    observations: torch.Tensor
    """float32 [n, size]"""
    actions: torch.Tensor
    """int64 [n, 1]"""
    returns: torch.Tensor
    """The discounted sum of the rewards in between: float32 [n, 1]."""
    next_observations: torch.Tensor
    """float32 [n, size]"""
    discounts: torch.Tensor
    """What the value of the next observation counts for: float32 [n, 1]; 0 where the episode has come to its end."""


def row_width(observation_size: int) -> int:
    """Numbers of one transition: two observations, action, return, discount."""
    return 2 * observation_size + 3


def unpack(rows: torch.Tensor) -> Transitions:
    """The fields of packed transitions, [n, row_width]."""
    size = (rows.shape[1] - 3) // 2
    observations, following, actions, returns, discounts = rows.split_with_sizes((size, size, 1, 1, 1), 1)
    # The last row's action is a float, exact up to 2²⁴ actions.
    return Transitions(observations, actions.long(), returns, following, discounts)


class Replay:
    """The last `capacity` transitions (Lin, 1992; Mnih et al., 2015), one row of a float32 tensor each.

    Inserting writes a block of rows at the cursor; sampling gathers rows by index. No object a transition.

    Args:
        capacity: rows; memory is taken from the system as they fill up.
        observation_size: numbers of one observation.
        device: where the rows are, and where batches come from.
    """

    def __init__(self, capacity: int, observation_size: int, device: torch.device | str = "cpu"):
        self.capacity = capacity
        self.rows = torch.zeros(capacity, row_width(observation_size), device=device)
        self._host = self.rows.numpy() if self.rows.device.type == "cpu" else None
        self._length = self._cursor = 0

    def __len__(self) -> int:
        return self._length

    def add(self, rows: np.ndarray) -> None:
        """Write `rows`, float32 [n, row_width], over the oldest; in at most two blocks."""
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
        """The packed transitions at `indices`, int64 [n], counted in the order of the rows: [n, row_width]."""
        places = torch.from_numpy(indices)
        return self.rows.index_select(0, places.to(self.rows.device, non_blocking=True))

    def state_dict(self) -> dict[str, Any]:
        """The filled rows, on the CPU, and where the next one goes."""
        return {"rows": self.rows[: self._length].to("cpu", copy=True), "cursor": self._cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the rows of a replay; of one with another capacity, the newest that fit, in their order."""
        rows, cursor = state["rows"], state["cursor"]
        if len(rows) > self.capacity or (cursor != len(rows) % self.capacity and len(rows) != self.capacity):
            rows = torch.cat((rows[cursor:], rows[:cursor]))[-self.capacity :]  # oldest first
            cursor = len(rows) % self.capacity
        self.rows[: len(rows)] = rows.to(self.rows.device)
        self._length, self._cursor = len(rows), cursor
