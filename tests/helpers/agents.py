"""Agents that learn from given transitions, and a plain PyTorch loop that learns the same."""

import copy
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium
import torch
from torch import nn

from helpers import catch_env
from runner.run import Run

LR, TAU = 0.01, 0.1
AGENT = (
    *("workload=dqn", "device=cpu", "device.threads=1", "env.num_envs=12", "workload.warm_up=120"),
    *("workload.replay_ratio=0.1", f"workload.target_tau={TAU}", f"optimizer.lr={LR}", "schedule=constant"),
    *("log_every=1", "eval_every=0", "save_every=0"),
)
IMAGES = (
    *(f"env.id={catch_env.__name__}:Catch-v0", "env.frame_stack=3", "workload.replay_size=500", "model=nature_cnn"),
    *("model.channels=[4,5]", "model.kernel_sizes=[4,3]", "model.strides=[2,1]", "model.hidden=16"),
)
"""Overrides of an agent that sees images."""

Table = tuple[torch.Tensor, torch.Tensor, Callable[[Any], None]]
"""Packed transitions; which of them the batches contain, step by step; and what fills the replay buffer otherwise."""


def draw_given(table: Callable[[], Table], run: Run, session: Any) -> None:
    """Make the replay buffer return this process's shard of the given batches; nothing else is changed."""
    workload: Any = session.workload
    new_actor, (rows, order, fill) = workload._new_actor, table()

    def with_given(plan: Any, device: torch.device) -> Any:
        actor, steps = new_actor(plan, device), itertools.count(1)

        def sample(count: int) -> torch.Tensor:
            fill(actor.replay)
            micros = plan.micro_batches(next(steps))
            places = torch.cat([order[micro.start : micro.stop] for micro in micros])
            assert len(places) == count
            return rows[places]

        actor.sample = sample
        return actor

    workload._new_actor = with_given


def plain_return(act: Callable[[Any], int], seed: int, id: str, **options: Any) -> float:
    """Play an episode as in gymnasium's tutorial, and return the sum of the rewards."""
    env, total, over = gymnasium.make(id, **options), 0.0, False
    seen, _ = env.reset(seed=seed)
    while not over:
        seen, reward, terminated, truncated, _ = env.step(act(seen))
        total, over = total + float(reward), terminated or truncated
    return total


def plain_dqn(
    layers: list[nn.Module],
    batches: Iterable[tuple[torch.Tensor, ...]],
    delta: float,
    max_norm: float = math.inf,
    possible: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[dict[str, nn.Sequential], list[float], list[float]]:
    """Return the networks after all steps, and the loss and mean Q of each step, in float64 on whole batches.

    A batch is (observations, actions, returns, next observations, discounts).
    """
    online = nn.Sequential(*layers).double()
    target, optimizer = copy.deepcopy(online), torch.optim.Adam(online.parameters(), lr=LR)
    losses, values = [], []
    for seen, action, reward, following, discount in batches:
        with torch.no_grad():
            best = online(following).argmax(1, keepdim=True)
            wanted = reward + discount * target(following).gather(1, best).clamp(*possible)
        chosen = online(seen).gather(1, action.long())
        loss = nn.functional.huber_loss(chosen, wanted, delta=delta)
        losses.append(loss.item())
        values.append(chosen.mean().item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), max_norm)
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow += TAU * (fast - slow)
    return {"online": online, "target": target}, losses, values


def named_weights(nets: dict[str, nn.Sequential], names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return the weights of `plain_dqn` by their names in a checkpoint; `names` has those of the numbered layers."""
    states = {net: module.state_dict() for net, module in nets.items()}
    return {f"{net}.{names[n[0]]}.{n[2:]}": tensor for net, state in states.items() for n, tensor in state.items()}
