"""A replay buffer of images that holds each frame once, and composes the stacks of frames of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from runner.storage.checkpoint import Part
from runner.storage.files import open_regular
from runner.storage.value_checks import COUNT, TensorSpec, UnexpectedContentError
from runner.workloads.dqn.replay import NStepBuffer, Replay, Transitions, row_width, unpack

if TYPE_CHECKING:
    from runner.env.vector import Pixels, Steps

MAX_FRAMES = 2**23  # float32 numbers them exactly up to twice as many, and some are kept besides the capacity

_PART_BYTES = 2**25
"""The approximate size of a file of frames in a checkpoint."""


class FrameReplay(Replay):
    """A replay buffer of about the last `capacity` transitions, whose observations are stacks of frames (`pixels`).

    All environments write a frame each at the same time: frame `s` of the ring belongs to environment s % num_envs, and
    the frame before it has the number s - num_envs. Row `s` is the transition that begins with frame `s`; its
    observations are numbers of frames, float32, which is exact up to 2²⁴.

    Steps that reset an environment count, too. `n_step` is the number of steps of a transition, and `device` that of
    the frames; the rows are on the CPU.
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        pixels: Pixels,
        n_step: int,
        device: torch.device | str,
        num_masked: int = 0,
    ):
        self.num_envs, self.pixels = num_envs, pixels
        # The oldest frames are only parts of stacks, and the transitions from the newest ones are not complete.
        self.num_times = -(-capacity // num_envs) + n_step + pixels.stack
        super().__init__(self.num_times * num_envs, 1, num_masked=num_masked)
        self.frames = torch.zeros(self.capacity, int(np.prod(pixels.frame_shape)), dtype=torch.uint8, device=device)
        self.ages = torch.zeros(self.capacity, dtype=torch.uint8)
        """The number of frames of the same episode before each frame, at most `pixels.stack` - 1."""
        self.complete = np.zeros(self.capacity, bool)
        """Whether a transition begins with a frame, and all of its frames are there."""
        self.times_per_part = max(1, _PART_BYTES // (num_envs * self.frames.shape[1]))
        self._layout = [num_envs, self.num_times, pixels.stack, *pixels.frame_shape]
        self._num_written = 0  # times at which frames were written
        self._restarts = True
        self._parts: dict[int, Part] = {}

    def store(self, window: NStepBuffer, observations: np.ndarray, actions: np.ndarray, steps: Steps) -> None:
        if self._restarts:
            self._write(observations, np.zeros(self.num_envs, np.uint8))
            self._restarts = False
        numbers = self._newest()
        ages = self.ages[numbers].numpy()
        self._write(steps.observations, np.where(steps.taken, np.minimum(ages + 1, self.pixels.stack - 1), 0))
        following = steps._replace(observations=self._newest()[:, None])
        rows = torch.from_numpy(window.push(numbers[:, None], actions, following))
        starts = rows[:, 0].long()
        self.rows[starts] = rows
        self.complete[starts.numpy()] = True

    def _newest(self) -> np.ndarray:
        """Return the numbers of the newest frames, int64 [num_envs]."""
        first = (self._num_written - 1) % self.num_times * self.num_envs
        return np.arange(first, first + self.num_envs)

    def _write(self, observations: np.ndarray, ages: np.ndarray) -> None:
        """Write the newest frame of each observation in place of the oldest ones."""
        part = self._parts.get((self._num_written - self.num_times) // self.times_per_part)
        if part is not None:
            part.written.wait()  # a checkpoint in the background has to read it before
        self._num_written += 1
        numbers = self._newest()
        for later in range(1, self.pixels.stack):  # stacks that the oldest frames were parts of
            stacks = (numbers + later * self.num_envs) % self.capacity
            self.complete[stacks] &= self.ages[stacks].numpy() < later
        self.complete[numbers] = False
        first = int(numbers[0])
        newest = observations[:, -self.pixels.frame_shape[0] :].reshape(self.num_envs, -1)
        self.frames[first : first + self.num_envs].copy_(torch.from_numpy(newest))
        self.ages[first : first + self.num_envs] = torch.from_numpy(ages)
        self._length = min(self._length + self.num_envs, self.capacity)

    def sample(self, random: np.random.Generator, count: int) -> torch.Tensor:
        numbers = random.integers(self._length, size=count)
        while not (usable := self.complete[numbers]).all():
            numbers[~usable] = random.integers(self._length, size=count - int(usable.sum()))
        return self.at(numbers)

    def batch(self, rows: torch.Tensor, device: torch.device) -> Transitions:
        unpacked = unpack(rows, self.num_masked)
        seen, actions, returns, following, discounts = unpacked[:5]
        stacks = self._stacks(torch.cat((seen, following))[:, 0].long()).to(device, non_blocking=True)
        actions, returns, discounts = (each.to(device, non_blocking=True) for each in (actions, returns, discounts))
        masks = None if unpacked.next_masks is None else unpacked.next_masks.to(device, non_blocking=True)
        return Transitions(stacks[: len(rows)], actions, returns, stacks[len(rows) :], discounts, next_masks=masks)

    def _stacks(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the observations whose newest frames have these `numbers`, uint8 [n, channels, height, width]."""
        back = torch.arange(self.pixels.stack - 1, -1, -1, dtype=torch.uint8)
        # Before its first frame, an episode has copies of it.
        back = torch.minimum(back, self.ages[numbers][:, None]).long()
        numbers = (numbers[:, None] - back * self.num_envs) % self.capacity
        frames = self.frames.index_select(0, numbers.flatten().to(self.frames.device, non_blocking=True))
        return frames.view(len(numbers), *self.pixels.shape)

    def restart(self) -> None:
        self._restarts = True

    # Checkpoints: full parts are files that later checkpoints share

    def parts(self) -> dict[str, Part]:
        """Return the full parts of the frames, by name: a name always stands for the same frames."""
        first = max(0, self._num_written - self.num_times) // self.times_per_part
        last = self._num_written // self.times_per_part
        self._parts = {index: Part(partial(self._write_part, index)) for index in range(first, last)}
        return {self._name(index): part for index, part in self._parts.items()}

    def _name(self, index: int) -> str:
        return f"frames_{self.begun}_{index:06d}"

    def _write_part(self, index: int, file: BinaryIO) -> None:
        start = index * self.times_per_part % self.num_times * self.num_envs
        end = start + self.times_per_part * self.num_envs
        for first, stop in ((start, min(end, self.capacity)), (0, end - self.capacity)):
            if first < stop:
                file.write(self.frames[first:stop].cpu().numpy().data)

    def state_dict(self) -> dict[str, Any]:
        """Return the state except `parts`: frames that do not fill a part yet are in it."""
        length, begin = self._length, self._num_written // self.times_per_part * self.times_per_part
        rest = self._numbers(begin, self._num_written).to(self.frames.device)
        return {
            "rows": self.rows[:length].clone(),
            "ages": self.ages[:length].clone(),
            "complete": torch.from_numpy(self.complete[:length].copy()),
            "rest": self.frames.index_select(0, rest).cpu(),
            "layout": self._layout,
            "begun": self.begun,
            "written": self._num_written,
        }

    def fits(self, state: dict[str, Any]) -> bool:
        """Return whether `state` is that of a buffer with the same number of environments and the same capacity."""
        return state["layout"] == self._layout

    def load_state_dict(self, state: dict[str, Any], parts: Mapping[str, Path] | None = None) -> None:
        """Restore the state that `state_dict` returned, and the frames in the files `parts`, by name.

        Raises one of `CONTENT_ERRORS` if the state or a file has other content, and an OSError if a file is missing.
        """
        rows, self._num_written, self.begun = state["rows"], state["written"], state["begun"]
        self._length = min(self._num_written, self.num_times) * self.num_envs
        known = ((rows[:, :2] >= 0) & (rows[:, :2] < self.capacity)).all()
        if not known or not state["complete"].any() or len(rows) != self._length:
            raise UnexpectedContentError("the replay buffer: rows that refer to other frames")
        self.rows[: self._length], self.ages[: self._length] = rows, state["ages"]
        self.complete[: self._length] = state["complete"].numpy()
        oldest, last = max(0, self._num_written - self.num_times), self._num_written // self.times_per_part
        for index in range(oldest // self.times_per_part, last):
            with open_regular((parts or {})[self._name(index)]) as file:
                content = torch.from_numpy(np.fromfile(file, np.uint8))
            self._restore(content, index * self.times_per_part, (index + 1) * self.times_per_part, oldest)
        self._restore(state["rest"], last * self.times_per_part, self._num_written, oldest)
        self._restarts = False

    def _restore(self, content: torch.Tensor, begin: int, end: int, oldest: int) -> None:
        """Write the frames of the times from `begin` to `end`, but not of those before `oldest`."""
        first = max(begin, oldest)
        content = content.view((end - begin) * self.num_envs, self.frames.shape[1])[(first - begin) * self.num_envs :]
        device = self.frames.device
        self.frames.index_copy_(0, self._numbers(first, end).to(device), content.to(device))

    def _numbers(self, begin: int, end: int) -> torch.Tensor:
        """Return the numbers of all frames that were written at the times from `begin` to `end`, int64."""
        first = torch.arange(begin, end)[:, None] % self.num_times * self.num_envs
        return (first + torch.arange(self.num_envs)).flatten()


def saved_form(frame_size: int, num_masked: int = 0) -> dict[str, Any]:
    """Return the form of what `FrameReplay.state_dict` returns, as for `check_like`."""
    return {
        "rows": TensorSpec(torch.float32, (None, row_width(1, num_masked))),
        "ages": TensorSpec(torch.uint8, (None,)),
        "complete": TensorSpec(torch.bool, (None,)),
        "rest": TensorSpec(torch.uint8, (None, frame_size)),
        "layout": [int],
        "begun": int,
        "written": COUNT,
    }
