"""The loss and its gradient by hand, the budget, the schedule, and what is refused."""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import Forks, built, curves
from torch import nn

from models.qnet import Duelling, QNet, WithTarget
from runner.batching import Plan
from runner.config import ConfigError
from runner.optimizer import trainable
from runner.run import Run
from runner.seeds import derive
from runner.train import train
from runner.workloads.acting import Actor
from runner.workloads.replay import Batch, unpacked

SMALL = (
    "workload=dqn",
    "device=cpu",
    "device.threads=1",
    "model.hidden=[16]",
    "workload.warm_up=80",
    "workload.eval_episodes=4",
    "env.max_episode_steps=60",
)
"""An agent whose steps take no time."""


def linear_agent() -> WithTarget:
    """Action values that can be told in one's head: o · w, where the online w and the target w differ."""
    model = WithTarget(QNet(2, 2, ()))
    with torch.no_grad():
        model.online.head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))  # pyright: ignore
        model.target.head.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))  # pyright: ignore
        for net in (model.online, model.target):
            net.head.bias.zero_()  # pyright: ignore
    return model


BATCH = Batch(
    observations=torch.tensor([[1.0, 1.0], [2.0, -1.0], [0.5, 0.0]]),
    actions=torch.tensor([[0], [1], [0]]),
    returns=torch.tensor([1.0, 0.0, 5.0]),
    next_observations=torch.tensor([[1.0, 1.0], [2.0, 1.0], [1.0, 0.0]]),
    discounts=torch.tensor([0.5, 0.9, 0.0]),  # the last one has come to its end
)
# Q(o) = (o₀, 2·o₁): of the actions taken 1, −2 and 0.5. The next observations are worth, to the online network,
# (1, 2), (2, 2) → the first, (1, 0); to the target (3·o₀, o₁) = (3, 1), (6, 1), (3, 0).
BOOTSTRAPS = {True: [1.0, 6.0, 3.0], False: [3.0, 6.0, 3.0]}


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", ["huber", "mse"])
def test_loss_and_gradient_are_those_worked_out_by_hand(double: bool, kind: str) -> None:
    run = built("workload=dqn", f"workload.double={double}", f"workload.td_loss={kind}")
    model = linear_agent()
    loss, sums = run.workload.loss(model, BATCH)
    values = [1.0, -2.0, 0.5]
    targets = [1 + 0.5 * BOOTSTRAPS[double][0], 0 + 0.9 * BOOTSTRAPS[double][1], 5.0]
    errors = [v - t for v, t in zip(values, targets, strict=True)]
    if kind == "mse":
        each, slopes = [e * e for e in errors], [2 * e for e in errors]
    else:
        each = [e * e / 2 if abs(e) < 1 else abs(e) - 0.5 for e in errors]
        slopes = [max(-1.0, min(1.0, e)) for e in errors]
    assert loss.item() == pytest.approx(sum(each) / 3)
    assert sums.tolist() == pytest.approx([sum(each), sum(values)])
    assert sums.dtype == torch.float32
    loss.backward()
    gradient = torch.zeros(2, 2)
    for slope, action, observation in zip(slopes, (0, 1, 0), BATCH.observations, strict=True):
        gradient[action] += slope / 3 * observation
    torch.testing.assert_close(model.online.head.weight.grad, gradient)  # pyright: ignore
    assert all(parameter.grad is None for parameter in model.target.parameters())


def test_the_bootstrap_has_no_gradient_through_the_online_network() -> None:
    model = linear_agent()
    values, following = model(BATCH.observations, BATCH.next_observations, True)
    assert values.requires_grad
    assert not following.requires_grad
    torch.testing.assert_close(model(BATCH.observations), values)


@pytest.mark.parametrize("precision", ["32", "bf16", "16", "64"])
def test_every_precision_sums_in_full(precision: str) -> None:
    run = built(*SMALL, f"precision={precision}")
    run.precision.prepare(torch.device("cpu"))
    model = run.precision.convert(linear_agent())
    with run.precision.autocast():
        loss, sums = run.workload.loss(model, BATCH)
    assert loss.dtype == (torch.float64 if precision == "64" else torch.float32)
    assert sums.dtype == torch.float32
    assert loss.item() == pytest.approx((0.125 + 6.9 + 4.0) / 3, rel=0.02)


