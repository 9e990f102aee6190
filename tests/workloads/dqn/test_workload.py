"""Tests of the DQN workload: loss and gradient, number of environment steps, training, evaluation and resume."""

import itertools
import math
import shutil
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import gymnasium
import numpy as np
import pytest
import safetensors.torch
import torch
from gymnasium.envs.registration import EnvSpec
from helpers import seeded_envs
from helpers.agents import plain_return
from helpers.compose import TrainedRun, build_composed_run, prepare_session, train_in
from helpers.events import load_events, scalar_curves
from helpers.plain_loop import weights_at
from PIL import Image

from runner.batching import Plan
from runner.config.errors import ABSENT, ConfigError
from runner.models.qnet import QNet, WithTarget
from runner.optimizer import trainable
from runner.seeds import derive
from runner.training import initial_state, train_step
from runner.workloads.dqn.replay import Replay, Transitions, unpack

SMALL = (
    *("workload=dqn", "device=cpu", "device.threads=1", "model.hidden=[16]", "batch_size=64"),
    *("workload.warm_up=80", "workload.replay_ratio=0.5", "workload.eval_episodes=4", "env.max_episode_steps=60"),
)
"""Overrides of an agent whose steps take little time."""


def linear_agent() -> WithTarget:
    """Return a linear online network and a linear target network, with different weights and without bias.

    The action values of these networks are easy to compute by hand.
    """
    model = WithTarget(QNet(2, 2, ()))
    with torch.no_grad():
        model.online.head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))  # pyright: ignore
        model.target.head.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))  # pyright: ignore
        for net in (model.online, model.target):
            net.head.bias.zero_()  # pyright: ignore
    return model


CPU = torch.device("cpu")
BATCH = Transitions(
    observations=torch.tensor([[1.0, 1.0], [2.0, -1.0], [0.5, 0.0]]),
    actions=torch.tensor([[0], [1], [0]]),
    returns=torch.tensor([[1.0], [0.0], [5.0]]),
    next_observations=torch.tensor([[1.0, 1.0], [2.0, 1.0], [1.0, 0.0]]),
    discounts=torch.tensor([[0.5], [0.9], [0.0]]),  # the last episode is terminated
)
# Online: Q(o) = (o₀, 2·o₁), which is 1, −2 and 0.5 for the actions taken. For the next observations, it is (1, 2),
# (2, 2), of which argmax takes the first, and (1, 0). Target: Q(o) = (3·o₀, o₁), which is (3, 1), (6, 1) and (3, 0).
BOOTSTRAPS = {True: [1.0, 6.0, 3.0], False: [3.0, 6.0, 3.0]}


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(("kind", "delta"), [("huber", 1.0), ("huber", 0.25), ("huber", 5.0), ("mse", 1.0)])
def test_loss_and_gradient_equal_those_computed_by_hand(double, kind, delta):
    options = (f"workload.double={double}", f"workload.td_loss={kind}", f"workload.huber_delta={delta}")
    run = build_composed_run("workload=dqn", *options)
    model = linear_agent()
    loss, sums = run.workload.loss(model, BATCH)
    values = [1.0, -2.0, 0.5]
    targets = [1 + 0.5 * BOOTSTRAPS[double][0], 0 + 0.9 * BOOTSTRAPS[double][1], 5.0]
    errors = [v - t for v, t in zip(values, targets, strict=True)]
    if kind == "mse":
        each, slopes = [e * e for e in errors], [2 * e for e in errors]
    else:
        each = [e * e / 2 if abs(e) < delta else delta * (abs(e) - delta / 2) for e in errors]
        slopes = [max(-delta, min(delta, e)) for e in errors]
    assert loss.item() == pytest.approx(sum(each) / 3)
    assert sums[0].tolist() == pytest.approx([sum(each), sum(values)])
    assert sums[1].tolist() == [3, 3]
    assert sums.dtype == torch.float64
    loss.backward()
    gradient = torch.zeros(2, 2)
    for slope, action, observation in zip(slopes, (0, 1, 0), BATCH.observations, strict=True):
        gradient[action] += slope / 3 * observation
    torch.testing.assert_close(model.online.head.weight.grad, gradient)  # pyright: ignore
    assert all(parameter.grad is None for parameter in model.target.parameters())


