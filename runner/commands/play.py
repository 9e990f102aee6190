"""`python -m runner play RUN [OVERRIDE …]` shows a trained agent in a window; `--film FILE.gif` films it instead.

The agent always takes the action with the highest value, as in an evaluation. The return and the length of each episode
are printed. Overrides change the config of the run: `env.max_episode_steps=1000` permits longer episodes. Drawing needs
pygame: pip install 'gymnasium[classic-control]'.

Exit codes: 0: played. 1: crashed. 2: there is no such run or checkpoint, the agent cannot be shown, or the film would
become too long. 130: ended with Ctrl-C.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.analysis.output import check_writable
from runner.commands.arguments import Parser, command
from runner.config.errors import ABSENT, ConfigError, check
from runner.config.options import chosen_option
from runner.config.overrides import typed_path
from runner.seeds import derive
from runner.system.console import DONE

if TYPE_CHECKING:
    from runner.env.vector import Vector

_MAX_FRAMES = 2_000
"""The maximum number of frames in a film, which are all kept in memory: one of CartPole takes 0.7 MB."""

_FRAMES_PER_SECOND = 25
"""The approximate frame rate of a film. Frames are left out if the environment renders more of them per second."""


@command
def main(arguments: Sequence[str] | None) -> int:
    parser = Parser("play", __doc__, overrides=True, config_dir=False)
    parser.add_run("the run directory of an agent")
    parser.add_argument("--episodes", metavar="N", type=int, default=1, help="number of episodes (default: 1)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the initial states (default: 0)")
    parser.add_argument("--film", metavar="FILE.gif", help="write a film instead of showing a window")
    options = parser.parsed(arguments)
    check(options.episodes >= 1, "--episodes", options.episodes, "nothing would be played", "use --episodes 1")
    check_writable("--film", options.film, ".gif")
    import torch

    from runner.api.saved import load
    from runner.system.trees import Tree, call, map_tensors
    from runner.tracking.image_grids import gif
    from runner.workloads.dqn.evaluation import frame, play_one
    from runner.workloads.dqn.workload import DQN

    run = load(options.run)
    workload = run.on_one_device(options.checkpoint, options.overrides).workload
    if not isinstance(workload, DQN):
        why = f"it is a run of workload={chosen_option('workload', workload)}, and only agents play"
        raise ConfigError("directory", str(run.directory), why, "name a run of workload=dqn")
    workload.prepare()
    model = run.model(options.checkpoint, options.overrides)

    env, film = workload.env, options.film
    render_mode = "rgb_array" if film else "human"
    words = shlex.join(options.overrides)
    otherwise = f"without pictures: python -m runner evaluate {typed_path(run.directory)} {words}".rstrip()
    if not film and not env.cannot_be_drawn("rgb_array", ""):
        otherwise = "film it: --film FILE.gif"
    if missing := env.cannot_be_drawn(render_mode, otherwise):
        raise ConfigError("env" if film is None else "--film", film or env.name, *missing)
    has_window = film is not None or _has_display()
    check(has_window, "--film", ABSENT, "there is no display on which a window could open", otherwise)

    dtype, device = next(model.parameters()).dtype, torch.device("cpu")
    every = max(1, round(env.frames_per_second / _FRAMES_PER_SECOND))
    frames: list[torch.Tensor] = []

    def infer(observations: Tree) -> torch.Tensor:  # with masks, if there are any, which stay truth values
        return call(model, map_tensors(lambda each: each if each.dtype == torch.bool else each.to(dtype), observations))

    def keep(vector: Vector, step: int) -> None:
        if film is not None and step % every == 0:
            why = f"a film has at most {_MAX_FRAMES} frames, and episode {episode} would exceed them"
            check(len(frames) < _MAX_FRAMES, "--episodes", options.episodes, why, "play fewer, or shorter ones")
            frames.append(frame(vector))

    for episode in range(options.episodes):
        state_seed = derive(options.seed, "play", episode)
        with torch.no_grad():
            total, length = play_one(env, infer, device, state_seed, render_mode, keep)
        print(f"episode {episode}: return {total:g}, {length} steps")
    if film is not None:
        try:
            Path(film).expanduser().write_bytes(gif(frames, every / env.frames_per_second))
        except OSError as error:
            why = f"it cannot be written: {error.strerror}"
            raise ConfigError("--film", film, why, "make room, or write it elsewhere") from None
    return DONE


def _has_display() -> bool:
    """Return whether a window can be shown; False if pygame finds no display."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        import pygame  # pyright: ignore[reportMissingImports]
    except ImportError:  # the environment draws without it
        return True
    try:
        pygame.display.init()
    except pygame.error:
        return False
    return pygame.display.get_driver() not in ("offscreen", "dummy") or "SDL_VIDEODRIVER" in os.environ