def test_only_the_online_network_is_trained_and_the_target_follows() -> None:
    run = built(*SMALL, "workload.target_tau=0.25", "workload.target_every=2")
    run.prepare()
    model: Any = run.workload.build_model()
    assert {id(p) for p in trainable(model)} == {id(p) for p in model.online.parameters()}
    with torch.no_grad():
        for parameter in model.online.parameters():
            parameter += 1
    before = [p.clone() for p in model.target.parameters()]
    for step, moved in ((1, 0.0), (2, 0.25), (3, 0.25), (4, 0.4375)):
        run.workload._own_step = step  # pyright: ignore
        run.workload.after_step(model, step)
        for now, then in zip(model.target.parameters(), before, strict=True):
            torch.testing.assert_close(now, then + moved)
    model.update_target(1.0)
    assert all(torch.equal(a, b) for a, b in zip(model.target.parameters(), model.online.parameters(), strict=True))


def test_duelling_values_are_the_states_and_the_advantages_less_their_mean() -> None:
    head = Duelling(2, 3)
    x = torch.randn(5, 2)
    value, advantages = head.value(x).tolist(), head.advantage(x).tolist()
    wanted = [[value[i][0] + advantages[i][a] - sum(advantages[i]) / 3 for a in range(3)] for i in range(5)]
    torch.testing.assert_close(head(x), torch.tensor(wanted))
    assert isinstance(QNet(4, 3, (8,), duelling=True)[-1], Duelling)


def test_the_network_is_that_of_plain_torch_and_recomputes_when_asked() -> None:
    net, again = QNet(4, 2, (8, 6)), QNet(4, 2, (8, 6), checkpoint_activations=True)
    again.load_state_dict(net.state_dict())
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    plain.load_state_dict(dict(zip(plain.state_dict(), net.state_dict().values(), strict=True)))
    x = torch.randn(3, 4)
    for other in (net, again):
        other.zero_grad()
        torch.testing.assert_close(other(x), plain(x))
        other(x).square().sum().backward()
    for a, b in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # pyright: ignore


# ---------------------------------------------------------------------------------------------------------------------
# The budget


@pytest.mark.parametrize(("env_steps", "warm_up", "ratio", "steps"), [(50_000, 1000, 0.5, 24_500), (500, 80, 2.0, 840)])
def test_the_budget_of_environment_steps_tells_the_number_of_updates(
    env_steps: int, warm_up: int, ratio: float, steps: int
) -> None:
    overrides = (f"workload.env_steps={env_steps}", f"workload.warm_up={warm_up}", f"workload.replay_ratio={ratio}")
    run = built("workload=dqn", *overrides)
    run.prepare()
    assert run.num_steps == steps
    short = built("workload=dqn", *overrides, "steps=7")
    short.prepare()
    assert short.num_steps == 7


