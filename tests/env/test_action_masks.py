"""Tests of action masks: exploration, greedy actions, targets, evaluation and the replay buffer obey them."""

import logging
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from helpers import seeded_envs
from helpers.compose import build_composed_run, prepare_session, train_in
from helpers.plain_loop import weights_at

from runner.config.errors import ConfigError
from runner.env.action_masks import random_actions
from runner.env.vector import Pixels, Steps
from runner.models.qnet import QNet, WithTarget
from runner.workloads.dqn.frame_replay import FrameReplay
from runner.workloads.dqn.replay import NStepBuffer, Replay, Transitions

ID = f"env.id={seeded_envs.__name__}:MaskedWalk-v0"
SMALL = (
    *("workload=dqn", "device=cpu", "device.threads=1", "model.hidden=[8]", "batch_size=16", "env.num_envs=4"),
    *("workload.warm_up=80", "workload.replay_ratio=0.2", "workload.replay_size=300", "schedule=constant"),
    *("workload.eval_episodes=3", "steps=12", "env.max_episode_steps=25"),
)


def test_random_actions_are_uniform_among_those_that_are_allowed():
    uniforms = np.random.default_rng(0).random(3000)
    masks = np.tile(np.array([[0, 1, 0, 1, 1]], bool), (3000, 1))
    counts = np.bincount(random_actions(uniforms, 5, masks), minlength=5)
    assert counts[[0, 2]].tolist() == [0, 0]
    assert counts[[1, 3, 4]] == pytest.approx([1000] * 3, abs=100)
    everything = random_actions(uniforms, 5, np.ones((3000, 5), bool))
    assert np.array_equal(everything, random_actions(uniforms, 5, None))


def test_targets_and_actions_leave_out_what_is_not_allowed():
    """Online: Q(o) = (1, 3, 2) · o. Target: Q(o) = (30, 10, 20) · o."""
    model = WithTarget(QNet(1, 3, ()))
    with torch.no_grad():
        for net, weights in ((model.online, [1.0, 3.0, 2.0]), (model.target, [30.0, 10.0, 20.0])):
            net.head.weight.copy_(torch.tensor(weights)[:, None])  # pyright: ignore
            net.head.bias.zero_()  # pyright: ignore
    seen = torch.ones(4, 1)
    allowed = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 0, 0], [0, 1, 1]]).bool()
    assert model((seen, allowed)).argmax(1).tolist() == [1, 2, 0, 1]
    for double, wanted in ((True, [10.0, 20.0, 30.0, 10.0]), (False, [30.0, 30.0, 30.0, 20.0])):
        values, following = model(seen, (seen, allowed), double=double)
        assert values.tolist() == [[1.0, 3.0, 2.0]] * 4
        assert following[:, 0].tolist() == wanted
        run: Any = build_composed_run("workload=dqn", f"workload.double={double}", "workload.td_loss=mse")
        batch = Transitions(seen, torch.ones(4, 1).long(), torch.ones(4, 1), seen, torch.full((4, 1), 0.5))
        loss, _ = run.workload.loss(model, batch._replace(next_masks=allowed))
        assert loss.item() == pytest.approx(np.mean([(3 - 1 - 0.5 * each) ** 2 for each in wanted]))


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("num_actions", [3, 24, 61])
def test_the_replay_buffer_has_the_mask_of_each_next_observation(images, num_actions):
    random, n_step = np.random.default_rng(0), 3
    pixels = Pixels((), (1, 4, 4), 2, 1.0)
    if images:
        replay: Replay = FrameReplay(200, 2, pixels, n_step, "cpu", num_actions)
    else:
        replay = Replay(200, 32, "cpu", num_actions)
    window = NStepBuffer(2, 1 if images else 32, n_step, 0.9, num_actions)
    wanted: dict[bytes, np.ndarray] = {}
    seen = np.zeros((2, 2, 4, 4), np.uint8)
    for time in range(40):
        following = np.concatenate((seen[:, 1:], random.integers(256, size=(2, 1, 4, 4), dtype=np.uint8)), 1)
        masks = random.random((2, num_actions)) < 0.5
        if time % 7 == 6:
            masks[:] = False  # after the last step of an episode
        ended, taken = np.full(2, time % 7 == 6), np.full(2, time % 7 != 0 or time == 0)
        if not taken[0]:
            following = np.repeat(following[:, 1:], 2, 1)
        steps = Steps(following, np.zeros(2), ended, ~ended & False, taken, None, masks)
        replay.store(window, seen, np.zeros(2, np.int64), steps)
        seen = following
        wanted |= {each.tobytes(): mask | ~mask.any() for each, mask in zip(following, masks, strict=True)}
    rows = replay.at(replay.complete.nonzero()[0]) if isinstance(replay, FrameReplay) else replay.rows[: len(replay)]
    batch = replay.batch(rows, torch.device("cpu"))
    assert len(rows) > 60
    assert batch.next_masks is not None
    for following, mask in zip(batch.next_observations, batch.next_masks, strict=True):
        assert mask.tolist() == wanted[following.to(torch.uint8).numpy().tobytes()].tolist()


