"""Which environments an agent acts in; nothing of gymnasium is loaded before one is needed."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from runner.config.errors import ConfigError, check, check_choice, check_range, did_you_mean

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec

    from runner.env.vector import Vector

_MOST = 4096  # more at once is a slip of the finger
_MOST_PROCESSES = 128  # forking thousands brings a machine to its knees before any limit of the system stops it
_EXTRAS = {"box2d": "box2d", "classic_control": "classic-control"}
"""Families of environments that need more than gymnasium, and the extra of gymnasium that brings it."""


@dataclass
class Env:
    """An environment of gymnasium (Towers et al., 2024) with discrete actions.

    Args:
        id: its registered name; `module:Name-v0` imports the module first, which registers it.
        num_envs: how many are stepped together, over all processes.
        vectorization: `auto` (gymnasium's own vector version where there is one, else `sync`), `sync` (one after the
            other), `async` (a process each, for environments that take long).
        max_episode_steps: truncate episodes after so many steps; null: as registered.
    """

    id: str = "CartPole-v1"
    num_envs: int = 8
    vectorization: str = "auto"
    max_episode_steps: int | None = None

    may_change_on_resume: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_range(self, "num_envs", least=1, most=_MOST)
        check_choice(self, "vectorization", ("auto", "sync", "async"))
        check_range(self, "max_episode_steps", least=1)

    def prepare(self) -> None:
        """Look at one environment: `shape` of its observations, `num_actions`, the length of its episodes.

        Raises:
            ConfigError: when there is none of this name, it cannot be made here, or an agent of discrete actions
                cannot act in it.
        """
        from runner.env.spaces import described  # here, not above: it loads gymnasium and numpy

        spec = self._spec()
        single = self._make_one(spec)
        self._drawable = "rgb_array" in single.metadata.get("render_modes", ())
        self._is_gymnasiums = type(single.unwrapped).__module__.startswith("gymnasium.")
        self.shape, self.num_actions = described(self.id, single)
        self.longest = self.max_episode_steps or spec.max_episode_steps
        with self.vector(1, in_process=True) as vector:
            self.shared_rng = vector.shared_rng
        if self.vectorization == "async":
            why, fewer = f"a process each, and {_MOST_PROCESSES} are the most here", "fewer, or env.vectorization=sync"
            check(self.num_envs <= _MOST_PROCESSES, "num_envs", self.num_envs, why, fewer)
            with self.vector(self.num_envs) as vector:  # all of them, now: later it would cost a run
                vector.reset(0)

    def vector(self, num_envs: int, in_process: bool = False, render: bool = False) -> Vector:
        """`num_envs` environments, to be stepped together; a context that closes them.

        Args:
            in_process: in this process, whatever `vectorization` says of the agent's own.
            render: let them be drawn.

        Raises:
            ConfigError: when so many cannot be started.
        """
        from runner.env.vector import Vector, make  # as above

        spec = self._spec()
        vectorization = "sync" if in_process and self.vectorization == "async" else self.vectorization
        try:
            return Vector(make(spec, num_envs, vectorization, self._options(render)), self.id)
        except (OSError, EOFError, RuntimeError) as error:
            why = f"so many cannot be started: {type(error).__name__}: {error}"
            raise ConfigError("num_envs", num_envs, why, "fewer, or env.vectorization=sync") from None

    def cannot_be_drawn(self) -> tuple[str, str] | None:
        """Why this environment cannot be drawn here, and what to do; None where it can."""
        if not self._drawable:
            return f"{self.id} does not draw itself", "leave it false"
        if self._is_gymnasiums and importlib.util.find_spec("pygame") is None:
            return "pygame, which draws the environments, is not installed", "pip install 'gymnasium[classic-control]'"
        return None

    def _options(self, render: bool) -> dict[str, Any]:
        options: dict[str, Any] = {"render_mode": "rgb_array"} if render else {}
        return options | ({"max_episode_steps": self.max_episode_steps} if self.max_episode_steps else {})

    def _spec(self) -> EnvSpec:
        """The entry of gymnasium's registry."""
        import gymnasium  # here, not above: 0.1 s, and numpy

        module, _, name = self.id.rpartition(":")
        try:
            if module:
                importlib.import_module(module)
            return gymnasium.spec(name)
        except (gymnasium.error.Error, ImportError):
            # Not the variants in namespaces (phys2d/…, for JAX), unless a namespace was typed.
            known = did_you_mean(name, [each for each in gymnasium.registry if ("/" in each) == ("/" in name)])
            remedy = (
                known if known.startswith("did") else "env=cartpole, acrobot, mountaincar and lunarlander are there"
            )
            raise ConfigError("id", self.id, "gymnasium knows no such environment", remedy) from None

    def _make_one(self, spec: EnvSpec) -> Any:
        """A single environment, to be asked for its spaces."""
        import gymnasium

        try:
            return gymnasium.make(spec, **self._options(render=False))
        except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
            sentence = str(error).splitlines()[0]
            extra = next((name for family, name in _EXTRAS.items() if family in str(spec.entry_point)), "")
            remedy = f"pip install 'gymnasium[{extra}]'" if extra else "install what it names"
            raise ConfigError("id", self.id, f"it cannot be made here: {sentence}", remedy) from None
        except Exception as error:  # somebody else's environment may raise anything
            why = f"it cannot be made: {type(error).__name__}: {error}"
            raise ConfigError("id", self.id, why, "choose another") from None


def envs_per_process(num_envs: int, count: int) -> int:
    """How many of `num_envs` environments each of `count` processes acts in.

    Raises:
        ConfigError: when they cannot be dealt out evenly.
    """
    why = f"they cannot be dealt out evenly to {count} processes"
    check(num_envs % count == 0, "env.num_envs", num_envs, why, f"env.num_envs={-(-num_envs // count) * count}")
    return num_envs // count
