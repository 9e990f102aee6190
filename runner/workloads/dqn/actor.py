"""The actor, which steps environments and stores transitions in the replay buffer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runner.device import sum_dtype
from runner.env.action_masks import random_actions
from runner.seeds import derive
from runner.storage.value_checks import TensorSpec, UnexpectedContentError, check_like
from runner.system.trees import Tree
from runner.workloads.dqn.frame_replay import saved_form
from runner.workloads.dqn.replay import NStepBuffer, Replay, row_width, with_masks

if TYPE_CHECKING:
    from runner.env.base import Env
    from runner.env.vector import Vector

log = logging.getLogger(__name__)

Policy = Callable[[np.ndarray, "np.ndarray | None"], np.ndarray]
"""A function that maps observations, float32 [n, …], and masks, if there are any, to greedy actions, int64 [n]."""


def greedy_policy(infer: Callable[[Tree], torch.Tensor], device: torch.device) -> Policy:
    def policy(observations: np.ndarray, masks: np.ndarray | None) -> np.ndarray:
        inputs = torch.tensor(observations, device=device)
        with torch.no_grad():
            # With masks, which the network takes together with the observations, a tuple of one input.
            values = infer(inputs if masks is None else ((inputs, torch.tensor(masks, device=device)),))
            return values.argmax(1).cpu().numpy()

    return policy


class Repeats:
    """Temporally extended ε-greedy exploration (Dabney, Ostrovski and Barreto, ICLR 2021).

    A random action is repeated for n steps, where n is drawn from p(n) ∝ n^(-exponent) over 1 to `longest`, but not
    beyond the end of the episode. The paper's exponent μ is 2.
    """

    def __init__(self, num_envs: int, longest: int, exponent: float = 2.0):
        chances = np.arange(1, longest + 1, dtype=np.float64) ** -exponent
        self._cumulative = np.cumsum(chances / chances.sum())
        self._cumulative[-1] = 1.0  # a draw is below 1, so rounding must not lead past the end
        self._actions, self._left = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)

    def extend(
        self, explores: np.ndarray, actions: np.ndarray, random: np.random.Generator, masks: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return which environments take a random action now, bool [num_envs], and their actions, int64 [num_envs].

        Where `explores` is True, a repetition of `actions` begins, unless the environment is repeating an action. A
        repetition ends where the `masks` do not allow its action any more.
        """
        if masks is not None:
            self.end(~masks[np.arange(len(masks)), self._actions])
        begins = explores & (self._left == 0)
        drawn = np.searchsorted(self._cumulative, random.random(len(begins)), side="right") + 1
        self._left[begins] = drawn[begins]
        self._actions[begins] = actions[begins]
        explores = self._left > 0
        self._left[explores] -= 1
        return explores, self._actions.copy()

    def end(self, ended: np.ndarray) -> None:
        self._left[ended] = 0

    def state_dict(self) -> dict[str, list[int]]:
        return {"actions": self._actions.tolist(), "left": self._left.tolist()}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self._actions[:], self._left[:] = state["actions"], state["left"]


