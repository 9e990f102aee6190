"""Environments that are stepped together, and that tell a step from a reset."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import FlattenObservation

from runner.env import capture
from runner.env.spaces import needs_flattening


class EnvironmentBrokenError(Exception):
    """An environment raised, or told of something that is no number: which, when, and how to get there again."""


class Steps(NamedTuple):
    """What one action in each of n environments led to."""

    observations: np.ndarray
    """What is seen now: float32 [n, …]; for an episode that has just ended, the last of it."""
    rewards: np.ndarray
    """float [n]"""
    terminated: np.ndarray
    """Whether the episode came to its end: bool [n]."""
    truncated: np.ndarray
    """Whether it was cut off: bool [n]."""
    taken: np.ndarray
    """Where it was a step at all, bool [n]: the one after an end is a reset, whose action has no effect."""


def make(spec: EnvSpec, num_envs: int, vectorization: str, options: dict[str, Any]) -> VectorEnv:
    """gymnasium's environments, which reset themselves at the step after an episode's end."""
    if vectorization == "auto" and spec.vector_entry_point is not None:
        envs = gymnasium.make_vec(spec, num_envs, "vector_entry_point", **options)
        if envs.metadata.get("autoreset_mode") == AutoresetMode.NEXT_STEP:
            return envs
        envs.close()
    mode = "sync" if vectorization == "auto" else vectorization
    single = gymnasium.make(spec, **options)
    wrappers: list[Any] = [FlattenObservation] if needs_flattening(single.observation_space) else []
    if mode == "async":
        wrappers.append(partial(_in_worker, parent=os.getpid()))
    single.close()
    return gymnasium.make_vec(spec, num_envs, mode, wrappers=wrappers, **options)


def _in_worker(env: gymnasium.Env, parent: int) -> gymnasium.Env:
    """`env`, whose process, if it is not `parent`, ends when it is told to.

    It is forked off a run, whose handlers only take note of a signal: the run could not end before its environments.
    """
    if os.getpid() != parent:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the run closes its environments itself
    return env


class Vector:
    """n environments of the same name; a context that closes them.

    Args:
        envs: gymnasium's.
        name: theirs, for messages.
    """

    def __init__(self, envs: VectorEnv, name: str):
        self.envs, self.name, self.num_envs = envs, name, envs.num_envs
        self.shared_rng = not hasattr(envs, "env_fns")
        """Whether all environments draw from one stream of random numbers; else each has its own."""
        self._first_action = int(envs.single_action_space.start)  # pyright: ignore[reportAttributeAccessIssue]
        self.observations = np.empty(0, np.float32)

    def __enter__(self) -> Vector:
        return self

    def __exit__(self, *_: object) -> None:
        self.envs.close()

    def reset(self, seed: int | Sequence[int]) -> None:
        """Begin an episode in each environment.

        Args:
            seed: of them all, or one for each, where each has its own stream of random numbers.
        """
        self._seed = seed
        self._episodes = np.zeros(self.num_envs, np.int64)
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._ended = np.zeros(self.num_envs, bool)
        seeds: Any = seed if isinstance(seed, int) else list(seed)  # gymnasium's own type knows no list
        observations, _ = self._asked(lambda: self.envs.reset(seed=seeds))
        self._see(observations, np.zeros(self.num_envs))

    def step(self, actions: np.ndarray) -> Steps:
        """Act in each environment.

        Args:
            actions: from 0, int64 [n].

        Raises:
            EnvironmentBrokenError: when one raises, or tells of NaN or infinity.
        """
        taken = ~self._ended
        self._lengths = (self._lengths + 1) * taken
        self._episodes += self._ended
        if self._first_action:
            actions = actions + self._first_action
        observations, rewards, terminated, truncated, _ = self._asked(lambda: self.envs.step(actions))
        self._see(observations, rewards)
        self._ended = terminated | truncated
        return Steps(self.observations, rewards, terminated, truncated, taken)

    def _see(self, observations: np.ndarray, rewards: np.ndarray) -> None:
        self.observations = observations.astype(np.float32, copy=False)
        if not np.isfinite(self.observations.sum() + rewards.sum()):  # one look at all; which it is, is rarely asked
            flat = np.isfinite(observations.reshape(self.num_envs, -1)).all(1) & np.isfinite(rewards)
            if not flat.all():
                raise EnvironmentBrokenError(self._place("is not finite", int(flat.argmin())))

    def _asked(self, ask: Any) -> Any:
        try:
            return ask()
        except Exception as error:
            raise EnvironmentBrokenError(self._place(f"raised {type(error).__name__}: {error}")) from error

    def _place(self, what: str, index: int | None = None) -> str:
        """Where it happened, so that it can be made to happen again."""
        shown = range(self.num_envs)[:4] if index is None else [index]
        seeds = [self._seed] * self.num_envs if isinstance(self._seed, int) else list(self._seed)
        places = [
            f"environment {i} (seed {seeds[i]}), episode {self._episodes[i]}, step {self._lengths[i]}" for i in shown
        ]
        more = f" and {self.num_envs - 4} more" if index is None and self.num_envs > 4 else ""
        one_of = "one of: " if len(places) > 1 else ""
        return f"{self.name} {what}; {one_of}{'; '.join(places)}{more}"

    def render(self) -> np.ndarray:
        """What the first environment looks like: uint8 [height, width, 3]."""
        frames = self.envs.render()
        assert frames is not None
        return np.asarray(frames[0])

    # -----------------------------------------------------------------------------------------------------------------
    # Exact resume

    def state_dict(self) -> dict[str, Any] | None:
        """All that the next steps depend on, as plain values and tensors; None where it cannot be had."""
        inner = capture.state_of(self.envs)
        if inner is None:
            return None
        counts = {"episodes": self._episodes.tolist(), "lengths": self._lengths.tolist(), "ended": self._ended.tolist()}
        return counts | {"seed": self._seed, "envs": inner, "observations": capture.plain(self.observations)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._seed = state["seed"]
        self._episodes, self._lengths = (np.array(state[key], np.int64) for key in ("episodes", "lengths"))
        self._ended = np.array(state["ended"], bool)
        self.observations = capture.value(state["observations"])
        capture.restore(self.envs, state["envs"])
