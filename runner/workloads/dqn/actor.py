"""Acting as data loading: environments, what is remembered of them, and what they bring."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from runner.env.vector import Vector
from runner.seeds import derive
from runner.workloads.dqn.n_step import NStepBuffer
from runner.workloads.dqn.replay import Replay

log = logging.getLogger(__name__)

Policy = Callable[[np.ndarray], np.ndarray]
"""The greedy actions, int64 [n], for observations, float32 [n, …]."""


class Actor:
    """One process's share of the environments, its exploration, and its replay.

    Args:
        vector: the environments of this process.
        num_actions: to choose from.
        n_step_buffer: makes transitions of their steps.
        replay: keeps these.
        seed: the root of all that is drawn here: episodes, exploration, samples.
    """

    def __init__(self, vector: Vector, num_actions: int, n_step_buffer: NStepBuffer, replay: Replay, seed: int):
        self.vector, self.num_actions, self.n_step_buffer, self.replay = vector, num_actions, n_step_buffer, replay
        self._random = np.random.Generator(np.random.PCG64(derive(seed, "exploration")))
        vector.reset(derive(seed, "environments"))
        self.num_steps = 0
        """Of all environments of this process together; the one that resets an environment counts too."""
        self.num_episodes = 0
        self._returns, self._lengths = np.zeros(vector.num_envs), np.zeros(vector.num_envs, np.int64)
        self._ended: list[tuple[float, int]] = []

    def step(self, policy: Policy | None, epsilon: float) -> None:
        """One step of each environment, ε-greedy (Watkins, 1989), and what it completes into the replay.

        Args:
            policy: greedy actions; None: all are random.
            epsilon: the share of random actions.
        """
        vector, num_envs = self.vector, self.vector.num_envs
        seen = vector.observations
        draws = self._random.random((2, num_envs))
        actions = (draws[1] * self.num_actions).astype(np.int64)
        if policy is not None:
            actions = np.where(draws[0] < epsilon, actions, policy(seen))
        observations, rewards, terminated, truncated, taken = vector.step(actions)
        flat, flat_next = seen.reshape(num_envs, -1), observations.reshape(num_envs, -1)
        self.replay.add(self.n_step_buffer.push(flat, actions, rewards, flat_next, terminated, truncated, taken))
        self.num_steps += num_envs
        self._count(rewards, terminated | truncated, taken)

    def _count(self, rewards: np.ndarray, ended: np.ndarray, taken: np.ndarray) -> None:
        """Keep the books of the episodes."""
        self._returns += rewards
        self._lengths += taken
        if ended.any():
            self._ended += zip(self._returns[ended].tolist(), self._lengths[ended].tolist(), strict=True)
            self._returns[ended] = self._lengths[ended] = 0
            self.num_episodes += int(ended.sum())

    def sample(self, count: int) -> torch.Tensor:
        """`count` transitions of the replay, drawn alike and with replacement: packed, on the replay's device."""
        return self.replay.at(self._random.integers(len(self.replay), size=count))

    def take_episodes(self) -> dict[str, float]:
        """Mean return and length of the episodes that ended since this was asked last; empty without any."""
        if not self._ended:
            return {}
        returns, lengths = zip(*self._ended, strict=True)
        self._ended = []
        return {"episode/return": sum(returns) / len(returns), "episode/length": sum(lengths) / len(lengths)}

    # -----------------------------------------------------------------------------------------------------------------
    # Exact resume

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on."""
        return {
            "replay": self.replay.state_dict(),
            "num_episodes": self.num_episodes,
            "random": self._random.bit_generator.state,
            "environments": self.vector.state_dict(),
            "windows": self.n_step_buffer.state_dict(),
            "returns": self._returns.tolist(),
            "lengths": self._lengths.tolist(),
            "ended": self._ended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; where the environments cannot, they begin new episodes, and say so."""
        self.replay.load_state_dict(state["replay"])
        self.num_episodes = state["num_episodes"]
        self._ended = [tuple(episode) for episode in state["ended"]]
        self._random.bit_generator.state = state["random"]
        fits = len(state["returns"]) == self.vector.num_envs
        if not fits or state["environments"] is None:
            why = "its state cannot be saved" if fits else "these are not as many as were saved"
            log.warning("%s: %s, so new episodes begin here", self.vector.name, why)
            self.vector.reset(int(self._random.integers(2**62)))  # not the first ones over again
            return
        self.vector.load_state_dict(state["environments"])
        self.n_step_buffer.load_state_dict(state["windows"])
        self._returns, self._lengths = np.array(state["returns"]), np.array(state["lengths"], np.int64)