@pytest.mark.parametrize("ratio", [0.1, 0.5, 3.0])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_update_comes_when_it_is_due(ratio: float, count: int) -> None:
    run = built(*SMALL, f"workload.replay_ratio={ratio}")
    run.prepare()
    workload: Any = run.workload
    model = workload.build_model()
    for index in range(count):
        batches = workload.batches(model, Plan(64, 2, (index, count), 0), 0, torch.device("cpu"))
        for step in range(1, 30):
            sizes = [len(next(batches).returns) for _ in range(2)]
            assert sizes == [32 // count] * 2
            due = 80 + step / ratio
            acted = workload._actor.num_steps * count
            assert due - 1e-3 <= acted < due + 8, "whole steps of all environments"


def test_processes_that_take_turns_do_each_their_own_steps() -> None:
    run = built(*SMALL)
    run.prepare()
    workload: Any = run.workload
    batches = workload.batches(workload.build_model(), Plan(64, 1, (0, 1), 0, (1, 2)), 0, torch.device("cpu"))
    for step in (2, 4, 6):
        assert len(next(batches).returns) == 64
        assert workload._own_step == step
        assert math.ceil((80 + step / 0.5) / 8) * 8 == workload._actor.num_steps * 2


def test_processes_act_in_environments_of_their_own() -> None:
    run = built(*SMALL)
    run.prepare()
    workload: Any = run.workload
    model = workload.build_model()
    seen = [next(workload.batches(model, Plan(64, 1, (i, 2), 0), 0, torch.device("cpu"))) for i in (0, 1, 0)]
    assert torch.equal(seen[0].observations, seen[2].observations)
    assert not torch.isin(seen[0].observations, seen[1].observations).any()


def test_epsilon_falls_along_a_line() -> None:
    epsilon = ("workload.epsilon_start=0.8", "workload.epsilon_final=0.2", "workload.epsilon_fraction=0.5")
    workload: Any = built("workload=dqn", "workload.env_steps=2000", *epsilon).workload
    assert [workload.epsilon(at) for at in (0, 250, 500, 1000, 2000)] == pytest.approx([0.8, 0.65, 0.5, 0.2, 0.2])


def test_actions_are_greedy_but_for_epsilon() -> None:
    run = built(*SMALL, "env.num_envs=64", "workload.warm_up=320", "workload.epsilon_start=0.5", "workload.epsilon_final=0.5")
    run.prepare()
    workload: Any = run.workload
    model = workload.build_model()
    batches = workload.batches(model, Plan(64), 0, torch.device("cpu"))
    for _ in range(2000):
        next(batches)
    actor = workload._actor
    stored = unpacked(actor.replay.rows[400 : len(actor.replay)])
    greedy = (model(stored.observations).argmax(1) == stored.actions[:, 0]).float().mean()
    assert greedy.item() == pytest.approx(0.75, abs=0.03)  # a random one of two is greedy half the time
    assert len(stored.returns) > 2000


# ---------------------------------------------------------------------------------------------------------------------
# In the loop


@pytest.fixture
def agent(tmp_path: Path) -> Callable[..., Run]:
    """Train a small agent in this process."""

    def train_it(*overrides: str, directory: str = "run") -> Run:
        run = built(*SMALL, *overrides)
        run.prepare()
        run.directory = tmp_path / directory
        run.directory.mkdir(exist_ok=True)
        run.result = train(run)  # pyright: ignore[reportAttributeAccessIssue]
        return run

    return train_it


def weights(run: Run) -> dict[str, torch.Tensor]:
    newest = max(run.directory.glob("checkpoints/step_*"))
    return safetensors.torch.load_file(newest / "model.safetensors")


def test_accumulation_changes_nothing(agent: Callable[..., Run]) -> None:
    common = ("precision=64", "steps=60", "log_every=20", "eval_every=0", "save_every=0", "batch_size=32")
    whole, *others = (agent(*common, f"accumulation={n}", directory=f"in_{n}") for n in (1, 2, 4))
    for other in others:
        for name, tensor in weights(whole).items():
            torch.testing.assert_close(weights(other)[name], tensor, rtol=1e-9, atol=1e-12)
        assert other.result.metrics == pytest.approx(whole.result.metrics)  # pyright: ignore


def test_the_loop_does_what_a_plain_loop_does(agent: Callable[..., Run]) -> None:
    """Given the transitions that were stored and the indices that were drawn, the weights are those of plain torch."""
    drawn: list[torch.Tensor] = []
    sample = Actor.sample

    def noted(self: Actor, count: int) -> torch.Tensor:
        drawn.append(sample(self, count))
        return drawn[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Actor, "sample", noted)
        rest = ("steps=30", "schedule=constant", "optimizer.lr=0.01", "workload.target_tau=0.1", "workload.n_step=3")
        run = agent(*rest, "eval_every=0", "save_every=0", "max_grad_norm=5")
    torch.manual_seed(derive(run.seed, "weights"))
    online = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=0.01)
    for rows in drawn:
        seen, following, action, reward, discount = rows.split([4, 4, 1, 1, 1], 1)
        with torch.no_grad():
            best = online(following).argmax(1, keepdim=True)
            wanted = reward + discount * target(following).gather(1, best)
        loss = nn.functional.smooth_l1_loss(online(seen).gather(1, action.long()), wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 5)
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow += 0.1 * (fast - slow)
    assert len(drawn) == 30
    got = list(weights(run).values())
    plain = dict(zip(weights(run), got, strict=True))
    for net, prefix in ((online, "online."), (target, "target.")):
        names = [name for name in run_order(run) if name.startswith(prefix)]
        for name, tensor in zip(names, net.state_dict().values(), strict=True):
            torch.testing.assert_close(plain[name], tensor, rtol=1e-4, atol=1e-6)


