"""Tests of DQN in every parallel mode that supports it: equality with plain torch, environment steps, and resume."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import safetensors.torch
import torch
from helpers import agents
from helpers.compose import build_composed_run, compose_config, train_in
from helpers.events import scalar_curves
from helpers.plain_loop import largest_difference, weights_at
from helpers.ranks import Ranks
from PIL import Image
from torch import nn

from runner.seeds import derive

STEPS, BATCH, DELTA, CLIP = 12, 48, 0.5, 2.0
AGENT = (
    *(*agents.AGENT, "model.hidden=[16]", "env.max_episode_steps=60", f"workload.huber_delta={DELTA}"),
    *("workload.eval_episodes=5", f"batch_size={BATCH}", f"steps={STEPS}"),
)


def do(ranks: Ranks, processes: int, directory: Path, *overrides: str, change: Any = None) -> Any:
    return ranks(processes).train(compose_config(*AGENT, *overrides), directory, change)


def table() -> agents.Table:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(300, 11, generator=generator)
    rows[:, 8] = torch.randint(2, (300,), generator=generator)
    rows[:, 10] = 0.99 * torch.randint(2, (300,), generator=generator)
    return rows, torch.randint(300, (STEPS * BATCH,), generator=generator), lambda replay: None


draw_given = partial(agents.draw_given, table)


def plain(seed: int) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Return the weights after all steps, and the loss and mean Q of each step, in float64 on whole batches."""
    rows, order, _ = table()
    torch.manual_seed(derive(seed, "weights"))
    layers = [nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)]
    drawn = (rows[places].double().split([4, 4, 1, 1, 1], 1) for places in order.split(BATCH))
    batches = ((seen, *rest, following, discount) for seen, following, *rest, discount in drawn)
    # all rewards are 1 and the discount is 0.99, so returns are in [0, 100]
    nets, losses, values = agents.plain_dqn(layers, batches, DELTA, CLIP, possible=(0, 1 / (1 - 0.99)))
    return agents.named_weights(nets, {"0": "hidden1", "2": "head"}), losses, values


MODES = {"single": 1, "dp": 1, "ddp": 2, "fsdp": 2, "ddp of 3": 3}
PAIRS = [("single", 1), ("single", 4), ("dp", 2), ("ddp", 1), ("ddp of 3", 4), ("fsdp", 2)]
PARITY = [
    pytest.param(mode, number, marks=[] if (mode, number) in PAIRS else pytest.mark.slow)
    for mode in MODES
    for number in (1, 2, 4)
]


@pytest.mark.parametrize(("mode", "accumulation"), PARITY)
def test_every_mode_equals_plain_torch_on_the_same_transitions(mode, accumulation, ranks, tmp_path):
    overrides = (f"parallel={mode.split()[0]}", f"accumulation={accumulation}", f"max_grad_norm={CLIP}", "precision=64")
    result = do(ranks, MODES[mode], tmp_path / "run", *overrides, change=draw_given)
    assert (result.status, result.world_size) == ("done", MODES[mode])
    weights, losses, values = plain(0)
    assert largest_difference(weights_at(tmp_path / "run", STEPS), weights) <= 1e-12
    logged = scalar_curves(tmp_path / "run")
    assert [value for _, value in logged["train/td_loss"]] == pytest.approx(losses, rel=1e-5)
    assert [value for _, value in logged["train/q_mean"]] == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize("mode", ["ddp", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("single", "fsdp"))])
def test_every_mode_equals_plain_torch_in_float32_up_to_rounding(mode, ranks, tmp_path):
    overrides = (f"parallel={mode}", "accumulation=2", f"max_grad_norm={CLIP}")
    do(ranks, MODES[mode], tmp_path / "run", *overrides, change=draw_given)
    assert largest_difference(weights_at(tmp_path / "run", STEPS), plain(0)[0]) <= 2e-6  # Adam, as in test_parity_modes


