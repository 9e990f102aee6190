"""Atari games, by the vectorized environment of ale-py, which is written in C++ and preprocesses the images itself."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Annotated, Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv, VectorWrapper

from runner.config.errors import check, see_comments
from runner.config.limits import Range
from runner.env.base import Env, NumFrames
from runner.env.episodes import MAX_SEED, Replayed, episode_seed
from runner.system.import_path import is_installed

_MAX_EPISODE_FRAMES = 108_000  # half an hour of a game (Machado et al., 2018)
_FRAMES_PER_SECOND, _DEFAULT_SIZE = 60, 84

_SEEDED_EVERY = 10_000
"""The least number of steps of a game between two episodes that begin with a seed."""


@dataclass
class Atari(Env):
    """A game of the Arcade Learning Environment (Bellemare et al., 2013); for options, see `conf/env/atari.yaml`.

    Observations are the last `frame_stack` images, preprocessed as by Mnih et al. (2015) and Machado et al. (2018).
    """

    id: str = "ALE/Breakout-v5"
    frame_stack: NumFrames = 4
    frame_skip: NumFrames = 4
    grayscale: bool = True
    image_size: Annotated[int, Range(least=1, most=1024)] | None = 84
    noop_max: Annotated[int, Range(least=0, most=1000)] = 30
    fire_reset: bool = True
    sticky_actions: Annotated[float, Range(least=0, below=1)] = 0.25

    def __post_init__(self) -> None:
        check(self.vectorization == "auto", "vectorization", self.vectorization, "it must be auto", see_comments(self))

    def prepare(self) -> None:
        super().prepare()
        self.frames_per_second = _FRAMES_PER_SECOND / self.frame_skip
        self.longest = self.max_episode_steps or _MAX_EPISODE_FRAMES // self.frame_skip

    def cannot_be_drawn(self, render_mode: str, otherwise: str) -> tuple[str, str] | None:
        if render_mode == "human":
            return "ale-py's vectorized games have no window", "film it: --film FILE.gif"
        return None

    def _spec(self) -> EnvSpec:
        why = "ale-py, which has the games, is not installed"
        check(is_installed("ale_py"), "id", self.id, why, "pip install ale-py")
        import ale_py  # pyright: ignore[reportMissingImports]  # it registers the games

        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
        spec = super()._spec()
        fits, why = str(spec.vector_entry_point).startswith("ale_py."), "ale-py has no vectorized game of this name"
        check(fits, "id", self.id, why, "name a game as env.id=ALE/Pong-v5")
        return spec

    def _options(self, render_mode: str | None = None) -> dict[str, Any]:
        return dict(self.options or {})

    def _wrappers(self) -> dict[str, Any]:
        return {}

    def _make(self, spec: EnvSpec, num_envs: int, vectorization: str, render_mode: str | None) -> VectorEnv:
        steps = self.max_episode_steps or _MAX_EPISODE_FRAMES // self.frame_skip
        options = {
            "frameskip": self.frame_skip,
            "noop_max": self.noop_max,
            "use_fire_reset": self.fire_reset,
            "repeat_action_probability": self.sticky_actions,
            "max_num_frames_per_episode": steps * self.frame_skip,
        }
        size = self.image_size or _DEFAULT_SIZE
        images = {"img_height": size, "img_width": size, "grayscale": self.grayscale}
        return AtariVector(spec, num_envs, options | self._options(), images, rendered=render_mode is not None)


class AtariVector(VectorWrapper):
    """Games that return single frames and true rewards.

    If they are `rendered`, a second emulator plays the first game with the same seeds and actions, and shows it in
    color: ale-py's vectorized games cannot be rendered, but are deterministic.

    The state of these emulators cannot be read. Their actions are recorded, so that the games can be replayed from when
    they were last seeded. That loads a game anew, which takes as long as hundreds of steps, so not every episode is.
    """

    shared_rng = False

    def __init__(
        self, spec: EnvSpec, num_envs: int, options: dict[str, Any], images: dict[str, Any], rendered: bool
    ) -> None:
        # By default, ale-py starts a thread per core of the machine, in each process.
        options = {"num_threads": min(num_envs, torch.get_num_threads())} | options
        options |= {"stack_num": 1, "reward_clipping": False, "episodic_life": False}
        super().__init__(gymnasium.make_vec(spec, num_envs, "vector_entry_point", **options, **images))
        self._screen = None
        if rendered:
            in_color = {"img_height": 210, "img_width": 160, "grayscale": False}
            self._screen = gymnasium.make_vec(spec, 1, "vector_entry_point", **options | {"num_threads": 1}, **in_color)
        stacked: Any = self.env.single_observation_space
        self.single_observation_space = gymnasium.spaces.Box(0, 255, stacked.shape[1:], np.uint8)
        actions: Any = self.env.single_action_space
        self._num_actions, self._replayed = int(actions.n), ()
        self.metadata = {**self.env.metadata, "saves_episodes": True}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._seeds: Any = np.arange(seed, seed + self.num_envs) if isinstance(seed, int) else np.array(seed)
        self._numbers = np.zeros(self.num_envs, np.int64)
        """How often each game was seeded after its first episode."""
        self._actions = [array("i") for _ in range(self.num_envs)]
        self._ended = np.zeros(self.num_envs, bool)
        return self._begin(np.ones(self.num_envs, bool))

    def _begin(self, which: np.ndarray) -> tuple[Any, dict[str, Any]]:
        """Begin episodes with new seeds in some games, bool [num_envs]; return the images and infos of all."""
        seeds: Any = np.array([episode_seed(int(self._seeds[i]), int(self._numbers[i])) for i in which.nonzero()[0]])
        for i in which.nonzero()[0]:
            self._actions[i] = array("i")
        if self._screen is not None and which[0]:
            self._image = self._screen.reset(seed=seeds[:1])[0]
        observations, infos = self.env.reset(seed=seeds, options=None if which.all() else {"reset_mask": which})
        return observations[:, 0], infos

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if self._screen is not None:
            self._image = self._screen.step(actions[:1])[0]
        begins = self._ended & (np.array([*map(len, self._actions)]) >= _SEEDED_EVERY)
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        for recorded, action in zip(self._actions, actions.tolist(), strict=True):
            recorded.append(action)
        self._ended = terminated | truncated
        images = observations[:, 0]
        if begins.any():
            self._numbers += begins
            images, infos = self._begin(begins)
        return images, rewards, terminated, truncated, infos

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return `running_episode` or `replayed` of each game, as those of `Episodes`."""
        if name == "replayed":
            return self._replayed
        of_games = zip(self._seeds.tolist(), self._numbers.tolist(), self._actions, strict=True)
        return tuple({"seed": s, "number": n, "actions": np.array(actions)} for s, n, actions in of_games)

    def set_attr(self, name: str, values: list[dict[str, Any]]) -> None:
        """Restore the running episodes of all games."""
        self._seeds = np.array([each["seed"] % MAX_SEED for each in values])
        self._numbers = np.array([each["number"] for each in values])
        self._replay([each["actions"].clip(0, self._num_actions - 1).tolist() for each in values])

    def _replay(self, actions: list[list[int]]) -> None:
        """Take the `actions` of each game since it was seeded; those of all games end at the same time."""
        longest = max(map(len, actions))
        waits = np.array([longest - len(each) for each in actions])
        images, ended = np.zeros(0), np.zeros(self.num_envs, bool)
        for time in range(longest + 1):
            if (begins := waits == time).any():
                images, _ = self._begin(begins)
                ended = ended & ~begins
            if time < longest:
                step = [each[time - wait] if time >= wait else 0 for each, wait in zip(actions, waits, strict=True)]
                stacks, _, terminated, truncated, _ = self.env.step(np.array(step))
                images, ended = stacks[:, 0], terminated | truncated
        self._actions, self._ended = [array("i", each) for each in actions], ended
        self._replayed = tuple(map(Replayed, images.copy(), ended.tolist()))

    def render(self) -> tuple[np.ndarray, ...]:
        """Return the image of the first game, uint8 [210, 160, 3]."""
        return (self._image[0, 0],)

    def close(self, **kwargs: Any) -> None:
        """End the emulators, which otherwise live, and report leaks, until the process ends."""
        for envs in (self.env, self._screen):
            if envs is not None:
                vars(envs.unwrapped).pop("ale", None)
        self._screen = None