def run_order(run: Run) -> list[str]:
    """The names of the model's tensors in its own order: files sort them."""
    return list(run.workload.build_model().state_dict())


def test_the_curves_of_an_agent(agent: Callable[..., Run]) -> None:
    run = agent("steps=100", "log_every=20", "eval_every=50", "workload.eval_episodes=6")
    seen = curves(run.directory)
    assert {"train/td_loss", "train/q_mean", "episode/return", "episode/length", "episode/epsilon"} <= seen.keys()
    assert [value for _, value in seen["episode/env_steps"]] == [120, 160, 200, 240, 280]
    assert [step for step, _ in seen["eval/return"]] == [50, 100]
    assert seen["eval/return"] == seen["eval/length"], "CartPole pays 1 a step"
    assert seen["time/env_steps_per_second"][-1][1] > 100
    epsilon = [run.workload.epsilon(n) for n in (120, 160, 200, 240, 280)]  # pyright: ignore
    assert [value for _, value in seen["episode/epsilon"]] == pytest.approx(epsilon)
    assert run.result.best["metric"] == "eval/return"  # pyright: ignore
    assert run.result.notes["env_steps"] == 280  # pyright: ignore


def test_it_learns_on_a_budget(agent: Callable[..., Run]) -> None:
    rest = ("model.hidden=[64]", "workload.env_steps=6000", "workload.normalize=true", "optimizer.lr=0.003")
    run = agent(*rest, "seed=100", "eval_every=0", "save_every=0", "workload.target_tau=0.05")
    assert run.result.metrics["eval/return"] == 60  # pyright: ignore


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


def plain_returns(model: nn.Module, seeds: list[int], id: str, longest: int) -> list[float]:
    """One episode after the other, as gymnasium's tutorial plays them."""
    returns = []
    for seed in seeds:
        env = gymnasium.make(id, max_episode_steps=longest)
        seen, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            action = model(torch.from_numpy(np.asarray(seen, np.float32))[None]).argmax(1).item()
            seen, reward, terminated, truncated, _ = env.step(int(action))
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
        env.close()
    return returns


@pytest.mark.parametrize("shard", [(0, 1), (0, 3), (2, 3), (6, 8)])
@pytest.mark.parametrize("vectorization", ["sync", "auto"])
def test_evaluation_plays_each_episode_once_in_any_number_of_parts(shard: tuple[int, int], vectorization: str) -> None:
    run = built(*SMALL, f"env.vectorization={vectorization}", "workload.eval_episodes=7")
    run.prepare()
    model = run.workload.build_model()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    infer = torch.no_grad()(model)
    first, last = 7 * shard[0] // shard[1], 7 * (shard[0] + 1) // shard[1]
    sums = run.workload.evaluate(infer, shard, torch.device("cpu"))
    assert sums["count"] == last - first
    if vectorization == "sync":
        seeds = [derive(0, "evaluation", i) for i in range(first, last)]
        assert float(sums["return"]) == sum(plain_returns(model, seeds, "CartPole-v1", 60))
    every = [run.workload.evaluate(infer, (i, shard[1]), torch.device("cpu")) for i in range(shard[1])]
    whole = run.workload.evaluate(infer, (0, 1), torch.device("cpu"))
    for name, total in whole.items():
        assert float(sum(part[name] for part in every)) == pytest.approx(float(total)), name
    assert run.workload.summarize(whole)["return"] == pytest.approx(float(whole["return"]) / 7)