@pytest.mark.parametrize(
    ("mode", "precision", "accumulation"),
    [("single", "16", 1), ("dp", "bf16", 1), ("ddp", "16", 4), ("fsdp", "bf16", 4), ("ensemble", "16", 1)],
)
def test_every_precision_and_accumulation_keeps_the_number_of_environment_steps(
    mode, precision, accumulation, ranks, tmp_path
):
    overrides = (f"parallel={mode}", f"precision={precision}", f"accumulation={accumulation}", "steps=4")
    processes = MODES.get(mode, 2)
    result = do(ranks, processes, tmp_path, *overrides, "env.max_episode_steps=5")  # in which no pole falls
    assert (result.status, result.steps) == ("done", 4)
    # The warm-up and ten steps per update, rounded up to whole steps of 12 environments; members have 12 each.
    steps = math.ceil((120 + 4 / 0.1) / 12)
    assert result.notes["env_steps"] == steps * 12
    assert result.notes["episodes"] == 12 * ((steps + 1) // 6), "the sixth step is a reset"
    assert math.isfinite(result.metrics["train/td_loss"])
    assert result.metrics["eval/return"] == 5


def test_hogwild_actors_share_the_environment_steps_and_a_model_that_sees_images(tmp_path):
    overrides = (*agents.IMAGES, "parallel=hogwild", "precision=bf16", "accumulation=4", "log_every=4")
    result = train_in(tmp_path, build_composed_run(*AGENT, *overrides)).result
    assert (result.status, result.steps, result.world_size) == ("done", STEPS, 2)
    assert result.notes["env_steps"] == 120 + STEPS / 0.1
    assert math.isfinite(result.metrics["train/td_loss"])
    assert [step for step, _ in scalar_curves(tmp_path)["hogwild/updates"]] == [4, 8, 12]


def test_one_hogwild_actor_equals_single_bitwise(tmp_path):
    for name, mode in (("one", "parallel=single"), ("alone", "parallel=hogwild parallel.processes=1")):
        train_in(tmp_path / name, build_composed_run(*AGENT, *mode.split()))
    wanted, got = (weights_at(tmp_path / name, STEPS) for name in ("one", "alone"))
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


IMAGES = (*agents.IMAGES, "workload.record_video=true", "workload.eval_episodes=3", "batch_size=12")


@pytest.mark.cases(
    ("ddp", (), "ema.decay=0.9"),
    ("single", IMAGES, "ema.decay=0.9 workload.n_step=3"),
    ("fsdp", IMAGES, "workload.n_step=1"),
    ("ensemble", IMAGES, "workload.n_step=1"),
)
def test_an_agent_resumes_bitwise(mode, images, more, ranks, tmp_path):
    processes, overrides = MODES.get(mode, 2), (f"parallel={mode}", *images, *more.split())
    whole = do(ranks, processes, tmp_path / "whole", *overrides)
    assert do(ranks, processes, tmp_path / "halves", *overrides, "steps=5").steps == 5
    (tmp_path / "halves/result.json").unlink(missing_ok=True)
    second = do(ranks, processes, tmp_path / "halves", *overrides)
    assert second.steps == STEPS
    got, wanted = weights_at(tmp_path / "halves", STEPS), weights_at(tmp_path / "whole", STEPS)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert (second.metrics, second.notes) == (whole.metrics, whole.notes)
    if images:
        with Image.open(tmp_path / "whole/best_policy.gif") as film:
            assert film.n_frames > 2


def test_members_vote_by_their_mean_action_values(ranks, tmp_path):
    result = do(ranks, 2, tmp_path / "run", "parallel=ensemble", "optimizer.lr=0.05")
    checkpoint = tmp_path / "run/checkpoints" / f"step_{STEPS:08d}"
    second = torch.load(checkpoint / "rank_1.pt", weights_only=True)["parallel"]["tensors"]
    members = [network(safetensors.torch.load_file(checkpoint / "model.safetensors")), network(second)]

    def vote(x: torch.Tensor) -> torch.Tensor:
        return (members[0](x) + members[1](x)) / 2

    for name, policy in (("member_0/", members[0]), ("member_1/", members[1]), ("", vote)):
        returns, _ = played(policy, members)
        assert result.metrics[f"eval/{name}return"] == pytest.approx(returns.mean())
    _, others = played(vote, members)
    assert result.metrics["eval/disagreement"] == pytest.approx(others)
    assert 0 < others <= 0.5, "of two members, the vote is always one's answer"
    for member in range(2):  # each member equals a single run with its seed
        alone = do(ranks, 1, tmp_path / f"alone_{member}", "optimizer.lr=0.05", f"seed={member}")
        assert alone.metrics["eval/return"] == result.metrics[f"eval/member_{member}/return"]


def network(weights: dict[str, torch.Tensor]) -> nn.Module:
    """Return the online network of a checkpoint as a plain torch module."""
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    names = ("online.hidden1.weight", "online.hidden1.bias", "online.head.weight", "online.head.bias")
    net.load_state_dict(dict(zip(net.state_dict(), (weights[name] for name in names), strict=True)))
    return net.requires_grad_(False)


def played(policy: Callable[[torch.Tensor], torch.Tensor], members: list[nn.Module]) -> tuple[np.ndarray, float]:
    """Play five evaluation episodes with `policy`.

    Returns:
        The return of each episode, and the fraction of the actions of `members` that differ from those of `policy`.
    """
    envs = gymnasium.make_vec("CartPole-v1", 5, "vector_entry_point", max_episode_steps=60)
    seen, _ = envs.reset(seed=derive(0, "evaluation"))
    returns, running, differ, asked = np.zeros(5), np.ones(5, bool), 0, 0
    while running.any():
        x = torch.from_numpy(np.asarray(seen, np.float32))
        action = policy(x).argmax(1)
        differ += sum(int((member(x).argmax(1) != action).sum()) for member in members)
        asked += 5 * len(members)
        seen, reward, terminated, truncated, _ = envs.step(action.numpy())
        returns += reward * running
        running &= ~(terminated | truncated)
    return returns, differ / asked
