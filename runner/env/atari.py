"""Atari games, by the vectorized environment of ale-py, which is written in C++ and preprocesses the images itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.config.errors import check, check_choice, check_range
from runner.env.base import Env
from runner.system.import_path import is_installed

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec
    from gymnasium.vector import VectorEnv

_MAX_EPISODE_FRAMES = 108_000  # half an hour of a game (Machado et al., 2018)
_FRAMES_PER_SECOND, _DEFAULT_SIZE = 60, 84


@dataclass
class Atari(Env):
    """A game of the Arcade Learning Environment (Bellemare et al., 2013); for options, see `conf/env/atari.yaml`.

    Observations are the last `frame_stack` images, preprocessed as by Mnih et al. (2015) and Machado et al. (2018).
    """

    id: str = "ALE/Breakout-v5"
    frame_stack: int = 4
    frame_skip: int = 4
    grayscale: bool = True
    image_size: int | None = 84
    noop_max: int = 30
    fire_reset: bool = True
    sticky_actions: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "vectorization", ("auto",))
        check_range(self, "noop_max", least=0, most=1000)
        check_range(self, "sticky_actions", least=0, below=1)

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
        from runner.env.atari_vector import AtariVector

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
