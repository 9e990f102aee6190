"""Tests of agents that see images: equality with plain torch in every mode, resume, evaluation, and refusals."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from helpers import agents, catch_env
from helpers.compose import build_composed_run, compose_config, prepare_session, train_in
from helpers.plain_loop import largest_difference, weights_at
from helpers.ranks import Ranks
from PIL import Image
from torch import nn

from runner.commands import play
from runner.config.errors import ConfigError
from runner.model.base import without_memory
from runner.planning.fake_step import prepared as planned
from runner.planning.fake_step import trace_ranks
from runner.planning.report import report_of
from runner.seeds import derive
from runner.workloads.dqn.evaluation import play as evaluate

STEPS, BATCH, STACK = 6, 12, 3
AGENT = (
    *(*agents.AGENT, *agents.IMAGES, "workload.eval_episodes=3", "workload.clip_targets=false"),
    *(f"batch_size={BATCH}", f"steps={STEPS}"),
)


def table() -> agents.Table:
    """Return transitions between the numbers of frames, with which the replay buffer is filled."""
    generator = torch.Generator().manual_seed(5)
    frames = torch.randint(256, (200, 144), generator=generator, dtype=torch.uint8)
    rows = torch.randint(100, 200, (50, 5), generator=generator).float()
    rows[:, 2], rows[:, 3], rows[:, 4] = rows[:, 2] % 3, torch.randn(50, generator=generator), 0.9

    def fill(replay: Any) -> None:
        replay.frames[:200], replay.ages[:200] = frames, STACK - 1

    return rows, torch.randint(50, (STEPS * BATCH,), generator=generator), fill


draw_given = partial(agents.draw_given, table)


def plain(num_envs: int) -> dict[str, torch.Tensor]:
    """Return the weights after all steps, in float64 on whole batches of whole observations."""
    rows, order, fill = table()
    fill(replay := SimpleNamespace(frames=torch.zeros(200, 144, dtype=torch.uint8), ages=torch.zeros(200)))

    def observations(numbers: torch.Tensor) -> torch.Tensor:
        stacks = [replay.frames[numbers[:, 0].long() - back * num_envs] for back in range(STACK - 1, -1, -1)]
        return torch.stack(stacks, 1).view(-1, STACK, 12, 12).double() / 255

    torch.manual_seed(derive(0, "weights"))
    layers = [nn.Conv2d(STACK, 4, 4, 2), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten()]
    layers += [nn.Linear(45, 16), nn.ReLU(), nn.Linear(16, 3)]
    drawn = (rows[places].double().split(1, 1) for places in order.split(BATCH))
    batches = ((observations(a), *rest, observations(b), discount) for a, b, *rest, discount in drawn)
    names = {"0": "conv1.conv", "2": "conv2.conv", "5": "hidden.fc", "7": "head"}
    return agents.named_weights(agents.plain_dqn(layers, batches, delta=10.0)[0], names)


def do(ranks: Ranks, processes: int, directory: Path, *overrides: str, change: Any = None) -> Any:
    return ranks(processes).train(compose_config(*AGENT, *overrides), directory, change)


@pytest.mark.cases(
    pytest.param("single", 1, 1, marks=pytest.mark.slow),
    ("single", 1, 4),
    pytest.param("ddp", 2, 2, marks=pytest.mark.slow),
    ("ddp", 3, 1),
    ("fsdp", 2, 1),
)
def test_every_mode_equals_plain_torch_on_the_same_images(mode, processes, accumulation, ranks, tmp_path):
    overrides = (f"parallel={mode}", f"accumulation={accumulation}", "precision=64")
    result = do(ranks, processes, tmp_path / "run", *overrides, change=draw_given)
    assert (result.status, result.world_size) == ("done", processes)
    assert largest_difference(weights_at(tmp_path / "run", STEPS), plain(12 // processes)) <= 1e-12


@pytest.mark.parametrize("precision", ["bf16", "16"])
def test_sixteen_bits_differ_by_roundings_only(precision, tmp_path):
    train_in(tmp_path / "run", build_composed_run(*AGENT, f"precision={precision}"), draw_given)
    assert 0 < largest_difference(weights_at(tmp_path / "run", STEPS), plain(12)) < 0.2


@pytest.mark.parametrize(("saved", "steps"), [("false", "false"), ("true", "false"), ("false", "true")])
def test_a_replay_that_was_not_saved_is_filled_by_the_agent(saved, steps, tmp_path, caplog):
    train_in(tmp_path / "run", build_composed_run(*AGENT, "steps=2", f"workload.save_replay={saved}"))
    [checkpoint] = tmp_path.glob("run/checkpoints/step_*")
    size = sum(path.stat().st_size for path in checkpoint.glob("rank_0*"))
    assert (size > 30_000) == (saved == "true")
    with caplog.at_level("WARNING", "runner"):
        run = build_composed_run(*AGENT, f"workload.save_replay={steps}")
        assert train_in(tmp_path / "run", run).result.steps == STEPS
    assert ("120 steps of the agent fill it" in caplog.text) == (saved == "false")


def test_another_number_of_processes_goes_on_with_a_new_replay(ranks, tmp_path):
    do(ranks, 2, tmp_path / "run", "parallel=ddp", "steps=2")
    for steps, processes, mode in ((4, 1, "single"), (5, 2, "fsdp"), (6, 1, "hogwild parallel.processes=1")):
        (tmp_path / "run/result.json").unlink(missing_ok=True)
        result = do(ranks, processes, tmp_path / "run", *f"parallel={mode}".split(), f"steps={steps}")
        assert (result.status, result.steps) == ("done", steps)
        assert result.notes["env_steps"] == 120 + 12 * -(-steps * 10 // 12)


def test_evaluations_play_whole_episodes_with_true_rewards_from_seeds_of_their_own(tmp_path):
    training = ("workload.clip_rewards=true", "workload.terminal_on_life_loss=true")
    run = build_composed_run(*AGENT, *training, "workload.eval_epsilon=0.3", "workload.eval_episodes=5")
    prepare_session(run)
    workload: Any = run.workload

    def infer(images: torch.Tensor) -> torch.Tensor:
        assert images.dtype == torch.uint8
        assert images.shape[1:] == (STACK, 12, 12)
        return torch.tensor([0.0, 1.0, 0.0]).expand(len(images), 3)

    returns = []
    for episode in range(5):
        random = np.random.default_rng(derive(0, "exploration", episode))

        def act(seen: np.ndarray, random: np.random.Generator = random) -> int:
            chance, action = random.random(2)
            return int(action * 3) if chance < 0.3 else 1

        returns.append(agents.plain_return(act, derive(0, "evaluation", episode) % (2**31 - 4096), "Catch-v0"))
    assert max(returns) >= 2, "no reward was clipped, and no life ended an episode"
    for count in (1, 3):
        sums = [evaluate(workload.env, infer, 5, (index, count), torch.device("cpu"), 0.3) for index in range(count)]
        assert sum(float(each["return"]) for each in sums) == sum(returns)


def test_an_agent_learns_to_catch_and_is_filmed(tmp_path, capsys):
    learning = (
        *("workload.env_steps=4000", "workload.warm_up=600", "workload.replay_size=4000", "workload.replay_ratio=0.1"),
        *("batch_size=96", "optimizer.lr=0.006", "workload.target_tau=0.2", "workload.epsilon_final=0.05"),
        *("workload.discount=0.9", "workload.eval_episodes=20", "model.hidden=64", "model.dueling=true"),
        *("env.id=Catch-v0", "env.options={fall: 2}"),
    )
    run = build_composed_run(*(each for each in AGENT if not each.startswith(("steps=", "log_every="))), *learning)
    assert train_in(tmp_path / "run", run).result.metrics["eval/return"] > 7, "chance catches balls for 1.4"
    film = tmp_path / "film.gif"
    assert play.main([str(tmp_path / "run"), "--film", str(film), "--seed", "3"]) == 0
    assert "episode 0: return" in capsys.readouterr().out
    with Image.open(film) as frames:
        assert frames.size == (156, 156)


@pytest.mark.parametrize("device", ["learner", "cpu"])
def test_a_million_transitions_of_atari_are_planned_with_each_frame_once(device):
    size = ("workload.replay_size=1000000", f"workload.replay_device={device}", "env.id=Large-v0", "env.frame_stack=4")
    run = build_composed_run(*(each for each in AGENT if not each.startswith("env.")), *size, "env.num_envs=8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gymnasium.registry, "Large-v0", EnvSpec("Large-v0", Large, disable_env_checker=True))
        [rank] = trace_ranks(run, planned(run, 1))
        report = report_of(run, planned(run, 1), [rank])
    assert 7.05e9 < rank.kept["data"] < 7.5e9
    assert run.workload.state_bytes()[1] == min(run.workload.env_steps, 2_000_000) * 84 * 84
    assert report["checkpoint"]["disk_bytes"] > run.workload.state_bytes()[1]


def test_a_replay_that_does_not_fit_on_the_disk_is_refused_before_the_run(tmp_path, monkeypatch):
    run = build_composed_run(*AGENT)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=50_000))
    with pytest.raises(ConfigError) as refusal:
        train_in(tmp_path / "run", run)
    assert (refusal.value.key, refusal.value.got) == ("workload.save_replay", True)
    most = int(refusal.value.remedy.rpartition("=")[2])
    assert 40 < most < 500
    for more in (f"workload.replay_size={most}", "workload.save_replay=false"):
        assert train_in(tmp_path / more, build_composed_run(*AGENT, more)).result.status == "done"


class Large(gymnasium.Env):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, shape: tuple[int, ...] = (84, 84), dtype: str = "uint8") -> None:
        high = 1 if dtype == "bool" else 255
        self.observation_space = gymnasium.spaces.Box(0, high, tuple(shape), np.dtype(dtype).type)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        return np.zeros(self.observation_space.shape, self.observation_space.dtype), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self.reset()[0], 0.0, False, False, {}


@pytest.mark.cases(
    (["env.options={shape: [84, 84, 3], dtype: float32}"], "env.id"),
    (["env.options={shape: [2, 84, 84, 3]}"], "env.id"),
    (["env.options={shape: [9], dtype: float32}", "env.frame_stack=2"], "env.frame_stack"),
    (["env.options={shape: [9], dtype: float32}", "env.frame_skip=2", "model=qnet"], "env.frame_skip"),
    (["env.options={shape: [9], dtype: float32}", "env.grayscale=true", "model=qnet"], "env.grayscale"),
    (["env.options={shape: [9], dtype: float32}", "env.image_size=9", "model=qnet"], "env.image_size"),
    (["env.options={shape: [10, 10], dtype: float32}"], "model"),
    (["model=qnet"], "model"),
    (["workload.normalize=true"], "workload.normalize"),
    (["workload.terminal_on_life_loss=true", "env.id=CartPole-v1", "model=qnet"], "workload.terminal_on_life_loss"),
    (["workload.replay_size=100000000"], "workload.replay_size"),
    (["env.options={shapes: 3}"], "env.options"),
)
def test_what_an_agent_cannot_see_is_refused(overrides, key, monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Large-v0", EnvSpec("Large-v0", Large, disable_env_checker=True))
    with pytest.raises(ConfigError) as refusal:
        prepare_session(build_composed_run("workload=dqn", "env.id=Large-v0", "model=nature_cnn", *overrides))
    assert refusal.value.key == key


@pytest.mark.parametrize(("dtype", "shape"), [("uint8", (1, 10, 10)), ("bool", (1, 10, 10)), ("float32", (10, 10))])
def test_arrays_of_two_axes_are_images_if_they_are_of_bytes(dtype, shape, monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Large-v0", EnvSpec("Large-v0", Large, disable_env_checker=True))
    options = f"env.options={{shape: [10, 10], dtype: {dtype}}}"
    run = build_composed_run("workload=dqn", "env.id=Large-v0", options)
    prepare_session(run)
    assert run.workload.input_shape() == shape
    assert ("flattened" in run.workload.describe()["env"]) == (dtype == "float32")
    assert next(run.workload.build_model().parameters()).shape[1] == 100


@pytest.mark.parametrize(("normalize", "said"), [("false", True), ("true", False)])
def test_bytes_that_are_no_images_are_seen_unscaled_only_if_it_is_said(normalize, said, monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Large-v0", EnvSpec("Large-v0", Large, disable_env_checker=True))
    options = ["env.options={shape: [9]}", f"workload.normalize={normalize}"]
    run = build_composed_run("workload=dqn", "env.id=Large-v0", *options)
    prepare_session(run)
    line = run.workload.describe()["env"]
    assert ("values up to 255 (workload.normalize=true" in line) == said
    assert "no limit of steps (10,000 in evaluations)" in line


def test_images_that_are_too_small_for_a_network_are_refused_with_another():
    run = build_composed_run("workload=dqn", f"env.id={catch_env.__name__}:Catch-v0", "model=nature_cnn")
    prepare_session(run)
    with pytest.raises(ConfigError) as refusal:
        run.workload.build_model()
    assert refusal.value.key == "model.kernel_sizes"
    assert "12×12" in refusal.value.why
    assert "model=minatar_cnn" in refusal.value.remedy


def test_networks_of_classifiers_act_without_batch_normalization():
    catch = ("workload=dqn", f"env.id={catch_env.__name__}:Catch-v0")
    for words in (["model=tiny"], ["model=resnet18", "model.stem=cifar", "model.norm=group"]):
        prepare_session(run := build_composed_run(*catch, *words))
        images = torch.zeros(2, 1, 12, 12, dtype=torch.uint8, device="meta")
        assert without_memory(run.workload.build_model)(images).shape == (2, 3)
    prepare_session(run := build_composed_run(*catch, "model=resnet18"))
    with pytest.raises(ConfigError) as refusal:
        without_memory(run.workload.build_model)
    assert (refusal.value.key, "model.norm=group" in refusal.value.remedy) == ("model", True)


def test_the_wrappers_of_gymnasium_make_single_frames(monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Colored-v0", EnvSpec("Colored-v0", Colored, disable_env_checker=True))
    options = ("env.id=Colored-v0", "env.grayscale=true", "env.frame_skip=3", "env.frame_stack=2")
    run = build_composed_run("workload=dqn", "model=minatar_cnn", *options)
    prepare_session(run)
    env: Any = run.workload.env  # pyright: ignore[reportAttributeAccessIssue]
    assert env.shape == (2, 6, 8)
    with env.vector(2) as vector:
        vector.reset(0)
        vector.step(np.zeros(2, np.int64))
        assert vector.observations.dtype == np.uint8
        # The maximum of the frames 2 and 3 of each channel, which have the weights of luminance.
        wanted = int(np.array([0.2125, 0.7154, 0.0721]) @ [30, 60, 90])
        assert abs(int(vector.observations[0, 1, 0, 0]) - wanted) <= 1
        assert vector.observations[0, 0].max() == 0


class Colored(gymnasium.Env):
    """Images whose channels grow by 10, 20 and 30 with each step."""

    observation_space = gymnasium.spaces.Box(0, 255, (6, 8, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros((6, 8, 3), np.uint8), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.time += 1
        return np.full((6, 8, 3), [10, 20, 30], np.uint8) * np.uint8(self.time), 1.0, False, False, {}
