"""Images that environments return: how they become observations, and skipped frames."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import numpy as np

from runner.config.errors import check


class Pixels(NamedTuple):
    """How the images that an environment returns become observations, uint8 [channels, height, width]."""

    axes: tuple[int, ...]
    """The permutation of the axes of a batch of images that puts the channels first; () if they have no channels."""
    frame_shape: tuple[int, int, int]
    """The channels, height and width of one frame."""
    stack: int
    """Number of frames in an observation, the oldest first; before its first, an episode has copies of that frame."""
    scale: float
    """The factor that maps the values to [0, 1]."""

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.frame_shape
        return self.stack * channels, height, width

    @property
    def origin(self) -> str:
        """What a run says about where the channels come from."""
        axis = "first" if self.axes == (0, 1, 2, 3) else "last"
        return f" ({self.frame_shape[0]} channels, the {axis} axis of the images)" if self.axes else ""

    def frames(self, images: np.ndarray) -> np.ndarray:
        """Return `images` [n, …] as frames, uint8 [n, channels, height, width]."""
        return (images.transpose(self.axes) if self.axes else images[:, None]).astype(np.uint8)

    def stacked(self, before: np.ndarray, images: np.ndarray, restarted: np.ndarray) -> np.ndarray:
        """Return the observations that follow those `before`, as a new array, given the new images [n, …].

        `restarted`, bool [n], is True where a new episode begins.
        """
        frames = self.frames(images)
        if self.stack == 1:
            return frames
        observations = np.concatenate((before[:, self.frame_shape[0] :], frames), 1)
        if restarted.any():
            observations[restarted] = np.tile(frames[restarted], (1, self.stack, 1, 1))
        return observations


class SkipFrames(gymnasium.Wrapper):
    """Repeats an action for `skip` frames, or to the end of the episode; returns the maximum of the last two of them.

    gymnasium's `MaxAndSkipObservation` returns older frames if the episode ends before the action was repeated.
    """

    def __init__(self, env: gymnasium.Env, skip: int):
        super().__init__(env)
        self._skip = skip

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        frames: list[np.ndarray] = []
        total, terminated, truncated, info = 0.0, False, False, {}
        for _ in range(self._skip):
            frame, reward, terminated, truncated, info = self.env.step(action)
            frames = [*frames[-1:], np.array(frame)]  # a copy: environments may return the same array again
            total += float(reward)
            if terminated or truncated:
                break
        return np.maximum.reduce(frames), total, terminated, truncated, info


def pixels_of(name: str, space: gymnasium.Space, stack: int, channels: str | None = None) -> Pixels | None:
    """Return how observations of `space` are images; None if they are vectors.

    uint8 or bool arrays [height, width], or with an axis of channels, are images. `channels` says which axis that is,
    `first` or `last`; None is the last one, and shapes for which that is in doubt are refused: [h, w, c] is taken if h
    and w are equal, or both are larger than c. Other arrays with two axes, such as stacked vectors or the features of
    several objects, are flattened, as by Stable-Baselines3; others with three are refused.
    """
    high: Any = getattr(space, "high", 1.0)
    shape: Any = space.shape or ()
    is_image = space.dtype in (np.uint8, np.bool_)
    as_text = "×".join(map(str, shape))
    if not isinstance(space, gymnasium.spaces.Box) or len(shape) < (2 if is_image else 3):
        why = "only images are stacked, and its observations are vectors"
        check(stack == 1, "frame_stack", stack, why, "env.frame_stack=1")
        shape = ()
    fits = len(shape) <= 3 and (is_image or not shape)
    why = f"its observations are {space.dtype} {as_text}, and images are uint8 or bool, with channels"
    remedy = "wrap the environment so that it returns single frames of uint8, 0 to 255; env.frame_stack stacks them"
    check(fits, "id", name, why, remedy)
    if len(shape) < 3:
        check(channels is None, "channels", channels, f"the observations of {name} have no channels", "leave it out")
        if not shape:
            return None
    elif channels is None:
        height, width, last = shape
        clear = height == width or last < min(height, width)
        why = f"images of {as_text} may have {last} or {height} channels, in the last or in the first axis"
        check(clear, "channels", channels, why, "env.channels=last, or env.channels=first")
    axes = () if len(shape) == 2 else (0, 1, 2, 3) if channels == "first" else (0, 3, 1, 2)
    frame_shape = tuple(shape[axis - 1] for axis in axes[1:]) or (1, *shape)
    return Pixels(axes, frame_shape, stack, 1 / max(1.0, float(np.max(high))))
