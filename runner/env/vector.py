"""Vectorized environments. The result of a step shows which environments were reset in this step."""

from __future__ import annotations

import itertools
import logging
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
from torch.utils._pytree import tree_map_only

from runner.config.errors import ConfigError, check
from runner.env import MAX_ENVS, EnvironmentBrokenError
from runner.env.action_masks import allowed_actions
from runner.env.episodes import (
    MAX_SEED,
    Episodes,
    Replayed,
    attributes,
    chain,
    has_plain_state,
    saved_value,
    set_attributes,
)
from runner.env.pixels import Pixels, pixels_of
from runner.storage.value_checks import check_like
from runner.system.forkserver import start_server, without_main_module
from runner.system.generators import seeded
from runner.system.signals import STOP_SIGNALS

log = logging.getLogger(__name__)

_UNBOUNDED = 1e6
"""Bounds with at least this absolute value count as infinite: some environments give the largest float instead."""

_MIN_RENDERED = 160
"""Rendered images that are smaller than this are enlarged by a whole factor, so that films of them can be seen."""

_PRELOADED = ("gymnasium", "runner.env.vector")


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
    masks: np.ndarray | None = None
    """bool [n, actions]: the actions that are allowed after the step, in environments that say so."""


def num_actions(name: str, env: gymnasium.Env) -> int:
    """Return the number of actions of `env`, and close it; `ConfigError` of `name` if its spaces are not supported."""
    actions, observations = env.action_space, env.observation_space
    env.close()
    if not isinstance(actions, gymnasium.spaces.Discrete):
        why = f"its action space is {actions}, and deep Q-learning needs discrete actions"
        raise ConfigError("id", name, why, "choose another environment, such as env=cartpole")
    why = f"its observation space is {observations}, which cannot be flattened to a vector"
    try:
        can_be_flattened = observations.is_np_flattenable
    except NotImplementedError:  # a kind of space that is not gymnasium's, such as texts of a grammar
        can_be_flattened = False
    check(can_be_flattened, "id", name, why, "choose another environment, such as env=cartpole")
    return int(actions.n)


class MaskInInfo(gymnasium.Wrapper):
    """Gives the mask that is the part `action_mask` of an observation also as `info["action_mask"]`."""

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**given)
        return observation, {"action_mask": observation["action_mask"]} | info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, {"action_mask": observation["action_mask"]} | info


def _has_mask(env: gymnasium.Env) -> bool:
    seen, actions = env.observation_space, env.action_space
    parts = seen.spaces if isinstance(seen, gymnasium.spaces.Dict) else {}
    return "action_mask" in parts and parts["action_mask"].shape == (getattr(actions, "n", None),)


def _needs_flattening(space: gymnasium.Space) -> bool:
    # Discrete values become one-hot vectors, tuples are joined, and a number is a vector of one.
    return not isinstance(space, gymnasium.spaces.Box) or space.shape == ()