@pytest.mark.cases(
    ("single", "workload.epsilon_repeat=6 workload.epsilon_start=0.5"),
    pytest.param("single", "compile=step", marks=pytest.mark.slow),
    pytest.param("ddp", "workload.double=false", marks=pytest.mark.slow),
    ("ensemble", "workload.eval_epsilon=0.3"),
    ("fsdp", "accumulation=2 workload.double=false"),
    pytest.param("hogwild", "workload.n_step=2", marks=pytest.mark.slow),
)
def test_an_agent_takes_only_actions_that_are_allowed_in_every_mode(mode, more, ranks, tmp_path):
    """Any other action is an error of this environment, also in evaluations."""
    from helpers.compose import compose_config

    config = compose_config(*SMALL, ID, f"parallel={mode}", *more.split())
    result = ranks(1 if mode in ("single", "hogwild") else 2).train(config, tmp_path / "run")
    assert result.status == "done"
    assert np.isfinite(result.metrics["train/td_loss"])
    assert result.metrics["eval/length"] > 8


class InObservation(seeded_envs.MaskedWalk):
    """Its mask is a part of its observations."""

    observation_space = gymnasium.spaces.Dict(  # pyright: ignore[reportAssignmentType]
        {"action_mask": gymnasium.spaces.MultiBinary(5), "seen": seeded_envs.Walk.observation_space}
    )

    def reset(self, **given: Any) -> tuple[Any, dict]:
        seen, info = super().reset(**given)
        return {"seen": seen, "action_mask": info["action_mask"]}, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        seen, *others, info = super().step(action)
        return {"seen": seen, "action_mask": info["action_mask"]}, *others, {}  # pyright: ignore


def test_a_mask_in_an_observation_is_obeyed_and_seen(monkeypatch, tmp_path):
    spec = EnvSpec("InObservation-v0", InObservation, disable_env_checker=True)
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    run = build_composed_run(*SMALL, f"env.id={spec.id}", "workload.epsilon_start=0.5")
    assert train_in(tmp_path, run).result.status == "done"
    assert "observations of 8, 5 actions, masked" in run.workload.describe()["env"]


def test_a_replay_that_was_saved_without_masks_is_resumed(tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr("runner.env.base.Env._try_out", _without_masks)
        first = train_in(tmp_path / "run", build_composed_run(*SMALL, "env.id=Taxi-v4"))
        assert first.run.workload.env.has_masks is False  # pyright: ignore
    with caplog.at_level(logging.WARNING, "runner"):
        options = ("env.id=Taxi-v4", "steps=16")
        second = train_in(tmp_path / "run", build_composed_run(*SMALL, *options))
    assert second.run.workload.env.has_masks is True  # pyright: ignore
    assert (second.result.status, second.result.steps) == ("done", 16)
    assert "new episodes" not in caplog.text
    assert weights_at(tmp_path / "run", 16)


def _without_masks(self: Any, vector: Any) -> bool:
    vector.reset(0)
    return False


class Wrong(gymnasium.Env):
    """Its masks are not as they have to be: `how` says in which way."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, how: str) -> None:
        self.how = how

    def mask(self, resets: bool) -> dict[str, Any]:
        masks = {"short": [1, 1], "none": [0, 0, 0], "only at first": [1, 1, 1] if resets else None}
        mask = masks[self.how]
        return {} if mask is None else {"action_mask": np.array(mask, np.int8)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        return np.zeros(2, np.float32), self.mask(True)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.zeros(2, np.float32), 0.0, False, False, self.mask(False)


@pytest.mark.cases(
    ("short", "has the shape (2,), and there are 3 actions"),
    ("none", "allows no action"),
    ("only at first", "is not in each info"),
)
def test_masks_that_cannot_be_obeyed_are_refused_before_the_run(how, why, monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Wrong-v0", EnvSpec("Wrong-v0", Wrong, disable_env_checker=True))
    with pytest.raises(ConfigError) as refusal:
        prepare_session(build_composed_run("workload=dqn", "env.id=Wrong-v0", f"env.options={{how: {how}}}"))
    assert refusal.value.key == "env.id"
    assert why in refusal.value.why
