"""Saving the running episodes of environments, for an exact resume.

Of gymnasium's classic control and toy text environments, and of those that say so by `plain_state` in their metadata,
the attributes are saved. Each episode of any other begins with a seed of its own, so that it can be replayed.
"""

from __future__ import annotations

from array import array
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from runner.seeds import derive
from runner.system.generators import OwnGenerators

_WITH_STATE = ("gymnasium.envs.classic_control.", "gymnasium.envs.toy_text.")
"""Packages of environments whose state is in their attributes."""

_PLAIN_TYPES = (bool, int, float, str, type(None), np.ndarray, np.number, np.bool_)

MAX_SEED = 2**31 - 1
"""Environments of others often take seeds of 31 bits only."""


class Replayed(NamedTuple):
    """How an episode stood after its actions had been replayed."""

    observation: Any
    """The last observation; None if an error was raised, an action followed its end, or the rewards were others."""
    ended: bool


def has_plain_state(env: Any) -> bool:
    """Return whether the state of an environment, or of a vectorized one, is in its attributes."""
    env = env.unwrapped
    return type(env).__module__.startswith(_WITH_STATE) or bool(env.metadata.get("plain_state"))


def episode_seed(seed: int, number: int) -> int:
    """Return the seed of an episode, by its `number`, of an environment that was reset with `seed`."""
    return derive(seed, "episode", number) % MAX_SEED if number else seed


class Episodes(gymnasium.Wrapper):
    """An environment whose running episode can be saved and restored, also from another process: `running_episode`.

    If it has no plain state, each episode begins with a seed, and its actions are recorded. If it `draws_globally`,
    from `random`, NumPy's generator or torch's, it has its own states of these, as in a process by itself.
    """

    def __init__(self, env: gymnasium.Env, draws_globally: bool = False):
        super().__init__(env)
        self._has_plain_state = has_plain_state(env)
        self._own = OwnGenerators() if draws_globally else None
        self._seed, self._number, self._actions, self._return = 0, 0, array("i"), 0.0
        self._is_over = False  # of a restored episode, which the vectorized environment does not know
        self.replayed: Replayed | None = None
        self.metadata = {**env.metadata, "saves_episodes": True}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._is_over = False
        if self._has_plain_state:
            return self.env.reset(seed=seed, options=options)
        self._seed, self._number = (self._seed, self._number + 1) if seed is None else (seed, 0)
        return self._begin(options)

    def _begin(self, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._actions, self._return, seed = array("i"), 0.0, episode_seed(self._seed, self._number)
        if type(self.unwrapped).__module__.startswith("minatar."):  # its sticky actions outlast a reset
            self.unwrapped.game.last_action = 0  # pyright: ignore[reportAttributeAccessIssue]
        with self._drawing(seed):
            return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._is_over:
            observation, info = self.reset()
            return observation, 0.0, False, False, info
        self._actions.append(int(action))
        with self._drawing():
            taken = self.env.step(action)
        self._return += float(taken[1])
        return taken

    def _drawing(self, seed: int | None = None) -> AbstractContextManager[None]:
        return nullcontext() if self._own is None else self._own.drawing(seed)

    @property
    def running_episode(self) -> dict[str, Any]:
        """The state of the running episode, as plain values and NumPy arrays, which processes send each other."""
        if self._has_plain_state:
            kept = [attributes(each) for each in chain(self.env)]
            return {"attributes": tree_map_only(torch.Tensor, torch.Tensor.numpy, kept)}
        record = {"seed": self._seed, "number": self._number, "actions": np.array(self._actions)}
        return record | {"return": self._return, "draws_globally": self._own is not None}

    @running_episode.setter
    def running_episode(self, state: dict[str, Any]) -> None:
        if self._has_plain_state:
            set_attributes(chain(self.env), state["attributes"])
            self._is_over = state["ended"]
            return
        self._own = OwnGenerators() if state["draws_globally"] else None
        self._seed, self._number, actions = state["seed"] % 2**63, state["number"], state["actions"].tolist()
        observation, ended = None, False
        try:
            observation, _ = self._begin()
            for action in actions:
                if ended:
                    raise RuntimeError("the episode has ended before")
                observation, _, terminated, truncated, _ = self.step(np.int64(action))
                ended = bool(terminated or truncated)
            if state.get("return", self._return) != self._return:  # of what no observation shows
                observation = None
        except Exception:  # of any type: an environment that is not deterministic may be in any state
            observation = None
        self._is_over = ended
        self.replayed = Replayed(observation, ended)


def chain(env: Any) -> list[Any]:
    """Return an environment and those that its wrappers wrap; wrappers have state, too, such as a time limit."""
    found = [env]
    while found[-1] is not env.unwrapped:
        found.append(found[-1].env)
    return found


def attributes(env: Any) -> dict[str, Any]:
    """Return the attributes with plain values, and the random generator; others, as spaces, do not change."""
    kept = {name: saved_value(value) for name, value in vars(env).items() if _is_plain(value)}
    generator = vars(env).get("_np_random")
    return kept if generator is None else kept | {"_np_random": {"random": generator.bit_generator.state}}


def set_attributes(envs: list[Any], states: list[dict[str, Any]]) -> None:
    """Restore what `attributes` returned of each of `envs`."""
    for each, state in zip(envs, states, strict=True):
        for name, kept in state.items():
            if name not in vars(each):  # it would hide a method
                raise AttributeError(f"{type(each).__name__} has no {name}")
            setattr(each, name, _restored(kept))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN_TYPES) and (not isinstance(value, np.ndarray) or value.dtype.kind in "biuf")


def saved_value(value: Any) -> Any:
    """Return a value as a checkpoint holds it: NumPy arrays as tensors, and NumPy scalars as `{"number": tensor}`."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, str):
        return str(value)  # a numpy string is also a str
    if isinstance(value, np.generic):
        return {"number": torch.from_numpy(np.array(value))}
    return type(value)(map(saved_value, value)) if isinstance(value, tuple | list) else value


def _restored(kept: Any) -> Any:
    if isinstance(kept, torch.Tensor):
        kept = kept.numpy()
    if isinstance(kept, np.ndarray):
        return kept.copy()
    if isinstance(kept, dict) and "random" in kept:
        generator = np.random.Generator(np.random.PCG64())
        generator.bit_generator.state = kept["random"]
        return generator
    if isinstance(kept, dict):
        return _restored(kept["number"])[()]
    return type(kept)(map(_restored, kept)) if isinstance(kept, tuple | list) else kept
