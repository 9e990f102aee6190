"""The options of the environments that an agent acts in. Gymnasium is imported only when an environment is created."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from runner.config.errors import ConfigError, check
from runner.config.limits import PositiveInt, Range
from runner.config.overrides import text_override
from runner.env import MAX_ENVS, EnvironmentBrokenError
from runner.system.import_path import is_installed

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec
    from gymnasium.vector import VectorEnv

    from runner.env.vector import Vector

_PACKAGES = {"ALE": "use env=atari (pip install ale-py)", "MinAtar": "pip install minatar"}
"""How to get the environments of a namespace."""

NumFrames = Annotated[int, Range(least=1, most=64)]  # of a stack, which a byte counts, or skipped
_TRIAL_STEPS, _TRIAL_SECONDS = 200, 0.2  # of the search for draws from global generators
_MAX_PROCESSES = 128  # thousands of processes would overload a machine before any limit of the system is reached


@dataclass
class Env:
    """A gymnasium environment with discrete actions (Towers et al., 2024); for options, see `conf/env/_env.yaml`.

    `id` is a name in gymnasium's registry; `module:Name-v0` first imports the module that registers it.
    """

    id: str = "CartPole-v1"
    num_envs: Annotated[int, Range(least=1, most=MAX_ENVS)] = 8
    vectorization: Literal["auto", "sync", "async"] = "auto"
    max_episode_steps: PositiveInt | None = None
    frame_stack: NumFrames = 1
    frame_skip: NumFrames = 1
    grayscale: bool = False
    image_size: Annotated[int, Range(least=1, most=1024)] | None = None
    channels: Literal["first", "last"] | None = None
    options: dict[str, Any] | None = None

    may_change_on_resume: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        """What messages call the environment."""
        return self.id

    @property
    def num_masked(self) -> int:
        """The number of actions whose masks are stored with transitions; 0 if the environment has no masks."""
        return self.num_actions if self.has_masks else 0

    @classmethod
    def untrusted_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Refuse a saved `id` that names a module to import, as in `module:Name-v0`; change nothing."""
        name = str(values.get("id", ""))
        why = "a saved config does not decide which modules are imported"
        check(":" not in name, "id", name, why, f"if you trust it, type it again: {text_override('env.id', name)}")
        return {}

    def prepare(self) -> None:
        """Create an environment to find out its properties, and set them as attributes.

        They are `shape` (of an observation), `pixels` (see `Vector.pixels`), `largest` (finite bound of a value),
        `num_actions`, `has_masks` (whether it says which actions are allowed), `longest` (steps of an episode; None
        without a limit), `frames_per_second`, `draws_globally` (see `Episodes`), and `shared_rng` (whether environments
        that are stepped together share a random number generator). Raises `ConfigError` if it cannot be created, reset
        or stepped, or has spaces that are not supported.
        """
        import gymnasium

        from runner.env.pixels import pixels_of
        from runner.env.vector import num_actions
        from runner.system.generators import seeded

        spec = self._spec()
        try:
            single = gymnasium.make(spec, **self._options())
        except Exception as error:  # an environment may be anybody's, and says itself what is missing
            why = f"it cannot be created: {type(error).__name__}: {error}"
            key, remedy = "id", "install what is missing, or choose another environment"
            if self.options and "unexpected keyword argument" in why:
                key, remedy = "options", "leave out what the environment does not have"
            raise ConfigError(key, self.name if key == "id" else self.options, why, remedy) from None
        if (self.grayscale or self.image_size) and self._wrappers():  # whose wrappers shrink the first two axes
            images = pixels_of(self.name, single.observation_space, 1, self.channels)
            why = "env.grayscale and env.image_size need images with channels in their last axis"
            last = images is None or self.channels != "first"
            check(last, "channels", self.channels, why, "leave these out, or wrap the environment")
        for key, wrapper in self._wrappers().items():
            try:
                single = wrapper(single)
            except Exception as error:
                missing = isinstance(error.__cause__, ImportError)
                why = "OpenCV is not installed" if missing else f"{self.name} has no such images: {error}"
                remedy = "pip install opencv-python-headless" if missing else "leave it out"
                raise ConfigError(key, getattr(self, key), why, remedy) from None
        self._render_modes = tuple(single.metadata.get("render_modes", ()))
        self.frames_per_second = float(single.metadata.get("render_fps") or 25)
        self._is_builtin = type(single.unwrapped).__module__.startswith("gymnasium.")
        self.num_actions = num_actions(self.name, single)
        self.longest = self.max_episode_steps or (
            spec.max_episode_steps and -(-spec.max_episode_steps // self.frame_skip)
        )
        with self.vector(1, in_process=True) as vector:
            self.shape, self.shared_rng, self.pixels = vector.shape, vector.shared_rng, vector.pixels
            self.largest = vector.largest()
            with seeded(0):
                self.has_masks, self.draws_globally = self._try_out(vector), _draws_globally(vector)
        why = "an action that is allowed now may not be so in the frames for which it is repeated"
        check(not self.has_masks or self.frame_skip == 1, "frame_skip", self.frame_skip, why, "env.frame_skip=1")
        why = "only images are skipped, of two by their maximum, and its observations are vectors"
        check(self.pixels is not None or self.frame_skip == 1, "frame_skip", self.frame_skip, why, "env.frame_skip=1")
        if self.vectorization == "async":
            why = f"each runs in a process, and at most {_MAX_PROCESSES} are allowed"
            few = self.num_envs <= _MAX_PROCESSES
            check(few, "num_envs", self.num_envs, why, "reduce it, or env.vectorization=sync")
            with self.vector(self.num_envs) as vector:
                self._try_out(vector)

    def _try_out(self, vector: Vector) -> bool:
        """Take the first step, so that failures, as of environments of the older gym, end the run early.

        Return whether the environments say which actions are allowed.
        """
        try:
            vector.reset(0)
            masks = vector.masks
            steps = vector.step(vector.first_allowed())
            differ = (masks is None) != (steps.masks is None) and not (steps.terminated | steps.truncated).all()
            if differ:
                raise EnvironmentBrokenError(f'{self.name}: info["action_mask"] is not in each info of reset and step')
        except EnvironmentBrokenError as error:
            remedy = "reset(seed=…, options=…) returns (observation, info), and step(action) (observation, reward, "
            remedy += "terminated, truncated, info), where the reward is a number"
            raise ConfigError("id", self.name, str(error), remedy) from None
        return masks is not None or steps.masks is not None

    def vector(self, num_envs: int, in_process: bool = False, render_mode: str | None = None) -> Vector:
        """Create environments that are stepped together: a context manager that closes them.

        Args:
            num_envs: number of environments to create.
            in_process: run the environments in this process even if `vectorization` is `async`.
            render_mode: `rgb_array` enables `Vector.render`, and `human` shows a window; None renders nothing.
        """
        from runner.env.vector import Vector

        # gymnasium's vectorized implementations have no window
        sync = (in_process and self.vectorization == "async") or render_mode == "human"
        vectorization = "sync" if sync else self.vectorization
        try:
            envs = self._make(self._spec(), num_envs, vectorization, render_mode)
            has_masks = getattr(self, "has_masks", None)  # until it is known, an environment may say so or not
            return Vector(envs, self.name, self.frame_stack, self.channels, has_masks)
        except ConfigError:
            raise
        except Exception as error:  # of any type: an environment may be anybody's
            why = f"they cannot be started: {type(error).__name__}: {error}"
            raise ConfigError("num_envs", num_envs, why, "reduce it, or env.vectorization=sync") from None

    def cannot_be_drawn(self, render_mode: str, otherwise: str) -> tuple[str, str] | None:
        """Return (reason, remedy) if this environment cannot be rendered in `render_mode`, else None; see `prepare`."""
        if render_mode not in self._render_modes:
            return f"{self.name} does not support render_mode={render_mode}", otherwise
        if self._is_builtin and not is_installed("pygame"):
            why = "pygame, which renders the environments, is not installed"
            return why, "pip install 'gymnasium[classic-control]'"
        return None

    def _make(self, spec: EnvSpec, num_envs: int, vectorization: str, render_mode: str | None) -> VectorEnv:
        from runner.env.vector import make

        wrappers, draws_globally = [*self._wrappers().values()], getattr(self, "draws_globally", False)
        return make(spec, num_envs, vectorization, self._options(render_mode), wrappers, draws_globally)

    def _options(self, render_mode: str | None = None) -> dict[str, Any]:
        options = (self.options or {}) | ({"render_mode": render_mode} if render_mode else {})
        if self.max_episode_steps:  # gymnasium counts frames
            options["max_episode_steps"] = self.max_episode_steps * self.frame_skip
        return options

    def _wrappers(self) -> dict[str, Any]:
        """Return functions that wrap a single environment, by the option that asks for them."""
        from gymnasium.wrappers import GrayscaleObservation, ResizeObservation

        from runner.env.pixels import SkipFrames

        found: dict[str, Any] = {}
        if self.frame_skip > 1:
            found["frame_skip"] = partial(SkipFrames, skip=self.frame_skip)
        if self.grayscale:
            found["grayscale"] = partial(GrayscaleObservation, keep_dim=False)
        if (size := self.image_size) is not None:
            found["image_size"] = partial(ResizeObservation, shape=(size, size))
        return found

    def _spec(self) -> EnvSpec:
        import gymnasium

        module, _, name = self.id.rpartition(":")
        try:
            if module:
                importlib.import_module(module)
        except Exception as error:  # third-party modules may raise anything
            why = f"the module {module} cannot be imported: {type(error).__name__}: {error}"
            remedy, top = "install what is missing, or correct the name", module.partition(".")[0]
            if getattr(error, "name", None) == top and os.path.isdir(top):
                remedy = "modules in the current directory are found after: export PYTHONPATH=."
            elif getattr(error, "name", None) == module and os.path.isfile(f"{module}.py"):
                remedy = f"a file in the current directory is run only if it is typed: env={module}.py env.id={name}"
            raise ConfigError("id", self.id, why, remedy) from None
        namespace = name.rpartition("/")[0]
        try:
            if namespace not in {each.namespace for each in gymnasium.registry.values()}:
                for entry in entry_points(group="gymnasium.envs", name=namespace):  # of packages with environments
                    entry.load()()
            spec = gymnasium.spec(name)
        except gymnasium.error.Error as error:
            remedy = "correct the name, or use env=cartpole, acrobot, mountaincar or lunarlander"
            if isinstance(error, gymnasium.error.NamespaceNotFound):
                remedy = _PACKAGES.get(namespace, remedy)
            raise ConfigError("id", self.id, f"gymnasium has no such environment: {error}", remedy) from None
        why = "its preprocessing and its true rewards are options of another component"
        atari = type(self) is Env and str(spec.vector_entry_point).startswith("ale_py.")
        check(not atari, "id", self.id, why, f"env=atari env.id={name}")
        return spec


def _draws_globally(vector: Vector) -> bool:
    """Return whether an environment draws from `random`, NumPy's generator or torch's in (a part of) its first episode.

    Only of one whose episodes are replayed, and which runs in this process.
    """
    import numpy as np

    from runner.env.action_masks import random_actions
    from runner.seeds import drawn_since, random_states

    if not (vector.saves_episodes and hasattr(vector.envs, "envs")):
        return False
    before, actions, end = random_states([]), np.random.Generator(np.random.PCG64(0)), time.monotonic() + _TRIAL_SECONDS
    try:
        vector.reset(0)
        for _ in range(_TRIAL_STEPS):
            steps = vector.step(random_actions(actions.random(vector.num_envs), vector.num_actions, vector.masks))
            if (steps.terminated | steps.truncated).any() or time.monotonic() > end:
                break
    except EnvironmentBrokenError:  # it will be raised in the run
        pass
    return bool(drawn_since(before, []))


def envs_per_process(num_envs: int, count: int) -> int:
    """Return the number of environments of each of `count` processes, which must divide `num_envs`."""
    why = f"it is not divisible by the number of processes, {count}"
    check(num_envs % count == 0, "env.num_envs", num_envs, why, f"env.num_envs={-(-num_envs // count) * count}")
    return num_envs // count