def make(
    spec: EnvSpec,
    num_envs: int,
    vectorization: str,
    options: dict[str, Any],
    wrappers: Sequence[Any] = (),
    draws_globally: bool = False,
) -> VectorEnv:
    """Create vectorized environments, each of which is reset in the step after its episode ends.

    `vectorization` is `sync` (one after another), `async` (one process each) or `auto`: the registered implementation
    if it resets in that step and returns arrays, and there are no `wrappers`; otherwise, `sync`. `options` are those of
    the environment, and `wrappers` functions that wrap a single one. For `draws_globally`, see `Episodes`.
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
    wrappers += [MaskInInfo] if _has_mask(single) else []
    wrappers += [FlattenObservation] if _needs_flattening(single.observation_space) else []
    if mode == "async" or not has_plain_state(single):
        wrappers.append(partial(Episodes, draws_globally=draws_globally))
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

    def __init__(
        self,
        envs: VectorEnv,
        name: str,
        frame_stack: int = 1,
        channels: str | None = None,
        has_masks: bool | None = False,
    ):
        self.envs: Any = envs
        self.name, self.num_envs = name, envs.num_envs
        self.pixels: Pixels | None = pixels_of(name, envs.single_observation_space, frame_stack, channels)
        """How images become observations; None if the observations are vectors."""
        shape: Any = envs.single_observation_space.shape
        self.shape: tuple[int, ...] = shape if self.pixels is None else self.pixels.shape
        """The shape of an observation."""
        self.shared_rng = getattr(envs, "shared_rng", not hasattr(envs, "env_fns"))
        """Whether all environments share one random number generator."""
        actions: Any = envs.single_action_space
        self._first_action, self.num_actions = int(actions.start), int(actions.n)
        self._has_masks = has_masks
        dtype = np.float32 if self.pixels is None else np.uint8
        self.observations = np.zeros((self.num_envs, *self.shape), dtype)
        self.lives: np.ndarray | None = None
        self.masks: np.ndarray | None = None
        """bool [num_envs, actions]: the actions that are allowed now; None if the environments do not say."""

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
        is_gymnasium = str(getattr(self.envs.spec, "entry_point", "")).startswith("gymnasium.")
        limit = 2**63 if is_gymnasium else MAX_SEED + 1 - MAX_ENVS
        seeds: Any = seed % limit if isinstance(seed, int) else [each % limit for each in seed]
        observations, infos = self._call(lambda: self.envs.reset(seed=seeds))
        self._observe(observations, np.zeros(self.num_envs), np.ones(self.num_envs, bool), infos)

    def first_allowed(self) -> np.ndarray:
        """Return the first action that is allowed in each environment, int64 [num_envs]."""
        return np.zeros(self.num_envs, np.int64) if self.masks is None else self.masks.argmax(1)

    def step(self, actions: np.ndarray) -> Steps:
        """Take one step in each environment, given the index of its action, int64 [num_envs].

        If the previous step ended the episode of an environment, the environment is reset, and its action is ignored.
        Raises `EnvironmentBrokenError` if an environment raises an error, or returns NaN or infinity.
        """
        taken = ~self._ended
        observations, *others, infos = self._call(lambda: self.envs.step(actions + self._first_action))
        rewards, terminated, truncated = map(np.array, others)  # copies: environments may return the same arrays again
        self._ended = terminated | truncated
        self._observe(observations, rewards, ~taken, infos)
        return Steps(self.observations, rewards, terminated, truncated, taken, self.lives, self.masks)

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
        has_masks = "action_mask" in infos if self._has_masks is None else self._has_masks
        self.masks = allowed_actions(infos, self._ended, self.num_actions, self.name) if has_masks else None
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
        with warnings.catch_warnings(action="ignore"):  # gymnasium's of colors from 0 to 1, and of no frame rate
            frames = self.envs.render()
        assert frames is not None
        image = np.asarray(frames[0])
        if image.dtype != np.uint8:
            image = (image * 255).astype(np.uint8)  # colors from 0 to 1
        factor = max(1, _MIN_RENDERED // max(image.shape)) if self.pixels is not None else 1
        return image.repeat(factor, 0).repeat(factor, 1)

    # For an exact resume

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the environments as plain values and tensors; None if it cannot be saved.

        It is that of their attributes, or what it takes to replay their running episodes; see `Episodes`.
        """
        if self.saves_episodes:
            episodes = tree_map_only(np.ndarray, torch.from_numpy, [*self.envs.get_attr("running_episode")])
            kept: dict[str, Any] = {"episodes": episodes}
        elif all(map(has_plain_state, self._singles())):
            kept = {"envs": [attributes(each) for each in self._with_wrappers()]}
        else:
            return None
        seen = {"ended": self._ended, "observations": self.observations, "lives": self.lives, "masks": self.masks}
        return kept | {name: saved_value(each) for name, each in seen.items() if each is not None}

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Restore the state that `state_dict` returned; the environments must have been reset before.

        Raises one of `CONTENT_ERRORS` if it does not match, or an `EnvironmentBrokenError` if it is impossible. Returns
        which environments came to another observation when their episodes were replayed: they have to be reset.
        """
        seen = {"ended": self._ended, "observations": self.observations, "lives": self.lives, "masks": self.masks}
        like = {name: torch.from_numpy(each) for name, each in seen.items() if name in state and each is not None}
        required = {"ended": object, "observations": object}
        of_envs = {"episodes": [dict]} if self.saves_episodes else {"envs": [dict]}
        check_like(state, required | like | of_envs, "environments")
        if self.saves_episodes:
            saved, ended = tree_map_only(torch.Tensor, torch.Tensor.numpy, state["episodes"]), state["ended"].tolist()
            episodes = [each | {"ended": over} for each, over in zip(saved, ended, strict=True)]
            if count := sum(len(each.get("actions", ())) for each in episodes):
                log.info("%s: %s steps of the running episodes are replayed", self.name, f"{count:,}")
            with seeded(0):  # what else draws from these generators must not notice
                self._call(lambda: self.envs.set_attr("running_episode", episodes))
            restored = zip(self._call(lambda: self.envs.get_attr("replayed")), ended, strict=True)
            newest = state["observations"].numpy()
            if self.pixels is not None:
                newest = newest[:, -self.pixels.frame_shape[0] :]
            differ = [i for i, (each, ended) in enumerate(restored) if each and not self._equal(each, newest[i], ended)]
            if differ:
                return differ
        else:
            self._set(state)
            self.step(self.first_allowed())  # raises an error if they are in an impossible state
        self._set(state)
        return []

    def _set(self, state: dict[str, Any]) -> None:
        if "envs" in state:
            set_attributes(self._with_wrappers(), state["envs"])
        arrays = {name: each.numpy().copy() for name, each in state.items() if isinstance(each, torch.Tensor)}
        self._ended, self.observations = arrays["ended"], arrays["observations"]
        self.lives, self.masks = arrays.get("lives"), arrays.get("masks")

    def _equal(self, replayed: Replayed, observation: np.ndarray, ended: bool) -> bool:
        if replayed.observation is None or replayed.ended != ended:
            return False
        batch = np.asarray(replayed.observation)[None]
        got = batch.astype(np.float32) if self.pixels is None else self.pixels.frames(batch)
        return np.array_equal(got[0], observation)

    @property
    def saves_episodes(self) -> bool:
        """Whether the running episodes are saved by `Episodes`, or in the same way."""
        return bool(self.envs.metadata.get("saves_episodes"))

    def _singles(self) -> list[Any]:
        return self.envs.envs if isinstance(self.envs, SyncVectorEnv) else [self.envs]

    def _with_wrappers(self) -> list[Any]:
        """Return the vectorized and the single environments, with their wrappers."""
        singles = self._singles()
        return singles if singles == [self.envs] else [self.envs, *itertools.chain(*map(chain, singles))]