@pytest.mark.parametrize("precision", ["32", "bf16", "16", "64"])
def test_the_next_values_are_clipped_to_the_possible_returns(precision):
    run = build_composed_run("workload=dqn", f"precision={precision}", "workload.td_loss=mse")
    run.precision.prepare(torch.device("cpu"))
    model = run.precision.convert(linear_agent())
    for possible, bootstraps in {
        (0.0, 2.5): [1.0, 2.5, 2.5],
        (-1.0, 0.5): [0.5, 0.5, 0.5],
        (4.0, 9.0): [4.0, 6.0, 4.0],
        (-1e38, 1e38): BOOTSTRAPS[True],
        (-math.inf, math.inf): BOOTSTRAPS[True],
    }.items():
        batch = BATCH._replace(possible_returns=possible)
        with run.precision.autocast():
            loss, _ = run.workload.loss(model, batch)
        targets = [1 + 0.5 * bootstraps[0], 0 + 0.9 * bootstraps[1], 5.0]
        assert loss.item() == pytest.approx(sum((v - t) ** 2 for v, t in zip([1, -2, 0.5], targets, strict=True)) / 3)
    unclipped = build_composed_run("workload=dqn", "workload.clip_targets=false", "workload.huber_delta=1")
    loss, _ = unclipped.workload.loss(linear_agent(), BATCH._replace(possible_returns=(0.0, 2.5)))
    assert loss.item() == pytest.approx((0.125 + 6.9 + 4.0) / 3)


def prepared(*overrides: str) -> Any:
    """Return the workload of a small agent, whose environment is known."""
    run = build_composed_run(*SMALL, *overrides)
    prepare_session(run)
    return run.workload


def test_only_the_online_network_is_trained_and_the_target_follows_it():
    workload = prepared("workload.target_tau=0.25", "workload.target_every=2")
    model = workload.build_model()
    assert {id(p) for p in trainable(model)} == {id(p) for p in model.online.parameters()}
    with torch.no_grad():
        for parameter in model.online.parameters():
            parameter += 1
    before = [p.clone() for p in model.target.parameters()]
    for step, moved in ((1, 0.0), (2, 0.25), (3, 0.25), (4, 0.4375)):
        workload.after_step(model, step)
        for now, then in zip(model.target.parameters(), before, strict=True):
            torch.testing.assert_close(now, then + moved)
    model.update_target(1.0)
    assert all(torch.equal(a, b) for a, b in zip(model.target.parameters(), model.online.parameters(), strict=True))


def test_a_skipped_update_does_not_advance_the_target_network(tmp_path, monkeypatch):
    """Steps 2 and 3 are skipped, so that step 4 is update 2, which moves the target."""
    overrides = ("precision=16", "workload.target_tau=0.25", "workload.target_every=2")
    run = build_composed_run(*SMALL, *overrides)
    session = prepare_session(run)
    state = initial_state(run, session, tmp_path)
    model: Any = state.model
    session.precision._scaler = torch.amp.GradScaler("cpu", init_scale=1.0)  # pyright: ignore
    session.precision.scaled(torch.zeros(()))  # the scaler allocates its scale on first use
    monkeypatch.setattr(run.parallel, "accumulate", lambda *_: torch.ones(2, 2))
    target = model.target.head.weight.clone()
    for step in session.plan.steps(0, 5):
        for parameter in trainable(model):
            parameter.grad = torch.full_like(parameter, math.inf if step.number in (2, 3) else 1.0)
        train_step(state, itertools.repeat(None), step, log_due=False)
        if step.number == 4:
            target += 0.25 * (model.online.head.weight.detach() - target)
        torch.testing.assert_close(model.target.head.weight, target, rtol=0, atol=1e-7)
    assert session.precision.num_skipped() == 2


