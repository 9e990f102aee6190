"""A game with images of 12×12 pixels; importing this module registers it as Catch-v0."""

from typing import Any, ClassVar

import gymnasium
import numpy as np

SIZE = 12


class Catch(gymnasium.Env):
    """Catch falling balls with a paddle: a caught one pays 2, a missed one costs a life of three.

    The first three pixels are the seed and the numbers of the episode and of the step: no two frames are the same.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 10, "plain_state": True}
    observation_space = gymnasium.spaces.Box(0, 255, (SIZE, SIZE), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, render_mode: str | None = None, fall: int = 4) -> None:
        self.render_mode, self.fall, self.episode = render_mode, fall, -1
        self.name = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.name = self.name if seed is None else seed % 256
        self.episode, self.time, self.lives, self.paddle = self.episode + 1, 0, 3, SIZE // 2
        self.ball = [1, int(self.np_random.integers(SIZE))]
        return self.image(), {"lives": self.lives}

    def image(self) -> np.ndarray:
        image = np.zeros((SIZE, SIZE), np.uint8)
        image[tuple(self.ball)] = image[-1, self.paddle] = 255
        image[0, :3] = self.name, self.episode % 256, self.time % 256
        return image

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.time, reward = self.time + 1, 0.0
        self.paddle = min(max(self.paddle + int(action) - 1, 0), SIZE - 1)
        self.ball[0] += self.fall
        if self.ball[0] >= SIZE - 1:
            caught = abs(self.ball[1] - self.paddle) <= 1
            reward, self.lives = (2.0, self.lives) if caught else (0.0, self.lives - 1)
            self.ball = [1, int(self.np_random.integers(SIZE))]
        return self.image(), reward, self.lives == 0, False, {"lives": self.lives}

    def render(self) -> np.ndarray:
        return np.repeat(self.image()[:, :, None], 3, 2)


gymnasium.register("Catch-v0", Catch, max_episode_steps=40)
