"""Vectorized environments. The result of a step shows which environments were reset in this step.

The state of gymnasium's classic control and toy text environments can be saved, for an exact resume, but not that of
others (physics engines, environments in other processes).
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import FlattenObservation

from runner.config.errors import ConfigError, check
from runner.env import MAX_ENVS, EnvironmentBrokenError
from runner.env.pixels import Pixels, pixels_of
from runner.storage.value_checks import check_like
from runner.system.forkserver import start_server, without_main_module
from runner.system.signals import STOP_SIGNALS

_UNBOUNDED = 1e6
"""Bounds with at least this absolute value count as infinite: some environments give the largest float instead."""

_MIN_RENDERED = 160
"""Rendered images that are smaller than this are enlarged by a whole factor, so that films of them can be seen."""

_PRELOADED = ("gymnasium", "runner.env.vector")
_WITH_STATE = ("gymnasium.envs.classic_control.", "gymnasium.envs.toy_text.")
"""Packages of environments whose state is in their attributes; others say so by `plain_state` in their metadata."""

_PLAIN_TYPES = (bool, int, float, str, type(None), np.ndarray, np.number, np.bool_)


class Steps(NamedTuple):
    """The results of one step in each of n environments."""

    observations: np.ndarray
    """float32 [n, …], or uint8 of images: those after the step; for an episode that ended, its last observation."""
    rewards: np.ndarray
    """float [n]: the rewards of the step."""
    terminated: np.ndarray
    """bool [n]: whether the episode reached a terminal state."""
    truncated: np.ndarray
    """bool [n]: whether the episode was truncated."""
    taken: np.ndarray
    """bool [n]: False where the action was ignored and the environment was reset, because its episode had ended."""
    lives: np.ndarray | None = None
    """int [n]: the number of lives after the step, in games that have some."""


def num_actions(name: str, env: gymnasium.Env) -> int:
    """Return the number of actions of `env`, and close it; `ConfigError` of `name` if its spaces are not supported."""
    actions, observations = env.action_space, env.observation_space
    env.close()
    if not isinstance(actions, gymnasium.spaces.Discrete):
        why = f"its action space is {actions}, and deep Q-learning needs discrete actions"
        raise ConfigError("id", name, why, "choose another environment, such as env=cartpole")
    why = f"its observation space is {observations}, which cannot be flattened to a vector"
    check(observations.is_np_flattenable, "id", name, why, "choose another environment, such as env=cartpole")
    return int(actions.n)


def _needs_flattening(space: gymnasium.Space) -> bool:
    # Discrete values become one-hot vectors, tuples are joined, and a number is a vector of one.
    return not isinstance(space, gymnasium.spaces.Box) or space.shape == ()


def make(
    spec: EnvSpec, num_envs: int, vectorization: str, options: dict[str, Any], wrappers: Sequence[Any] = ()
) -> VectorEnv:
    """Create vectorized environments, each of which is reset in the step after its episode ends.

    `vectorization` is `sync` (one after another), `async` (one process each) or `auto`: the registered implementation
    if it resets in that step and returns arrays, and there are no `wrappers`; otherwise, `sync`. `options` are those of
    the environment, and `wrappers` functions that wrap a single one.
    """
    if vectorization == "auto" and spec.vector_entry_point is not None and not wrappers:
        envs = gymnasium.make_vec(spec, num_envs, "vector_entry_point", **options)
        resets_in_next_step = envs.metadata.get("autoreset_mode") == AutoresetMode.NEXT_STEP
        if resets_in_next_step and not _needs_flattening(envs.single_observation_space):
            return envs
        envs.close()
    mode = "sync" if vectorization == "auto" else vectorization
    wrappers = list(wrappers)
    single = gymnasium.make(spec, **options)
    for wrapper in wrappers:
        single = wrapper(single)
    wrappers += [FlattenObservation] if _needs_flattening(single.observation_space) else []
    single.close()
    if mode != "async":
        return gymnasium.make_vec(spec, num_envs, mode, wrappers=wrappers, **options)
    # Not forked from this process, which may have begun to use CUDA, and has threads.
    start_server(*_PRELOADED)
    wrappers.append(partial(_with_default_signals, parent=os.getpid()))
    with without_main_module():
        return gymnasium.make_vec(spec, num_envs, mode, {"context": "forkserver"}, wrappers=wrappers, **options)


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
    """A context manager that steps vectorized environments and closes them; errors call them `name`.

    An observation of images consists of the last `frame_stack` frames.
    """

    def __init__(self, envs: VectorEnv, name: str, frame_stack: int = 1, channels: str | None = None):
        self.envs, self.name, self.num_envs = envs, name, envs.num_envs
        self.pixels: Pixels | None = pixels_of(name, envs.single_observation_space, frame_stack, channels)
        """How images become observations; None if the observations are vectors."""
        shape: Any = envs.single_observation_space.shape
        self.shape: tuple[int, ...] = shape if self.pixels is None else self.pixels.shape
        """The shape of an observation."""
        self.shared_rng = getattr(envs, "shared_rng", not hasattr(envs, "env_fns"))
        """Whether all environments share one random number generator."""
        self._first_action = int(envs.single_action_space.start)  # pyright: ignore[reportAttributeAccessIssue]
        dtype = np.float32 if self.pixels is None else np.uint8
        self.observations = np.zeros((self.num_envs, *self.shape), dtype)
        self.lives: np.ndarray | None = None

    def __enter__(self) -> Vector:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if isinstance(self.envs, AsyncVectorEnv) and kind not in (None, GeneratorExit):
            for process in self.envs.processes:  # `close` waits for an answer of each, and a dead one never answers
                process.kill()
                process.join()
            self.envs.closed = True
        else:
            self.envs.close()

    def reset(self, seed: int | Sequence[int]) -> None:
        """Reset all environments, with one seed each, or one from which gymnasium derives `seed + i`."""
        self._ended = np.zeros(self.num_envs, bool)
        # The annotation of gymnasium lacks lists; environments of others often take seeds of 31 bits only.
        limit = 2**63 if str(getattr(self.envs.spec, "entry_point", "")).startswith("gymnasium.") else 2**31 - MAX_ENVS
        seeds: Any = seed % limit if isinstance(seed, int) else [each % limit for each in seed]
        observations, infos = self._call(lambda: self.envs.reset(seed=seeds))
        self._observe(observations, np.zeros(self.num_envs), np.ones(self.num_envs, bool), infos)

    def step(self, actions: np.ndarray) -> Steps:
        """Take one step in each environment, given the index of its action, int64 [num_envs].

        If the previous step ended the episode of an environment, the environment is reset, and its action is ignored.
        Raises `EnvironmentBrokenError` if an environment raises an error, or returns NaN or infinity.
        """
        taken = ~self._ended
        observations, *others, infos = self._call(lambda: self.envs.step(actions + self._first_action))
        rewards, terminated, truncated = map(np.array, others)  # copies: environments may return the same arrays again
        self._observe(observations, rewards, ~taken, infos)
        self._ended = terminated | truncated
        return Steps(self.observations, rewards, terminated, truncated, taken, self.lives)

    def _observe(
        self, observations: np.ndarray, rewards: np.ndarray, restarted: np.ndarray, infos: dict[str, Any]
    ) -> None:
        finite = np.isfinite(rewards)
        if self.pixels is None:
            self.observations = observations.astype(np.float32)  # a copy, as in `step`
            finite &= np.isfinite(self.observations.reshape(self.num_envs, -1)).all(1)
        else:
            self.observations = self.pixels.stacked(self.observations, observations, restarted)
        self.lives = np.array(infos["lives"]) if "lives" in infos else None
        if not finite.all():
            what = f"environment {int(finite.argmin())} returned a value that is not finite"
            raise EnvironmentBrokenError(f"{self.name}: {what}")

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            raise EnvironmentBrokenError(f"{self.name} raised {type(error).__name__}: {error}") from error

    def bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the lower and upper bounds of an observation, float64 arrays of its shape; None if one is infinite."""
        space: Any = self.envs.single_observation_space
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        bounded = (np.abs(low) < _UNBOUNDED) & (np.abs(high) < _UNBOUNDED) & (low < high)
        return (low, high) if bounded.all() else None

    def largest(self) -> float:
        """Return the largest absolute value of a finite bound of an observation; 0 if all are infinite."""
        space: Any = self.envs.single_observation_space
        limits = np.abs(np.array([space.low, space.high], np.float64))
        return float(limits[limits < _UNBOUNDED].max(initial=0))

    def render(self) -> np.ndarray:
        """Return a rendered image of the first environment: uint8 [height, width, 3]; tiny games are enlarged."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium's of colors from 0 to 1, and of a missing frame rate
            frames = self.envs.render()
        assert frames is not None
        image = np.asarray(frames[0])
        if image.dtype != np.uint8:
            image = (image * 255).astype(np.uint8)  # colors from 0 to 1
        factor = max(1, _MIN_RENDERED // max(image.shape)) if self.pixels is not None else 1
        return image.repeat(factor, 0).repeat(factor, 1)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the environments as plain values and tensors; None if it cannot be read."""
        envs = self.envs.envs if isinstance(self.envs, SyncVectorEnv) else [self.envs]
        for env in (each.unwrapped for each in envs):
            if not type(env).__module__.startswith(_WITH_STATE) and not env.metadata.get("plain_state"):
                return None
        return {
            "envs": [_attributes(each) for each in self._with_wrappers()],
            "ended": _saved(self._ended),
            "observations": _saved(self.observations),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned; the environments must have been reset before.

        Raises one of `CONTENT_ERRORS` if it does not match; their state may then be partly replaced.
        """
        like = {"envs": [dict], "ended": torch.from_numpy(self._ended)}
        check_like(state, like | {"observations": torch.from_numpy(self.observations)}, "environments")
        for each, attributes in zip(self._with_wrappers(), state["envs"], strict=True):
            for name, kept in attributes.items():
                if name not in vars(each):  # it would hide a method
                    raise AttributeError(f"{type(each).__name__} has no {name}")
                setattr(each, name, _restored(kept))
        self._ended, self.observations = state["ended"].numpy().copy(), state["observations"].numpy().copy()

    def _with_wrappers(self) -> list[Any]:
        """Return the vectorized and the single environments; their wrappers have state, too, such as a time limit."""
        found: list[Any] = [self.envs]
        for env in self.envs.envs if isinstance(self.envs, SyncVectorEnv) else ():
            found.append(env)
            while found[-1] is not env.unwrapped:
                found.append(found[-1].env)
        return found


def _attributes(env: Any) -> dict[str, Any]:
    """Return the attributes with plain values, and the random generator; others, as spaces, do not change."""
    kept = {name: _saved(value) for name, value in vars(env).items() if _is_plain(value)}
    generator = vars(env).get("_np_random")
    return kept if generator is None else kept | {"_np_random": {"random": generator.bit_generator.state}}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN_TYPES) and (not isinstance(value, np.ndarray) or value.dtype.kind in "biuf")


def _saved(value: Any) -> Any:
    """Return a value as a checkpoint holds it: NumPy arrays as tensors, and NumPy scalars as `{"number": tensor}`."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, str):
        return str(value)  # a numpy string is also a str
    if isinstance(value, np.generic):
        return {"number": torch.from_numpy(np.array(value))}
    return type(value)(map(_saved, value)) if isinstance(value, tuple | list) else value


def _restored(kept: Any) -> Any:
    if isinstance(kept, torch.Tensor):
        return kept.numpy().copy()
    if isinstance(kept, dict) and "random" in kept:
        generator = np.random.Generator(np.random.PCG64())
        generator.bit_generator.state = kept["random"]
        return generator
    if isinstance(kept, dict):
        return kept["number"].numpy()[()]
    return type(kept)(map(_restored, kept)) if isinstance(kept, tuple | list) else kept
