"""Evaluation: whole episodes, greedy, from starts that are the same for every run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from runner.data.base import shard_bounds
from runner.env.base import Env
from runner.seeds import derive
from runner.tracking.metrics import MetricSums

Infer = Callable[[torch.Tensor], torch.Tensor]

_ENDLESS = 10_000  # steps of an episode where the environment sets no limit


def play(env: Env, infer: Infer, num_episodes: int, shard: tuple[int, int], device: torch.device) -> MetricSums:
    """MetricSums over part `shard` of `num_episodes` episodes, each played once, all of them at the same time.

    The starts are not the run's: runs with different seeds are to be compared on the same episodes. Playing each once
    is fair to long ones; the first so many that come to an end would be the short ones.
    """
    first, last = shard_bounds(num_episodes, shard)
    counted = slice(first, last)
    if not env.shared_rng:  # episodes have seeds of their own, so that this process need not play the others'
        counted = slice(0, last - first)
        num_episodes = max(last - first, 1)
    seeds = [derive(0, "evaluation", first + episode) for episode in range(num_episodes)]
    together = shard[1] > 1 and not env.shared_rng
    with env.vector(num_episodes, in_process=True) as vector:
        vector.reset(derive(0, "evaluation") if env.shared_rng else seeds)
        returns, lengths, running = np.zeros(num_episodes), np.zeros(num_episodes), np.ones(num_episodes, bool)
        for _ in range(env.longest or _ENDLESS):
            steps = vector.step(_best(infer, vector.observations, device))
            returns += steps.rewards * running
            lengths += running
            running &= ~(steps.terminated | steps.truncated)
            # A model whose parts lie on all processes needs as many forward passes on each of them.
            if not together and not running.any():
                break
    dtype = torch.float32 if device.type == "mps" else torch.float64  # Metal has no float64
    totals = {"return": returns[counted].sum(), "length": lengths[counted].sum(), "count": float(last - first)}
    return {name: torch.tensor(float(total), dtype=dtype, device=device) for name, total in totals.items()}


def film(env: Env, infer: Infer, device: torch.device) -> torch.Tensor:
    """Every other picture of one episode at half its size: uint8 [frames, 3, height, width], on the CPU."""
    frames: list[torch.Tensor] = []
    with env.vector(1, in_process=True, render=True) as vector:
        vector.reset(derive(0, "film"))
        for step in range(env.longest or _ENDLESS):
            if step % 2 == 0:
                frames.append(torch.from_numpy(vector.render()[::2, ::2].copy()).permute(2, 0, 1))
            steps = vector.step(_best(infer, vector.observations, device))
            if (steps.terminated | steps.truncated).any():
                break
    return torch.stack(frames)


def _best(infer: Infer, observations: np.ndarray, device: torch.device) -> np.ndarray:
    return infer(torch.from_numpy(observations).to(device)).argmax(1).cpu().numpy()


def observation_statistics(env: Env, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and inverse deviation of each number of the observations, under `num_steps` steps of random actions."""
    random = np.random.Generator(np.random.PCG64(derive(0, "moments", "actions")))
    with env.vector(env.num_envs, in_process=True) as vector:
        vector.reset(derive(0, "moments"))
        seen = [vector.observations.reshape(env.num_envs, -1)]
        for _ in range(-(-num_steps // env.num_envs)):
            vector.step(random.integers(env.num_actions, size=env.num_envs))
            seen.append(vector.observations.reshape(env.num_envs, -1))
    table = torch.from_numpy(np.concatenate(seen)).double()
    deviation, mean = torch.std_mean(table, 0)
    return mean.float(), (1 / deviation.clamp_min(1e-3)).float()  # what never moves is not blown up
