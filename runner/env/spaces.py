"""What an agent of discrete actions can act in, and how observations become vectors."""

from __future__ import annotations

import gymnasium
from gymnasium import spaces

from runner.config.errors import check


def described(name: str, env: gymnasium.Env) -> tuple[tuple[int, ...], int]:
    """The shape of the observations as an agent gets them, and the number of actions; closes `env`.

    Raises:
        ConfigError: when the actions are not discrete, or the observations are not numbers of a fixed count.
    """
    actions, seen = env.action_space, env.observation_space
    env.close()
    why = f"its actions are {_words(actions)}, and deep Q-learning needs discrete ones"
    check(isinstance(actions, spaces.Discrete), "id", name, why, "choose another, as env=cartpole")
    assert isinstance(actions, spaces.Discrete)
    why = f"its observations are {_words(seen)}, which make no vector"
    check(seen.is_np_flattenable, "id", name, why, "choose another, as env=cartpole")
    shape = seen.shape if isinstance(seen, spaces.Box) else (spaces.flatdim(seen),)
    return tuple(shape), int(actions.n)


def needs_flattening(space: spaces.Space) -> bool:
    """Whether observations are no arrays: numbered states become one-hot vectors, tuples are laid end to end."""
    return not isinstance(space, spaces.Box)


def _words(space: spaces.Space) -> str:
    return f"continuous, {space.shape}" if isinstance(space, spaces.Box) else f"a {type(space).__name__}"
