"""Vectorized environments. The result of a step shows which environments were reset in this step."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from gymnasium.wrappers import FlattenObservation

from runner.config.errors import ConfigError, check
from runner.env import environment_state
from runner.storage.content_checks import UnexpectedContentError, check_like
from runner.system.forkserver import METHOD, start_server, without_main_module
from runner.system.signals import STOP_SIGNALS

_UNBOUNDED = 1e6
"""Bounds with at least this absolute value count as infinite: some environments give the largest float instead."""


class EnvironmentBrokenError(Exception):
    """Raised when an environment raises an error or returns values that are not finite, with its seed and step."""


class Steps(NamedTuple):
    """The results of one step in each of n environments."""

    observations: np.ndarray
    """float32 [n, …]: the observations after the step; for an episode that ended, its last observation."""
    rewards: np.ndarray
    """float [n]: the rewards of the step."""
    terminated: np.ndarray
    """bool [n]: whether the episode reached a terminal state."""
    truncated: np.ndarray
    """bool [n]: whether the episode was truncated."""
    taken: np.ndarray
    """bool [n]: False where the action was ignored and the environment was reset, because its episode had ended."""


def shape_and_actions(name: str, env: gymnasium.Env) -> tuple[tuple[int, ...], int]:
    """Return the shape of the observations of `env`, called `name`, and its number of actions; and close `env`."""
    actions, observations = env.action_space, env.observation_space
    env.close()
    why = f"its action space is {_description(actions)}, and deep Q-learning needs discrete actions"
    if not isinstance(actions, gymnasium.spaces.Discrete):
        raise ConfigError("id", name, why, "choose another environment, such as env=cartpole")
    why = f"its observation space is {_description(observations)}, which cannot be flattened to a vector"
    check(observations.is_np_flattenable, "id", name, why, "choose another environment, such as env=cartpole")
    flattened = _needs_flattening(observations)
    shape = (gymnasium.spaces.flatdim(observations),) if flattened else tuple(observations.shape or ())
    return shape, int(actions.n)


def _needs_flattening(space: gymnasium.Space) -> bool:
    """Return whether observations are no arrays: discrete values become one-hot vectors, tuples are joined."""
    return not isinstance(space, gymnasium.spaces.Box)


def _description(space: gymnasium.Space) -> str:
    return f"continuous, {space.shape}" if isinstance(space, gymnasium.spaces.Box) else f"a {type(space).__name__}"


def make(spec: EnvSpec, num_envs: int, vectorization: str, options: dict[str, Any]) -> VectorEnv:
    """Create vectorized environments, each of which is reset in the step after its episode ends.

    `vectorization` is `sync` (one after another), `async` (one process each) or `auto`: the registered implementation
    if it resets in that step and returns arrays; otherwise, `sync`. `options` are those of the environment.
    """
    if vectorization == "auto" and spec.vector_entry_point is not None:
        envs = gymnasium.make_vec(spec, num_envs, "vector_entry_point", **options)
        resets_in_next_step = envs.metadata.get("autoreset_mode") == AutoresetMode.NEXT_STEP
        if resets_in_next_step and not _needs_flattening(envs.single_observation_space):
            return envs
        envs.close()
    mode = "sync" if vectorization == "auto" else vectorization
    single = gymnasium.make(spec, **options)
    wrappers: list[Any] = [FlattenObservation] if _needs_flattening(single.observation_space) else []
    single.close()
    if mode != "async":
        return gymnasium.make_vec(spec, num_envs, mode, wrappers=wrappers, **options)
    # Not forked from this process, which may have begun to use CUDA, and has threads.
    start_server(*_PRELOADED)
    wrappers.append(partial(_with_default_signals, parent=os.getpid()))
    with without_main_module():
        return gymnasium.make_vec(spec, num_envs, mode, {"context": METHOD}, wrappers=wrappers, **options)


_PRELOADED = ("gymnasium", "runner.env.vector")


def _with_default_signals(env: gymnasium.Env, parent: int) -> gymnasium.Env:
    """Make the process of an environment exit on SIGTERM and ignore Ctrl-C; return `env` unchanged.

    A child of the fork server begins with stop signals blocked. gymnasium calls this in the process `parent`, too.
    """
    if os.getpid() != parent:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Ctrl-C is sent to all processes, and the run closes its environments.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return env


class Vector:
    """A context manager that steps vectorized environments and closes them; errors call them `name`."""

    def __init__(self, envs: VectorEnv, name: str):
        self.envs, self.name, self.num_envs = envs, name, envs.num_envs
        self.shared_rng = not hasattr(envs, "env_fns")
        """Whether all environments share one random number generator."""
        self._first_action = int(envs.single_action_space.start)  # pyright: ignore[reportAttributeAccessIssue]
        self.observations = np.empty(0, np.float32)

    def __enter__(self) -> Vector:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the environments. After an error, do not wait for their processes: a dead process never answers."""
        failed = isinstance(self.envs, AsyncVectorEnv) and kind not in (None, GeneratorExit)
        try:
            self.envs.close(**({"terminate": True} if failed else {}))
        except (OSError, EOFError):  # from the connection to a process that died
            if not isinstance(self.envs, AsyncVectorEnv):
                raise
            for process in self.envs.processes:
                process.kill()
                process.join()
            self.envs.closed = True
            if not failed:
                raise

    def reset(self, seed: int | Sequence[int]) -> None:
        """Reset all environments, with one seed each, or one from which gymnasium derives `seed + i`."""
        self._seed = seed
        self._episodes = np.zeros(self.num_envs, np.int64)
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._ended = np.zeros(self.num_envs, bool)
        seeds: Any = seed if isinstance(seed, int) else list(seed)  # the type annotation of gymnasium lacks lists
        observations, _ = self._call(lambda: self.envs.reset(seed=seeds))
        self._observe(observations, np.zeros(self.num_envs))

    def step(self, actions: np.ndarray) -> Steps:
        """Take one step in each environment, given the index of its action, int64 [num_envs].

        If the previous step ended the episode of an environment, the environment is reset, and its action is ignored.
        Raises `EnvironmentBrokenError` if an environment raises an error, or returns NaN or infinity.
        """
        taken = ~self._ended
        self._lengths = (self._lengths + 1) * taken
        self._episodes += self._ended
        observations, *others, _ = self._call(lambda: self.envs.step(actions + self._first_action))
        rewards, terminated, truncated = map(np.array, others)  # copies: environments may return the same arrays again
        self._observe(observations, rewards)
        self._ended = terminated | truncated
        return Steps(self.observations, rewards, terminated, truncated, taken)

    def _observe(self, observations: np.ndarray, rewards: np.ndarray) -> None:
        self.observations = observations.astype(np.float32)  # a copy, as in `step`
        # One check for all environments is fast, and `reduce` is faster than `sum`, which calls it.
        if not math.isfinite(np.add.reduce(self.observations, None) + np.add.reduce(rewards)):
            finite = np.isfinite(self.observations.reshape(self.num_envs, -1)).all(1) & np.isfinite(rewards)
            if not finite.all():
                raise EnvironmentBrokenError(self._message("returned a value that is not finite", int(finite.argmin())))

    def _call(self, function: Any) -> Any:
        try:
            return function()
        except Exception as error:
            raise EnvironmentBrokenError(self._message(f"raised {type(error).__name__}: {error}")) from error

    def _message(self, what: str, index: int | None = None) -> str:
        shown, seed = range(min(self.num_envs, 4)) if index is None else [index], self._seed
        seeds = [seed + i * (not self.shared_rng) if isinstance(seed, int) else seed[i] for i in shown]
        places = [
            f"environment {i} (seed {each}), episode {self._episodes[i]}, step {self._lengths[i]}"
            for i, each in zip(shown, seeds, strict=True)
        ]
        more = f" and {self.num_envs - 4} more" if index is None and self.num_envs > 4 else ""
        return f"{self.name} {what}; {'one of: ' * (len(places) > 1)}{'; '.join(places)}{more}"

    def bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the lower and upper bounds of an observation, float64 arrays of its shape; None if one is infinite."""
        space = self.envs.single_observation_space
        if not isinstance(space, gymnasium.spaces.Box):
            return None
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        bounded = (np.abs(low) < _UNBOUNDED) & (np.abs(high) < _UNBOUNDED) & (low < high)
        return (low, high) if bounded.all() else None

    def render(self) -> np.ndarray:
        """Return a rendered image of the first environment: uint8 [height, width, 3]."""
        frames = self.envs.render()
        assert frames is not None
        return np.asarray(frames[0])

    # -----------------------------------------------------------------------------------------------------------------
    # Exact resume

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the environments as plain values and tensors; None if it cannot be read."""
        state = environment_state.state_of(self.envs)
        if state is None:
            return None
        counts = {"episodes": self._episodes.tolist(), "lengths": self._lengths.tolist(), "ended": self._ended.tolist()}
        return counts | {"seed": self._seed, "envs": state, "observations": environment_state.plain(self.observations)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned; the environments must have been reset before.

        Raises one of `CONTENT_ERRORS` if it does not match; their state may then be partly replaced.
        """
        like = {"episodes": [int], "lengths": [int], "ended": [bool], "seed": object, "envs": dict}
        check_like(state, like | {"observations": torch.from_numpy(self.observations)}, "environments")
        counts = {len(state[key]) for key in ("episodes", "lengths", "ended")}
        if counts != {self.num_envs} or type(state["seed"]) not in (int, list):
            raise UnexpectedContentError("environments: the state of other environments")
        self._seed = state["seed"]
        self._episodes, self._lengths = (np.array(state[key], np.int64) for key in ("episodes", "lengths"))
        self._ended = np.array(state["ended"], bool)
        self.observations = environment_state.value(state["observations"])
        environment_state.restore(self.envs, state["envs"])