class Actor:
    """Steps the environments of one process, ε-greedily, and stores transitions in the process's replay buffer.

    `seed` is that of the environments, the exploration and the sampling.
    """

    def __init__(
        self,
        vector: Vector,
        num_actions: int,
        n_step_buffer: NStepBuffer,
        replay: Replay,
        seed: int,
        repeats: Repeats | None = None,
        clip_rewards: bool = False,
        terminal_on_life_loss: bool = False,
    ):
        self.vector, self.num_actions, self.n_step_buffer, self.replay = vector, num_actions, n_step_buffer, replay
        self._random = np.random.Generator(np.random.PCG64(derive(seed, "exploration")))
        vector.reset(derive(seed, "environments"))
        self.num_steps = 0
        """Number of steps taken in all environments of this process, including steps that reset an environment."""
        self.num_episodes = 0
        self._returns, self._lengths = np.zeros(vector.num_envs), np.zeros(vector.num_envs, np.int64)
        self._ended: list[tuple[float, int]] = []
        self._repeats = repeats
        self._clip_rewards, self._terminal_on_life_loss = clip_rewards, terminal_on_life_loss
        self._possible: tuple[tuple[float, ...], tuple[torch.Tensor, ...]] = (), ()
        self._rewards = (0.0, 0.0)
        """The least and the greatest reward so far; 0 counts, because an episode may end."""

    def step(self, policy: Policy | None, epsilon: float) -> None:
        """Take one ε-greedy step in each environment (Watkins, 1989), and store the completed transitions.

        Without a policy, all actions are random. If random actions are repeated, `epsilon` is the probability that an
        environment that is not repeating an action begins to repeat one.
        """
        vector, num_envs = self.vector, self.vector.num_envs
        previous, lives, masks = vector.observations, vector.lives, vector.masks
        draws = self._random.random((2, num_envs))
        actions = random_actions(draws[1], self.num_actions, masks)
        explores = draws[0] < (1.0 if policy is None else epsilon)
        if self._repeats is not None:
            explores, actions = self._repeats.extend(explores, actions, self._random, masks)
        if policy is not None:
            actions = np.where(explores, actions, policy(previous, masks))
        steps = vector.step(actions)
        rewards, terminated, truncated, taken, lives_left = steps[1:6]
        ended = terminated | truncated
        if self._repeats is not None:
            self._repeats.end(ended)
        self._returns += rewards
        if self._clip_rewards:
            rewards = rewards.clip(-1, 1)
        if self._terminal_on_life_loss and lives is not None and lives_left is not None:
            terminated = terminated | (taken & (lives_left < lives))  # the episode goes on
        steps = steps._replace(rewards=rewards, terminated=terminated)
        self.replay.store(self.n_step_buffer, previous, actions, steps)
        self._rewards = min(self._rewards[0], float(rewards.min())), max(self._rewards[1], float(rewards.max()))
        self.num_steps += num_envs
        self._lengths += taken
        if ended.any():
            self._ended += zip(self._returns[ended].tolist(), self._lengths[ended].tolist(), strict=True)
            self._returns[ended] = self._lengths[ended] = 0
            self.num_episodes += int(ended.sum())

    def possible_returns(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return the least and the greatest discounted return that an episode can have, scalars; they include 0.

        Those of an endless episode in which every reward is the smallest or the largest reward seen so far: (-inf, inf)
        if rewards are not discounted, or a return exceeds the range of float32.
        """
        scale, (least, greatest) = 1 - self.n_step_buffer.discount, self._rewards
        in_range = max(-least, greatest) < scale * torch.finfo(torch.float32).max
        possible = (least / scale, greatest / scale) if in_range else (-math.inf, math.inf)
        if possible != self._possible[0]:
            dtype = sum_dtype(device)  # tensors, as a compiled step is compiled again for each new number
            self._possible = possible, tuple(torch.tensor(each, dtype=dtype, device=device) for each in possible)
        return self._possible[1]

    def sample(self, count: int) -> torch.Tensor:
        """Return `count` rows of the replay buffer, drawn uniformly with replacement; see `Replay.batch`."""
        return self.replay.sample(self._random, count)

    def take_episodes(self) -> dict[str, float]:
        """Return the means `episode/return` and `episode/length` of the episodes that ended since the last call."""
        if not self._ended:
            return {}
        returns, lengths = zip(*self._ended, strict=True)
        self._ended = []
        return {"episode/return": sum(returns) / len(returns), "episode/length": sum(lengths) / len(lengths)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "replay": self.replay.state_dict(),
            "num_episodes": self.num_episodes,
            "random": self._random.bit_generator.state,
            "environments": self.vector.state_dict(),
            "windows": self.n_step_buffer.state_dict(),
            "returns": self._returns.tolist(),
            "lengths": self._lengths.tolist(),
            "ended": self._ended,
            "rewards": self._rewards,
        } | ({} if self._repeats is None else {"repeats": self._repeats.state_dict()})

    def load_state_dict(self, state: dict[str, Any], parts: Mapping[str, Path] | None = None) -> None:
        """Restore the state that `state_dict` returned, with the `parts` of the replay buffer.

        If the state of the environments was not saved or cannot be restored, or the number of environments differs, all
        environments start new episodes, and a warning is logged. If an error is raised, the state may be partly
        replaced.
        """
        self.replay.load_state_dict(state["replay"], parts)
        self.num_episodes = state["num_episodes"]
        self._ended = [tuple(episode) for episode in state["ended"]]
        self._rewards = state["rewards"]
        self._random.bit_generator.state = state["random"]
        why = ""
        if len(state["returns"]) != self.vector.num_envs:
            why = "the checkpoint has a different number of them"
        elif state["environments"] is None:
            why = "the checkpoint has no state of them (with env.vectorization=sync it has one)"
        elif differ := self.vector.load_state_dict(state["environments"]):
            why = f"{len(differ)} of them came to another state when their episodes were replayed "
            why += "from seeds and actions"
        if why:
            log.warning("%s environments start new episodes: %s", self.vector.name, why)
            self.vector.reset(int(self._random.integers(2**62)))  # other episodes than the first ones
            self.replay.restart()
            return
        self.n_step_buffer.load_state_dict(state["windows"])
        self._returns, self._lengths = np.array(state["returns"]), np.array(state["lengths"], np.int64)
        if self._repeats is not None:
            self._repeats.load_state_dict(state["repeats"])


def check_saved(state: dict[str, Any], env: Env, n_step: int, longest_repeat: int) -> None:
    """Check what `DQN.state_dict` returned, except the state of the environments, which is checked when it is loaded.

    Raises `UnexpectedContentError` if it cannot have been saved by an agent in such environments.
    """
    size, masked = math.prod(env.shape) if env.pixels is None else 1, env.num_masked
    width = row_width(size, masked)
    for part in (state["replay"], state["windows"]) if masked else ():
        part["rows"] = with_masks(part["rows"], size, masked)
    vectors = {"rows": TensorSpec(torch.float32, (None, width)), "cursor": int}
    windows = {
        "time": int,
        "rows": TensorSpec(torch.float32, (n_step, None, width)),
        "returns": TensorSpec(torch.float64, (n_step, None)),
        "open": TensorSpec(torch.bool, (n_step, None)),
    }
    like = {
        "replay": vectors if env.pixels is None else saved_form(math.prod(env.pixels.frame_shape), masked),
        "num_episodes": int,
        "random": {"bit_generator": str, "state": {"state": int, "inc": int}, "has_uint32": int, "uinteger": int},
        "environments": object,
        "windows": windows,
        "returns": [float],
        "lengths": [int],
        "ended": [(float, int)],
        "rewards": (float, float),
        "best": float,
    }
    repeats = {"repeats": {"actions": [int], "left": [int]}} if longest_repeat > 1 else {}
    check_like(state, like | repeats, "the agent")
    rows, windows = state["replay"]["rows"], state["windows"]
    if env.pixels is None:
        check_like(state["replay"]["cursor"], range(len(rows) + 1), "the agent, replay, cursor")
    per_env = (state["returns"], state["lengths"], *state.get("repeats", {}).values())
    sizes = {*map(len, per_env), *(windows[key].shape[1] for key in ("rows", "returns", "open"))}
    if len(rows) == 0 or len(sizes) > 1:
        raise UnexpectedContentError("the agent: an empty replay buffer, or different numbers of environments")
