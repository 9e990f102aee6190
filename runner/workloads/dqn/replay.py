"""N-step transitions, which are combined from the steps of environments, and the replay buffer that holds them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from runner.config.errors import ConfigError
from runner.storage.checkpoint import Part
from runner.system.cpu import local_world_size
from runner.system.memory import host_memory
from runner.system.torch_errors import is_out_of_memory

if TYPE_CHECKING:
    from runner.env.base import Env
    from runner.env.vector import Steps


class Transitions(NamedTuple):
    """A batch of n transitions on the device of the model."""

    observations: torch.Tensor
    """float32 [n, size], or uint8 [n, channels, height, width] of images"""
    actions: torch.Tensor
    """int64 [n, 1]"""
    returns: torch.Tensor
    """float32 [n, 1]: the discounted sum of the rewards of up to `n_step` environment steps."""
    next_observations: torch.Tensor
    """as `observations`"""
    discounts: torch.Tensor
    """float32 [n, 1]: the factor of the next observation's value in the TD target; 0 if the episode terminated."""
    possible_returns: tuple[Any, ...] = (-math.inf, math.inf)
    """The least and the greatest discounted return of an episode, scalars, as known when the batch was sampled."""
    next_masks: torch.Tensor | None = None
    """bool [n, actions]: the actions that are allowed at the next observation; None if all are, always."""

    @property
    def following(self) -> Any:
        """The next observations, with their masks if there are any, as a network takes them."""
        return self.next_observations if self.next_masks is None else (self.next_observations, self.next_masks)


_MASK_BITS = 24  # of a float32, which is exact up to 2²⁴


