"""Tests of `runner play`: its output, its films, and refused arguments."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from helpers.compose import TINY_CPU
from PIL import Image

import runner
from runner.commands import play, predict
from runner.seeds import derive

pytestmark = pytest.mark.usefixtures("elsewhere")


class Corridor(gymnasium.Env):
    """Six positions; action 1 moves forward by one. The gray level of a frame is 40 × position."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 50}  # pyright: ignore
    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.steps = int(self.np_random.integers(3)), 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = 1.0 + 0.25 * self.place * int(action)
        self.place, self.steps = min(5, self.place + int(action)), self.steps + 1
        return self._observation(), reward, self.place == 5 or self.steps == 9, False, {}

    def render(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        return np.full((10, 20, 3), 40 * self.place, np.uint8)

    def _observation(self) -> np.ndarray:
        return np.array([self.place, self.steps], np.float32)


@pytest.fixture(scope="module")
def agent(tmp_path_factory) -> Iterator[runner.Result]:
    """An agent in the corridor, that tests only read."""
    spec = EnvSpec("Corridor-v0", Corridor, disable_env_checker=True)  # pyright: ignore[reportArgumentType]
    words = ["workload=dqn", "env.id=Corridor-v0", "steps=40", "workload.warm_up=100", "workload.eval_episodes=5"]
    words += ["workload.record_video=true", "device=cpu", "device.threads=1", "model.hidden=[8]", "batch_size=32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gymnasium.registry, "Corridor-v0", spec)
        yield runner.train([*words, f"output_root={tmp_path_factory.mktemp('agent')}"])


@torch.no_grad()
def by_hand(run: runner.Result, seed: int) -> tuple[float, int, list[int]]:
    """Play an episode without `runner.env`; return the return, the number of steps, and the position before each."""
    assert run.directory
    model, env = runner.load(run.directory).model(), Corridor()
    observation, _ = env.reset(seed=seed % (2**31 - 4096))  # environments of others may take no larger seeds
    total, places, ended = 0.0, [], False
    while not ended:
        places.append(env.place)
        action = int(model(torch.from_numpy(observation)[None]).argmax())
        observation, reward, ended, _, _ = env.step(action)
        total += reward
    return total, env.steps, places


def test_the_film_and_the_returns_are_those_of_the_greedy_policy(agent, capsys):
    arguments = [str(agent.directory), "--film", "agent.gif", "--episodes", "4", "--seed", "3"]
    capsys.readouterr()
    assert play.main(arguments) == 0
    episodes = [by_hand(agent, derive(3, "play", episode)) for episode in range(4)]
    assert capsys.readouterr().out.splitlines() == [
        f"episode {number}: return {total:g}, {length} steps" for number, (total, length, _) in enumerate(episodes)
    ]
    every_other = [40 * place for _, _, places in episodes for place in places[::2]]
    shades: list[int] = []
    with Image.open("agent.gif") as film:
        for index in range(film.n_frames):  # pyright: ignore[reportAttributeAccessIssue]
            film.seek(index)
            # a frame that equals the previous one is not stored; the previous one is shown for longer
            shades += [film.convert("RGB").getpixel((2, 2))[0]] * round(film.info["duration"] / 40)  # pyright: ignore
    assert shades == every_other
    assert len(set(every_other)) > 1


def test_mistakes_are_refused_with_the_key(agent, capsys, monkeypatch):
    monkeypatch.setattr(play, "_MAX_FRAMES", 2)
    Path("link.gif").symlink_to("elsewhere.gif")
    classifier = runner.train([*TINY_CPU, "steps=1"])
    capsys.readouterr()
    for words, key in {
        ("--film", "agent.png"): "--film",
        ("--film", "missing/agent.gif"): "--film",
        ("--film", "link.gif"): "--film",
        ("--film", "agent.gif", "--episodes", "4"): "--episodes",  # too many frames
        ("--episodes", "0"): "--episodes",
        ("--checkpoint", "7"): "--checkpoint",
        ("env.idd=CartPole-v1",): "env.idd",
        (): "env",  # this environment cannot render to a window
        ("classifier",): "RUN",
    }.items():
        run, flags = (classifier, ()) if words == ("classifier",) else (agent, words)
        assert play.main([str(run.directory), *flags]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" or key == "--episodes"
        assert f"\n{key}:" in f"\n{captured.err}"
    assert predict.main([str(agent.directory), "."]) == 2
    assert "runner play" in capsys.readouterr().err
    assert not Path("agent.gif").exists()
    assert not Path("elsewhere.gif").exists()


def test_a_window_shows_the_episode_and_without_a_display_a_film_is_suggested(agent, monkeypatch, capsys):
    modes: list[str | None] = []
    create: Callable[..., None] = Corridor.__init__
    monkeypatch.setattr(Corridor, "__init__", lambda env, render_mode=None: (modes.append(render_mode), create(env))[1])
    monkeypatch.setattr(play, "_has_display", lambda: False)
    for drawn, suggested in (["human", "rgb_array"], "--film FILE.gif"), (["human"], "evaluate"), ([], "evaluate"):
        monkeypatch.setitem(Corridor.metadata, "render_modes", drawn)
        assert play.main([str(agent.directory)]) == 2
        assert suggested in (err := capsys.readouterr().err)
        assert ("--film FILE" in err) == ("rgb_array" in drawn), "what cannot be filmed is not suggested"
        assert "record_video" not in err
    assert play.main([str(agent.directory), "--film", "agent.gif"]) == 2
    assert capsys.readouterr().err.startswith("--film: got 'agent.gif': Corridor-v0 does not support")
    monkeypatch.setitem(Corridor.metadata, "render_modes", ["human"])
    monkeypatch.setattr(play, "_has_display", lambda: True)
    assert play.main([str(agent.directory)]) == 0
    total, length, _ = by_hand(agent, derive(0, "play", 0))
    assert capsys.readouterr().out == f"episode 0: return {total:g}, {length} steps\n"
    assert "human" in modes
