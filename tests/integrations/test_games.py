"""Atari and MinAtar, and resized images: `make test-integrations` installs ale-py, minatar and OpenCV."""

import time

import gymnasium
import numpy as np
import pytest
import torch
from helpers.compose import build_composed_run, prepare_session, train_in
from helpers.extras import require
from helpers.plain_loop import weights_at
from PIL import Image

from runner.commands import play
from runner.config.errors import ConfigError
from runner.env.base import Env

SHORT = (
    *("workload.warm_up=200", "workload.eval_episodes=2", "env.num_envs=4"),
    *("steps=4", "eval_every=2", "save_every=2"),
)
SHORT += ("env.max_episode_steps=60", "workload.replay_size=2000", "device=cpu", "device.threads=1", "batch_size=32")


@pytest.mark.cases(
    ("Box2D", ("env.id=LunarLander-v3", "model.hidden=[8]")),
    ("minatar", ("env=minatar", "env.id=MinAtar/SpaceInvaders-v1", "model=minatar_cnn", "env.frame_stack=2")),
    ("ale_py", ("env=atari", "model=nature_cnn", "workload.terminal_on_life_loss=true", "env.max_episode_steps=30")),
)
def test_agents_in_games_and_physics_resume_bitwise(package, words, tmp_path, caplog):
    require(package)
    for name, steps in (("whole", (8,)), ("halves", (5, 8))):
        for last in steps:
            overrides = ("workload=dqn", *SHORT, "eval_every=0", "schedule=constant", *words, f"steps={last}")
            with caplog.at_level("WARNING", "runner"):
                result = train_in(tmp_path / name, build_composed_run(*overrides)).result
    assert "new episodes" not in caplog.text
    assert result.notes["episodes"] > 3
    whole, halves = (weights_at(tmp_path / name, 8) for name in ("whole", "halves"))
    assert all(torch.equal(halves[name], whole[name]) for name in whole)


def test_games_are_replayed_from_when_they_were_last_seeded(monkeypatch):
    """Episodes end at different times; with 40 in place of 10,000 steps, games begin with several seeds."""
    require("ale_py")
    monkeypatch.setattr("runner.env.atari._SEEDED_EVERY", 40)
    env = games("env.id=ALE/Breakout-v5", "env.max_episode_steps=25")
    with env.vector(3) as first, env.vector(3) as second:
        first.reset(5)
        random = np.random.default_rng(0)
        for steps in (10, 17, 16, 30, 55):  # 27 steps are an episode and the first one of another
            for _ in range(steps):
                first.step(random.integers(env.num_actions, size=3))
            second.reset(6)
            assert second.load_state_dict(first.state_dict()) == []  # pyright: ignore[reportArgumentType]
            for _ in range(35):
                actions = random.integers(env.num_actions, size=3)
                each = [vector.step(actions) for vector in (first, second)]
                assert all(np.array_equal(*pair) for pair in zip(*each, strict=True) if pair[0] is not None)


def test_episodes_of_minatar_depend_on_their_seed_and_actions_alone_and_are_replayed_quickly():
    require("minatar")
    actions = np.random.default_rng(0).integers(3, size=2400)
    for game in ("Breakout", "Asterix", "Freeway", "Seaquest", "SpaceInvaders"):
        env = Env(f"MinAtar/{game}-v1", options={"sticky_action_prob": 0.5})
        env.prepare()
        with env.vector(1) as used, env.vector(1) as new:
            used.reset(1)
            for action in actions[:300]:
                used.step(np.full(1, action))
            for vector in (used, new):
                vector.reset(2)
            for action in actions[:100]:
                steps = [vector.step(np.full(1, action)) for vector in (used, new)]
                assert all(np.array_equal(*pair) for pair in zip(*steps, strict=True) if pair[0] is not None)
            if game == "Freeway":  # its episodes have 2,500 steps
                used.reset(2)
                for action in actions:
                    assert used.step(np.full(1, action)).taken[0]
                begun = time.process_time()
                assert new.load_state_dict(used.state_dict()) == []  # pyright: ignore[reportArgumentType]
                assert (time.process_time() - begun) * 10_000 / len(actions) < 1