def mask_width(num_masked: int) -> int:
    return -(-num_masked // _MASK_BITS)


def row_width(observation_size: int, num_masked: int = 0) -> int:
    """Return the number of values in a packed transition: two observations, mask, action, return and discount.

    The mask is that of `num_masked` actions at the next observation. If it has none, all of them are allowed.
    """
    return 2 * observation_size + mask_width(num_masked) + 3


def packed_masks(masks: np.ndarray) -> np.ndarray:
    """Return masks, bool [n, actions], as they are stored in rows, float32 [n, mask_width]."""
    padded = np.zeros((len(masks), mask_width(masks.shape[1]) * _MASK_BITS), bool)
    padded[:, : masks.shape[1]] = masks
    return (padded.reshape(len(masks), mask_width(masks.shape[1]), _MASK_BITS) @ (1 << np.arange(_MASK_BITS))).astype(
        np.float32
    )


def unpack(rows: torch.Tensor, num_masked: int = 0) -> Transitions:
    words = mask_width(num_masked)
    size = (rows.shape[1] - 3 - words) // 2
    parts = rows.split_with_sizes((size, size, words, 1, 1, 1), 1)
    observations, following, packed, actions, returns, discounts = parts
    masks = None
    if num_masked:
        bits = packed.long()[:, :, None] >> torch.arange(_MASK_BITS, device=rows.device) & 1
        masks = bits.flatten(1)[:, :num_masked].bool()
        masks |= ~masks.any(1, keepdim=True)
    # Actions are stored as float32, which is exact up to 2²⁴.
    return Transitions(observations, actions.long(), returns, following, discounts, next_masks=masks)


def with_masks(rows: torch.Tensor, observation_size: int, num_masked: int) -> torch.Tensor:
    """Return rows [..., row_width] with masks that allow all actions, if they were saved without masks."""
    if rows.shape[-1] != row_width(observation_size):
        return rows
    before, after = rows[..., : 2 * observation_size], rows[..., 2 * observation_size :]
    return torch.cat((before, rows.new_zeros(*rows.shape[:-1], mask_width(num_masked)), after), -1)


def transition_bytes(env: Env) -> tuple[int, int]:
    """Return the bytes of the row and of the frame of a transition; without images, the row has the observations."""
    if env.pixels is None:
        return 4 * row_width(math.prod(env.shape), env.num_masked), 0
    return 4 * row_width(1, env.num_masked) + 2, math.prod(env.pixels.frame_shape)


def saved_bytes(env: Env, replay_size: int, env_steps: int) -> tuple[int, int]:
    """Return the bytes that the replay adds to each checkpoint, and those of the frames that checkpoints share."""
    row_bytes, frame_bytes = transition_bytes(env)
    # Older checkpoints, as the best one, may have frames that the newest one does not have.
    return min(env_steps, replay_size) * row_bytes, min(env_steps, 2 * replay_size) * frame_bytes


def check_host_memory(env: Env, replay_size: int, num_processes: int) -> None:
    """Refuse a replay buffer, divided among `num_processes`, that does not fit into the memory of this machine.

    The system allocates memory only as a buffer is filled, and kills the run when none is left.
    """
    free_bytes, bytes_per_row = host_memory()["available_bytes"] or 0, sum(transition_bytes(env)) * local_world_size()
    if (num_bytes := math.ceil(replay_size / num_processes) * bytes_per_row) > free_bytes:
        takes, free = f"{num_bytes / 1e9:.1f} GB", f"{free_bytes / 1e9:.1f} GB"
        why = f"the replay buffer takes {takes} on this machine, and {free} are free"
        remedy = f"use at most workload.replay_size={int(free_bytes // bytes_per_row) * num_processes}"
        raise ConfigError("workload.replay_size", replay_size, why, remedy)


@contextmanager
def memory_errors(replay_size: int) -> Iterator[None]:
    """Refuse the size of the replay buffer if memory runs out inside the context."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        why, remedy = "it does not fit into the memory", "reduce it, or set workload.replay_device=cpu"
        raise ConfigError("workload.replay_size", replay_size, why, remedy) from error


class Replay:
    """A replay buffer of the last `capacity` transitions (Lin, 1992; Mnih et al., 2015).

    Each transition is one row of a float32 tensor. On the CPU, the operating system allocates memory as rows are
    filled.
    """

    begun = 0
    """The optimizer step after which the buffer was begun, with new transitions."""

    def __init__(self, capacity: int, observation_size: int, device: torch.device | str = "cpu", num_masked: int = 0):
        self.capacity, self.num_masked = capacity, num_masked
        self.rows = torch.zeros(capacity, row_width(observation_size, num_masked), device=device)
        self._length = self._cursor = 0

    def __len__(self) -> int:
        return self._length

    def add(self, rows: np.ndarray) -> None:
        """Add packed transitions, float32 [n, row_width]; in a full buffer, they overwrite the oldest transitions."""
        rows = rows[-self.capacity :]
        first = min(len(rows), self.capacity - self._cursor)
        self.rows[self._cursor : self._cursor + first].copy_(torch.from_numpy(rows[:first]))
        if first < len(rows):
            self.rows[: len(rows) - first].copy_(torch.from_numpy(rows[first:]))
        self._cursor = (self._cursor + len(rows)) % self.capacity
        self._length = min(self._length + len(rows), self.capacity)

    def at(self, indices: np.ndarray) -> torch.Tensor:
        rows = torch.from_numpy(indices)
        return self.rows.index_select(0, rows.to(self.rows.device, non_blocking=True))

    def store(self, window: NStepBuffer, observations: np.ndarray, actions: np.ndarray, steps: Steps) -> None:
        """Add the transitions that `window` completes when it is given a step of each environment (see its `push`)."""
        seen, following = (each.reshape(len(actions), -1) for each in (observations, steps.observations))
        self.add(window.push(seen, actions, steps._replace(observations=following)))

    def sample(self, random: np.random.Generator, count: int) -> torch.Tensor:
        """Return `count` rows, drawn uniformly with replacement, on the device of the rows."""
        return self.at(random.integers(len(self), size=count))

    def batch(self, rows: torch.Tensor, device: torch.device) -> Transitions:
        """Return the transitions of sampled rows on `device`."""
        return unpack(rows.to(device, non_blocking=True), self.num_masked)

    def restart(self) -> None:
        """Prepare for new episodes in all environments, whose last ones have not ended."""

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows[: self._length].to("cpu", copy=True), "cursor": self._cursor}

    def parts(self) -> dict[str, Part]:
        """Return parts of the state that do not change any more, by name; see `Workload.parts`."""
        return {}

    def load_state_dict(self, state: dict[str, Any], parts: Mapping[str, Path] | None = None) -> None:
        """Restore the state that `state_dict` returned; if not all saved rows fit, keep only the newest transitions.

        `parts` are the files of what the method `parts` returned.
        """
        rows, cursor = state["rows"], state["cursor"]
        if len(rows) > self.capacity or (cursor != len(rows) % self.capacity and len(rows) != self.capacity):
            rows = torch.cat((rows[cursor:], rows[:cursor]))[-self.capacity :]  # oldest first
            cursor = len(rows) % self.capacity
        self.rows[: len(rows)].copy_(rows)  # not `= rows.to(…)`, which takes the memory twice on the device
        self._length, self._cursor = len(rows), cursor


class NStepBuffer:
    """Sums the discounted rewards of `length` steps, or of fewer at the end of an episode, into n-step transitions.

    Sutton and Barto, Reinforcement Learning (2018), chapter 7; Hessel et al., Rainbow (2018). The value after a
    terminated episode is 0; a truncated episode is bootstrapped from its last observation (Pardo et al., Time Limits in
    Reinforcement Learning, 2018).
    """

    def __init__(self, num_envs: int, observation_size: int, length: int, discount: float, num_masked: int = 0):
        self.length, self.size, self.discount = length, observation_size, discount
        # A ring buffer of the last `length` steps; all environments write to the same slot at the same time.
        self._rows = np.zeros((length, num_envs, row_width(observation_size, num_masked)), np.float32)
        self._returns = np.zeros((length, num_envs))
        self._open = np.zeros((length, num_envs), bool)
        self._time = 0
        ages = (np.arange(length)[:, None] - np.arange(length)) % length  # the age of slot j when slot i is written
        self._weights = (discount**ages)[:, :, None]

    def push(self, observations: np.ndarray, actions: np.ndarray, steps: Steps) -> np.ndarray:
        """Add one step of each environment, and return the transitions that these steps complete.

        `observations` are those before the step, vectors [num_envs, observation_size], as those of `steps`, and
        `actions` int64 [num_envs]. Transitions are packed, float32 [m, row_width].
        """
        rewards, terminated, truncated, taken = steps[1:5]
        slot = self._time % self.length
        self._time += 1
        written = self._rows[slot]
        written[:, : self.size] = observations
        written[:, -3] = actions
        self._open[slot] = taken
        self._returns[slot] = 0
        self._returns += self._weights[slot] * rewards
        # The oldest transitions are complete and, where an episode ends, also the later ones.
        closing = self._open & (terminated | truncated)
        oldest = (slot + 1) % self.length
        closing[oldest] |= self._open[oldest]
        self._open &= ~closing
        slots, envs = closing.nonzero()
        rows = self._rows[slots, envs]
        rows[:, self.size : 2 * self.size] = steps.observations[envs]
        if steps.masks is not None:
            rows[:, 2 * self.size : -3] = packed_masks(steps.masks[envs])
        rows[:, -2] = self._returns[slots, envs]
        rows[:, -1] = self.discount ** ((slot - slots) % self.length + 1) * ~terminated[envs]
        return rows

    def state_dict(self) -> dict[str, Any]:
        arrays = {"rows": self._rows, "returns": self._returns, "open": self._open}
        return {"time": self._time} | {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._time = state["time"]
        for array, name in ((self._rows, "rows"), (self._returns, "returns"), (self._open, "open")):
            array[...] = state[name].numpy()
