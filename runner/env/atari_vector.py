"""The vectorized environment of ale-py, with a seed for each game, and images of the first one in color."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorWrapper


class AtariVector(VectorWrapper):
    """Games that return single frames and true rewards.

    If they are `rendered`, a second emulator plays the first game with the same seeds and actions, and shows it in
    color: ale-py's vectorized games cannot be rendered, but are deterministic.
    """

    shared_rng = False

    def __init__(
        self, spec: EnvSpec, num_envs: int, options: dict[str, Any], images: dict[str, Any], rendered: bool
    ) -> None:
        # By default, ale-py starts a thread per core of the machine, in each process.
        options = {"num_threads": min(num_envs, torch.get_num_threads())} | options
        options |= {"stack_num": 1, "reward_clipping": False, "episodic_life": False}
        super().__init__(gymnasium.make_vec(spec, num_envs, "vector_entry_point", **options, **images))
        self._screen = None
        if rendered:
            in_color = {"img_height": 210, "img_width": 160, "grayscale": False}
            self._screen = gymnasium.make_vec(spec, 1, "vector_entry_point", **options | {"num_threads": 1}, **in_color)
        stacked: Any = self.env.single_observation_space
        self.single_observation_space = gymnasium.spaces.Box(0, 255, stacked.shape[1:], np.uint8)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        seeds: Any = np.arange(seed, seed + self.num_envs) if isinstance(seed, int) else np.array(seed)
        if self._screen is not None:
            self._image = self._screen.reset(seed=seeds[:1])[0]
        observations, infos = self.env.reset(seed=seeds, options=options)
        return observations[:, 0], infos

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if self._screen is not None:
            self._image = self._screen.step(actions[:1])[0]
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        return observations[:, 0], rewards, terminated, truncated, infos

    def render(self) -> tuple[np.ndarray, ...]:
        """Return the image of the first game, uint8 [210, 160, 3]."""
        return (self._image[0, 0],)

    def close(self, **kwargs: Any) -> None:
        """End the emulators, which otherwise live, and report leaks, until the process ends."""
        for envs in (self.env, self._screen):
            if envs is not None:
                vars(envs.unwrapped).pop("ale", None)
        self._screen = None