def test_ranks_make_as_many_forward_passes_however_long_their_episodes_are() -> None:
    run = built(*SMALL, "env.vectorization=sync", "workload.eval_episodes=5")
    run.prepare()
    model = run.workload.build_model()
    passes = []
    for index in range(8):  # more than there are episodes
        calls: list[int] = []
        run.workload.evaluate(lambda x, c=calls: (c.append(1), model(x))[1].detach(), (index, 8), torch.device("cpu"))
        passes.append(len(calls))
    assert passes == [60] * 8


def test_observations_are_normalized_by_fixed_moments() -> None:
    run = built(*SMALL, "workload.normalize=true", "workload.warm_up=2000")
    run.prepare()
    model: Any = run.workload.build_model()
    batches = run.workload.batches(model, Plan(512), 0, torch.device("cpu"))
    seen = torch.cat([next(batches).observations for _ in range(4)])
    deviation, mean = torch.std_mean((seen - model.shift) * model.scale, 0)
    assert deviation.tolist() == pytest.approx([1] * 4, abs=0.35)
    assert mean.tolist() == pytest.approx([0] * 4, abs=0.5)
    torch.testing.assert_close(model(seen), model.online((seen - model.shift) * model.scale))
    again: Any = run.workload.build_model()
    assert torch.equal(again.shift, model.shift)
    assert {"shift", "scale"} <= model.state_dict().keys()


# ---------------------------------------------------------------------------------------------------------------------
# Refused

REFUSED = {
    "env.id=CartPol-v1": "env.id: got 'CartPol-v1': gymnasium knows no such environment\n  did you mean CartPole-v1",
    "env.id=Pendulum-v1": "env.id: got 'Pendulum-v1': its actions are continuous",
    "model=convnet": "model: got 'ConvNet': it takes images, and CartPole-v1 shows vectors of 4\n  model=qnet",
    "env.num_envs=0": "env.num_envs: got 0",
    "workload.replay_size=32": "workload.replay_size: got 32: a batch of 64 would hold",
    "workload.replay_size=2147483647": "workload.replay_size: got 2147483647",
    "workload.warm_up=79 env.num_envs=16": "workload.warm_up: got 79: the first transitions are complete after",
    "workload.env_steps=1001": "workload.env_steps: got 1001: the warm-up takes all of them",
    "workload.td_loss=hubert": "workload.td_loss: got 'hubert': it is none of huber, mse\n  did you mean huber?",
    "workload.discount=1.1": "workload.discount: got 1.1",
    "workload.replay_ratio=0": "workload.replay_ratio: got 0.0",
    "model.hidden=[64,0]": "model.hidden: got [64, 0]",
    "workload.overfit_batches=1": "workload.overfit_batches: DQN has no such option",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_what_cannot_run_says_why(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "runner.workloads.dqn.memory", lambda: {"available_bytes": 10**9, "limit_bytes": None, "total_bytes": 10**9}
    )
    with pytest.raises(ConfigError) as refusal:
        run = built("workload=dqn", *(f"+{text}" if "overfit" in text else text for text in typed.split()))
        run.prepare()
    assert str(refusal.value).startswith(REFUSED[typed])


def test_environments_that_do_not_deal_out_evenly_are_refused() -> None:
    run = built(*SMALL)
    run.prepare()
    with pytest.raises(ConfigError, match=r"env.num_envs: got 8: they cannot be dealt out evenly to 3 processes\n.*=9"):
        run.workload.batches(run.workload.build_model(), Plan(63, 1, (0, 3)), 0, torch.device("cpu"))


def test_a_mistake_exits_with_2_and_leaves_no_directory(forks: Forks, tmp_path: Path) -> None:
    code, said = forks.run("workload=dqn", "env.id=MountainCarContinuous-v0", cwd=tmp_path)
    assert code == 2
    assert "env.id: got 'MountainCarContinuous-v0': its actions are continuous" in said
    assert len(said.splitlines()) <= 10
    assert not (tmp_path / "outputs").exists()


@pytest.mark.skipif(importlib.util.find_spec("pygame") is not None, reason="the render extra is installed")
def test_a_film_without_the_render_extra_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workload.record_video: got True: pygame.*\n.*pip install 'runner\[render\]'"):
        built(*SMALL, "workload.record_video=true").prepare()