def games(*overrides: str) -> Env:
    run = build_composed_run("workload=dqn", "env=atari", "model=nature_cnn", *overrides)
    prepare_session(run)
    return run.workload.env  # pyright: ignore[reportAttributeAccessIssue]


def test_frames_and_rewards_are_those_of_ale_py_itself():
    """The frames are those of the stacks that ale-py makes; the first one of an episode is repeated before it."""
    require("ale_py")
    env = games("env.id=ALE/Pong-v5", "env.sticky_actions=0", "env.max_episode_steps=40")
    assert (env.shape, env.num_actions, env.longest) == ((4, 84, 84), 6, 40)
    options = {"reward_clipping": False, "repeat_action_probability": 0.0, "max_num_frames_per_episode": 160}
    plain = gymnasium.make_vec("ALE/Pong-v5", 2, "vector_entry_point", **options)
    wanted = plain.reset(seed=np.array([3, 4]))[0]
    random, resets = np.random.default_rng(0), 0
    with env.vector(2) as vector:
        vector.reset([3, 4])
        for _ in range(90):
            assert np.array_equal(vector.observations[:, -1], wanted[:, -1])
            actions = random.integers(6, size=2)
            steps = vector.step(actions)
            wanted, rewards, terminated, truncated, _ = plain.step(actions)
            assert (steps.rewards == rewards).all()
            assert (steps.terminated == terminated).all()
            assert (steps.truncated == truncated).all()
            for stack in vector.observations[~steps.taken]:
                assert all(np.array_equal(frame, stack[-1]) for frame in stack)
                resets += 1
    assert resets == 4


def test_an_atari_agent_trains_resumes_and_is_filmed_in_color(tmp_path):
    require("ale_py")
    more = ("env=atari", "model=nature_cnn", "workload.clip_rewards=true", "workload.terminal_on_life_loss=true")
    run = tmp_path / "run"
    for steps in (2, 4):
        overrides = ("workload=dqn", *more, *SHORT, f"steps={steps}", "workload.record_video=true")
        assert train_in(run, build_composed_run(*overrides)).result.steps == steps
    assert play.main([str(run), "--film", str(tmp_path / "film.gif")]) == 0
    with Image.open(tmp_path / "film.gif") as film:
        assert film.size == (160, 210)
        assert len(set(film.convert("RGB").get_flattened_data())) > 5
    with pytest.raises(ConfigError) as refusal:
        games("env.id=ALE/Breakou-v5")
    assert refusal.value.key == "env.id"
    assert "Did you mean: `Breakout`" in refusal.value.why


def test_games_of_ale_py_are_refused_without_their_preprocessing():
    require("ale_py")
    with pytest.raises(ConfigError) as refusal:
        prepare_session(build_composed_run("workload=dqn", "env.id=ale_py:ALE/Breakout-v5", "model=nature_cnn"))
    assert (refusal.value.key, refusal.value.remedy) == ("env.id", "env=atari env.id=ALE/Breakout-v5")


def test_a_minatar_agent_trains_and_is_filmed(tmp_path):
    require("minatar")
    result = train_in(tmp_path, build_composed_run("workload=dqn", "env=minatar", "model=minatar_cnn", *SHORT)).result
    assert result.status == "done"
    assert play.main([str(tmp_path), "--film", str(tmp_path / "film.gif")]) == 0
    with Image.open(tmp_path / "film.gif") as film:
        assert film.size == (160, 160)


def test_color_images_are_resized(monkeypatch):
    require("cv2")
    monkeypatch.setitem(gymnasium.registry, "Color-v0", gymnasium.envs.registration.EnvSpec("Color-v0", Color))
    env = Env("Color-v0", 2, grayscale=True, image_size=20, frame_stack=2)
    env.prepare()
    with env.vector(2) as vector:
        vector.reset(0)
        assert vector.observations.shape == (2, 2, 20, 20)
        assert set(vector.observations.flatten().tolist()) == {100}


class Color(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (60, 40, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.full((60, 40, 3), 100, np.uint8), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.full((60, 40, 3), 100, np.uint8), 0.0, False, False, {}
