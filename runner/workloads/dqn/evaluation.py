"""Evaluation of the greedy policy over whole episodes, with the same initial states in every run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from runner.data.base import shard_bounds
from runner.device import sum_dtype
from runner.env.action_masks import random_actions
from runner.env.base import Env
from runner.seeds import derive
from runner.tracking.metrics import MetricSums
from runner.workloads.dqn.actor import greedy_policy

if TYPE_CHECKING:
    from runner.env.vector import Vector

Infer = Callable[[torch.Tensor], torch.Tensor]

MAX_STEPS = 10_000  # per episode, if the environment has no limit


def play(
    env: Env, infer: Infer, num_episodes: int, shard: tuple[int, int], device: torch.device, epsilon: float = 0.0
) -> MetricSums:
    """Play one shard of the evaluation episodes, all at the same time, and return sums `return`, `length` and `count`.

    Actions are random with the probability `epsilon`. Their seeds and those of the environments are independent of the
    run's seed. Each environment plays exactly one episode: counting the episodes that end first would favor short ones.
    """
    first, last = shard_bounds(num_episodes, shard)
    counted, episodes = slice(first, last), range(num_episodes)
    if not env.shared_rng:  # each episode has a seed, so this process can skip the episodes of other shards
        counted = slice(0, last - first)
        episodes = range(first, max(last, first + 1))
        num_episodes = len(episodes)
    seeds = [derive(0, "evaluation", episode) for episode in episodes]
    policy, in_lockstep = greedy_policy(infer, device), shard[1] > 1 and not env.shared_rng
    with env.vector(num_episodes, in_process=True) as vector:
        vector.reset(derive(0, "evaluation") if env.shared_rng else seeds)
        returns, lengths, running = np.zeros(num_episodes), np.zeros(num_episodes), np.ones(num_episodes, bool)
        randoms = [np.random.default_rng(derive(0, "exploration", i)) for i in episodes]
        for _ in range(env.longest or MAX_STEPS):
            actions = policy(vector.observations, vector.masks)
            if epsilon:
                draws = np.array([random.random(2) for random in randoms])
                drawn = random_actions(draws[:, 1], env.num_actions, vector.masks)
                actions = np.where(draws[:, 0] < epsilon, drawn, actions)
            steps = vector.step(actions)
            returns += steps.rewards * running
            lengths += running
            running &= ~(steps.terminated | steps.truncated)
            # A sharded model needs the same number of forward passes on each process.
            if not in_lockstep and not running.any():
                break
    totals = {"return": returns[counted].sum(), "length": lengths[counted].sum(), "count": float(last - first)}
    return {name: torch.tensor(float(total), dtype=sum_dtype(device), device=device) for name, total in totals.items()}


def record_video(env: Env, infer: Infer, device: torch.device) -> torch.Tensor:
    """Play an episode; return every second frame at half resolution, uint8 [frames, 3, height, width] on the CPU."""
    frames: list[torch.Tensor] = []

    def keep(vector: Vector, step: int) -> None:
        if step % 2 == 0:
            frames.append(frame(vector)[:, ::2, ::2].contiguous())

    play_one(env, infer, device, derive(0, "film"), "rgb_array", keep)
    return torch.stack(frames)


def play_one(
    env: Env,
    infer: Infer,
    device: torch.device,
    seed: int,
    render_mode: str,
    before_step: Callable[[Vector, int], None],
) -> tuple[float, int]:
    """Play an episode in a rendered environment, and return the sum of the rewards and the number of steps.

    `before_step` is called with the environment and the number of the step, counted from 0.
    """
    policy, total, length = greedy_policy(infer, device), 0.0, 0
    with env.vector(1, in_process=True, render_mode=render_mode) as vector:
        vector.reset(seed)
        for length in range(1, (env.longest or MAX_STEPS) + 1):
            before_step(vector, length - 1)
            steps = vector.step(policy(vector.observations, vector.masks))
            total += float(steps.rewards[0])
            if (steps.terminated | steps.truncated).any():
                break
    return total, length


def frame(vector: Vector) -> torch.Tensor:
    return torch.from_numpy(vector.render().copy()).permute(2, 0, 1)


def observation_scaling(env: Env, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the offset and the factor that scale each component of the observations, float32 [size] on the CPU.

    To [-1, 1] if the observation space has bounds; otherwise, to a mean of 0 and a standard deviation of 1 over
    `num_steps` steps of a random policy, which in many environments visits only a few of the states.
    """
    with env.vector(env.num_envs, in_process=True) as vector:
        if bounds := vector.bounds():
            low, high = (torch.from_numpy(bound.reshape(-1)).double() for bound in bounds)
            return ((low + high) / 2).float(), (2 / (high - low)).float()
        random = np.random.Generator(np.random.PCG64(derive(0, "moments", "actions")))
        vector.reset(derive(0, "moments"))
        observations = [vector.observations.reshape(env.num_envs, -1)]
        for _ in range(-(-num_steps // env.num_envs)):
            if vector.masks is None:
                vector.step(random.integers(env.num_actions, size=env.num_envs))
            else:
                vector.step(random_actions(random.random(env.num_envs), env.num_actions, vector.masks))
            observations.append(vector.observations.reshape(env.num_envs, -1))
    table = torch.from_numpy(np.concatenate(observations)).double()
    deviation, mean = torch.std_mean(table, 0)
    return mean.float(), (1 / deviation.clamp_min(1e-3)).float()  # avoids division by zero for constant components
