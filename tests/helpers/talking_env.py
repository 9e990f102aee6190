"""An environment that prints a letter outside ASCII at each reset; importing this module registers it as Talking-v0."""

from typing import Any

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


class Talking(CartPoleEnv):
    def reset(self, **options: Any) -> tuple[Any, dict]:
        print("ü")
        return super().reset(**options)


gymnasium.register("Talking-v0", f"{__name__}:Talking", max_episode_steps=20)
