"""Checks of the observation and action spaces of environments."""

from __future__ import annotations

import gymnasium
from gymnasium import spaces

from runner.config.errors import check


def shape_and_actions(name: str, env: gymnasium.Env) -> tuple[tuple[int, ...], int]:
    """Return the shape of the observations of `env` and its number of actions, and close `env`.

    Observations that are not arrays have the shape of the vector to which they are flattened.

    Args:
        name: the name of the environment, for error messages.
        env: the environment.

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
    """Return whether observations from `space` must be flattened to vectors, because they are not arrays.

    Flattening turns a discrete value into a one-hot vector, and concatenates the items of a tuple.
    """
    return not isinstance(space, spaces.Box)


def _description(space: spaces.Space) -> str:
    return f"continuous, {space.shape}" if isinstance(space, spaces.Box) else f"a {type(space).__name__}"
