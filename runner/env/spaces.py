"""Checks of the observation and action spaces of environments."""

from __future__ import annotations

import gymnasium
from gymnasium import spaces

from runner.config.errors import check


def shape_and_actions(name: str, env: gymnasium.Env) -> tuple[tuple[int, ...], int]:
    """Return the shape of observations, flattened if they are no arrays, and the number of actions; close `env`.

    Raises:
        ConfigError: if actions are not discrete, or observations cannot be flattened to a fixed number of values.
    """
    actions, observations = env.action_space, env.observation_space
    env.close()
    why = f"its action space is {_description(actions)}, and deep Q-learning needs discrete actions"
    check(isinstance(actions, spaces.Discrete), "id", name, why, "choose another environment, such as env=cartpole")
    assert isinstance(actions, spaces.Discrete)
    why = f"its observation space is {_description(observations)}, which cannot be flattened to a vector"
    check(observations.is_np_flattenable, "id", name, why, "choose another environment, such as env=cartpole")
    shape = observations.shape if isinstance(observations, spaces.Box) else (spaces.flatdim(observations),)
    return tuple(shape), int(actions.n)


def needs_flattening(space: spaces.Space) -> bool:
    """Return whether observations are not arrays: Discrete spaces become one-hot vectors, tuples are concatenated."""
    return not isinstance(space, spaces.Box)


def _description(space: spaces.Space) -> str:
    return f"continuous, {space.shape}" if isinstance(space, spaces.Box) else f"a {type(space).__name__}"