@pytest.mark.parametrize(("ratio", "count"), [(0.1, 1), (0.5, 2), (3.0, 4)])
def test_each_update_follows_its_share_of_environment_steps(ratio, count):
    workload = prepared(f"workload.replay_ratio={ratio}")
    model, seen = workload.build_model(), []
    for index in range(count):
        batches = workload.batches(model, Plan(64, 2, (index, count)), 0, CPU)
        for step in range(1, 30):
            chunks = [next(batches) for _ in range(2)]
            assert [len(chunk.returns) for chunk in chunks] == [32 // count] * 2
            due = 80 + step / ratio
            acted = workload._actor.num_steps * count
            assert due - 1e-3 <= acted < due + 8, "whole steps of all environments"
        seen.append(chunks[0].observations)
    assert count == 1 or not torch.isin(seen[0], seen[1]).any(), "each process acts in other environments"


def test_the_end_of_a_run_closes_its_environments():
    workload = prepared("env=acrobot")
    batches = workload.batches(workload.build_model(), Plan(64), 0, CPU)  # held until the end, as by compiled code
    next(batches)
    assert not workload._actor.vector.envs.closed
    workload.close()
    assert workload._actor.vector.envs.closed
    assert next(batches, None) is None


def test_actions_are_epsilon_greedy():
    half = ("workload.epsilon_start=0.5", "workload.epsilon_final=0.5")
    workload = prepared("env.num_envs=64", "workload.warm_up=320", *half)
    model = workload.build_model()
    for _ in itertools.islice(workload.batches(model, Plan(64), 0, CPU), 2000):
        pass
    replay = workload._actor.replay
    stored = unpack(replay.rows[400 : len(replay)])
    greedy = (model(stored.observations).argmax(1) == stored.actions[:, 0]).float().mean()
    assert greedy.item() == pytest.approx(0.75, abs=0.03)  # a random one of two actions is greedy half of the time
    assert len(stored.returns) > 2000


@pytest.fixture
def agent(tmp_path) -> Callable[..., TrainedRun]:
    """Return a function that trains a small agent in this process."""

    def train_it(*overrides: str, directory: str = "run") -> TrainedRun:
        return train_in(tmp_path / directory, build_composed_run(*SMALL, *overrides))

    return train_it


def weights(run: TrainedRun) -> dict[str, torch.Tensor]:
    newest = max(run.directory.glob("checkpoints/step_*"))
    return safetensors.torch.load_file(newest / "model.safetensors")


def test_an_agent_logs_its_curves(agent):
    run = agent("steps=100", "log_every=20", "eval_every=50", "workload.eval_episodes=6")
    seen = scalar_curves(run.directory)
    assert {"train/td_loss", "train/q_mean", "episode/return", "episode/length", "episode/epsilon"} <= seen.keys()
    assert [step for step, _ in seen["eval/return"]] == [50, 100]
    assert seen["eval/return"] == seen["eval/length"], "CartPole pays 1 a step"
    assert all(rate > 0 for _, rate in seen["time/env_steps_per_second"])
    options: Any = run.run.workload
    fractions = [n / (options.epsilon_fraction * options.env_steps) for n in (120, 160, 200, 240, 280)]
    epsilon = [1 + (options.epsilon_final - 1) * min(1, fraction) for fraction in fractions]
    assert [value for _, value in seen["episode/epsilon"]] == pytest.approx(epsilon)
    assert run.result.best["metric"] == "eval/return"  # pyright: ignore
    assert run.result.notes["env_steps"] == 280  # pyright: ignore


def test_a_longer_resume_goes_on_with_the_epsilon_it_had_unless_another_fraction_is_asked_for(agent, caplog):
    short = ("log_every=20", "workload.epsilon_fraction=0.5", "workload.env_steps=320", "workload.warm_up=120")
    longer = (*short, "workload.env_steps=800")
    first = agent(*short)

    def resumed(*words: str) -> dict[int, float]:
        target = first.directory.with_name(f"run{len(words)}")
        shutil.copytree(first.directory, target)
        with caplog.at_level("INFO", logger="runner"):
            return dict(scalar_curves(agent(*words, directory=target.name).directory)["episode/epsilon"])

    kept, asked = resumed(*longer), resumed(*longer, "workload.epsilon_fraction=0.9")
    final = 0.1
    for curve, steps in ((kept, 160), (asked, 720)):
        for step, epsilon in curve.items():
            begun = 160 if step <= first.result.steps else steps
            wanted = 1 + (final - 1) * min(1, (120 + step / first.run.workload.replay_ratio) / begun)
            assert epsilon == pytest.approx(wanted)
    assert max(step for step in kept) > first.result.steps
    assert [text.partition(" environment")[0] for text in caplog.messages if "annealed" in text] == [
        "epsilon is still annealed over the first 160",
        "epsilon is annealed over 720",
    ]


class Corridor(gymnasium.Env):
    """Five positions in a row; the last one gives a reward of 1 and ends the episode."""

    observation_space = gymnasium.spaces.Discrete(5)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        self.place = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        self.place = max(self.place + (1 if action else -1), 0)
        return self.place, float(self.place == 4), self.place == 4, False, {}


def test_the_learned_action_values_equal_the_true_ones(agent, monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Corridor-v0", EnvSpec("Corridor-v0", Corridor, disable_env_checker=True))
    small = ("env.id=Corridor-v0", "workload.env_steps=1300", "workload.discount=0.9", "workload.target_tau=0.1")
    run = agent(*small, "workload.n_step=1", "seed=100", "model.hidden=[32]", "eval_every=0", "save_every=0")
    assert run.result.metrics["eval/length"] == 4  # pyright: ignore
    online = {name.removeprefix("online."): tensor for name, tensor in weights(run).items() if "online" in name}
    net = QNet(5, 2, (32,))
    net.load_state_dict(online)
    values = net(torch.eye(5)[:4])
    right = torch.tensor([0.9**steps for steps in (3, 2, 1, 0)])
    torch.testing.assert_close(values[:, 1].detach(), right, atol=0.03, rtol=0)
    left = torch.tensor([0.9**steps for steps in (4, 4, 3, 2)])
    torch.testing.assert_close(values[:, 0].detach(), left, atol=0.05, rtol=0)


@pytest.mark.parametrize("vectorization", ["sync", "auto"])
def test_evaluation_plays_each_episode_once_in_any_number_of_shards(vectorization):
    workload = prepared(f"env.vectorization={vectorization}", "workload.eval_episodes=7")
    model = workload.build_model()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    calls: list[int] = []

    def infer(inputs: torch.Tensor) -> torch.Tensor:
        calls[-1] += 1
        return model(inputs).detach()

    def act(seen: np.ndarray) -> int:
        return int(model(torch.from_numpy(seen)[None]).argmax(1))

    whole = workload.evaluate(torch.no_grad()(model), (0, 1), CPU)
    for count in (3, 8):  # the latter are more than there are episodes
        sums = []
        for index in range(count):
            calls.append(0)
            sums.append(workload.evaluate(infer, (index, count), CPU))
            first, last = 7 * index // count, 7 * (index + 1) // count
            assert sums[-1]["count"] == last - first
            if vectorization == "sync":
                seeds = [derive(0, "evaluation", i) for i in range(first, last)]
                returns = [plain_return(act, seed, "CartPole-v1", max_episode_steps=60) for seed in seeds]
                assert float(sums[-1]["return"]) == sum(returns)
        for name, total in whole.items():
            assert float(sum(part[name] for part in sums)) == pytest.approx(float(total)), name
    assert len(set(calls)) == 1, "all ranks make equally many forward passes"
    assert workload.summarize(whole)["return"] == pytest.approx(float(whole["return"]) / 7)


def test_observations_with_bounds_are_normalized_by_them():
    run = build_composed_run("workload=dqn", "env=mountaincar", "workload.normalize=true", "device=cpu")
    prepare_session(run)
    model: Any = run.workload.build_model()
    torch.testing.assert_close(model.shift, torch.tensor([-0.3, 0.0]))  # the position is in [-1.2, 0.6]
    torch.testing.assert_close(model.scale, torch.tensor([1 / 0.9, 1 / 0.07]))  # the velocity in [-0.07, 0.07]
    corners = torch.tensor([[-1.2, -0.07], [0.6, 0.07]])
    torch.testing.assert_close(model(corners), model.online(torch.tensor([[-1.0, -1.0], [1.0, 1.0]])))


def test_observations_without_bounds_are_normalized_by_fixed_statistics():
    workload = prepared("workload.normalize=true", "workload.warm_up=2000")
    model = workload.build_model()
    batches = workload.batches(model, Plan(512), 0, CPU)
    seen = torch.cat([next(batches).observations for _ in range(4)])
    deviation, mean = torch.std_mean((seen - model.shift) * model.scale, 0)
    assert deviation.tolist() == pytest.approx([1] * 4, abs=0.35)
    assert mean.tolist() == pytest.approx([0] * 4, abs=0.5)
    torch.testing.assert_close(model(seen), model.online((seen - model.shift) * model.scale))
    assert torch.equal(workload.build_model().shift, model.shift)
    assert {"shift", "scale"} <= model.state_dict().keys()


class Drawn(gymnasium.Env):
    """Episodes of six steps; the observation is the number of the step, which the color of the picture encodes."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    observation_space = gymnasium.spaces.Box(-99, 99, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.now = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.now += 1
        return np.full(1, self.now, np.float32), 1.0, self.now == 6, False, {}

    def render(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        return np.full((10, 20, 3), 40 * self.now, np.uint8)


def test_the_best_policy_is_filmed_and_episodes_that_cannot_be_saved_are_replayed(agent, caplog, monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Drawn-v0", EnvSpec("Drawn-v0", Drawn, disable_env_checker=True))
    common = ("env.id=Drawn-v0", "eval_every=2", "save_every=4", "workload.record_video=true")
    run = agent(*common, "steps=4")
    with Image.open(run.directory / "best_policy.gif") as film:
        assert (film.size, film.n_frames) == ((10, 5), 3)  # pyright: ignore
        shades = []
        for frame in range(3):
            film.seek(frame)
            shades.append(film.convert("RGB").getpixel((2, 2)))
    assert shades == [(shade,) * 3 for shade in (0, 80, 160)], "every other picture"
    [picture] = load_events(run.directory).Images("eval/best_policy")
    assert picture.encoded_image_string == (run.directory / "best_policy.gif").read_bytes()
    assert (picture.step, picture.width, picture.height) == (2, 10, 5), "the second was no better"
    with caplog.at_level("WARNING", "runner"):
        run = agent(*common, "steps=8")
    assert "new episodes" not in caplog.text
    assert run.result.notes["env_steps"] == 80 + 8 * 2  # pyright: ignore


@pytest.mark.parametrize(("name", "same"), [("Walk-v0", True), ("GlobalWalk-v0", True), ("ClockWalk-v0", False)])
def test_an_agent_resumes_bitwise_wherever_its_episodes_can_be_replayed(name, same, agent, caplog):
    common = (f"env.id={seeded_envs.__name__}:{name}", "eval_every=0", "schedule=constant")
    for directory, steps in (("whole", (9,)), ("halves", (5, 9))):
        with caplog.at_level("WARNING", "runner"):
            runs = [agent(*common, f"steps={last}", directory=directory) for last in steps]
    whole, halves = (weights_at(runs[-1].directory.parent / name, 9) for name in ("whole", "halves"))
    assert all(torch.equal(halves[name], whole[name]) for name in whole) == same
    warned = f"{name} environments start new episodes: 8 of them came to another state"
    assert (warned in caplog.text) == (not same)


REFUSED: dict[str, tuple[str, object, str]] = {
    "env.id=CartPol-v1": ("env.id", "CartPol-v1", "env=cartpole"),
    "env.id=Pendulum-v1": ("env.id", "Pendulum-v1", "env=cartpole"),
    "model=convnet": ("model", "convnet", "model=qnet"),
    "workload.warm_up=1000 env.num_envs=200 env.vectorization=async": ("env.num_envs", 200, "env.vectorization=sync"),
    "workload.replay_size=32": ("workload.replay_size", 32, "workload.replay_size=128"),
    "workload.warm_up=79 env.num_envs=16": ("workload.warm_up", 79, "workload.warm_up=80"),
    "workload.env_steps=1001": ("workload.env_steps", 1001, "workload.env_steps=1005"),
    "model.hidden=[64,0]": ("model.hidden", [64, 0], "conf/model/qnet.yaml"),
    "workload.overfit_batches=1": ("workload.overfit_batches", ABSENT, ""),
}
"""By overrides: the key and the value in the error, and a part of its remedy."""


@pytest.mark.parametrize("typed", REFUSED)
def test_a_config_that_cannot_run_is_refused(typed):
    overrides = [f"+{text}" if "overfit" in text else text for text in typed.split()]
    with pytest.raises(ConfigError) as refusal:
        prepare_session(build_composed_run("workload=dqn", *overrides))
    key, got, remedy = REFUSED[typed]
    assert (refusal.value.key, refusal.value.got) == (key, got)
    assert remedy in refusal.value.remedy


@pytest.mark.parametrize("method", ["__init__", "load_state_dict"])
def test_a_replay_that_does_not_fit_is_refused_and_says_nothing_against_the_checkpoint(method, monkeypatch):
    before, workload = prepared(), prepared()
    model = workload.build_model()
    next(before.batches(model, Plan(64), 0, CPU))
    workload.load_state_dict(before.state_dict())
    monkeypatch.setattr(Replay, method, mock.Mock(side_effect=RuntimeError("CUDA error: out of memory")))
    with pytest.raises(ConfigError) as refusal:
        workload.batches(model, Plan(64), 10, CPU)
    assert (refusal.value.key, refusal.value.got) == ("workload.replay_size", 50_000)


def test_replays_larger_than_the_memory_of_their_machine_are_refused(monkeypatch):
    memory = {"available_bytes": 10**6, "limit_bytes": None, "total_bytes": 10**9}
    monkeypatch.setattr("runner.workloads.dqn.replay.host_memory", lambda: memory)
    workload = prepared("workload.replay_size=40000")  # transitions of 44 bytes each, half of them in each process
    model, plan = workload.build_model(), Plan(64, 1, (0, 2))
    workload.batches(model, plan, 0, CPU)  # the other process is on another machine
    workload.batches(model, Plan(64), 0, torch.device("meta"))  # the replay buffer is in the memory of another device
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError) as refusal:
        workload.batches(model, plan, 0, CPU)
    assert (refusal.value.key, refusal.value.got) == ("workload.replay_size", 40000)
    assert refusal.value.remedy == f"use at most workload.replay_size={2 * (10**6 // 88)}"


def test_environments_that_cannot_be_divided_evenly_are_refused():
    with pytest.raises(ConfigError) as refusal:
        prepared().check_plan(Plan(63, 1, (0, 3)))
    assert (refusal.value.key, refusal.value.got, refusal.value.remedy) == ("env.num_envs", 8, "env.num_envs=9")
    for mode in ("ddp", "hogwild"):
        with pytest.raises(ConfigError) as refusal:  # before any process starts
            prepared("env.num_envs=3", f"parallel={mode}")
        assert (refusal.value.key, refusal.value.got) == ("env.num_envs", 3)


def test_an_additional_process_fills_its_replay_and_keeps_the_number_of_steps(caplog):
    workload = prepared()
    with caplog.at_level("WARNING", "runner"):
        batches = workload.batches(workload.build_model(), Plan(64, 1, (1, 2)), 20, CPU)
    assert "40 steps of the agent" in caplog.text
    assert len(workload._actor.replay) > 20
    next(batches)
    assert workload._actor.num_steps * 2 == math.ceil((80 + 21 / 0.5) / 8) * 8


def test_another_number_of_environments_keeps_the_replay_with_a_warning(caplog):
    before, after = prepared(), prepared()
    model = before.build_model()
    for _ in itertools.islice(before.batches(model, Plan(64, 1, (0, 2)), 0, CPU), 10):
        pass
    after.load_state_dict(before.state_dict())
    with caplog.at_level("WARNING", "runner"):
        after.batches(model, Plan(64), 10, CPU)
    assert "CartPole-v1 environments start new episodes" in caplog.text
    assert torch.equal(before.state_dict()["replay"]["rows"], after.state_dict()["replay"]["rows"])
