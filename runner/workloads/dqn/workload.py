"""Deep Q-learning: acting in an environment is data loading, the target network is a frozen child of the model."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from runner.batching import Plan
from runner.config.errors import ConfigError, check, check_choice, check_range, errors_under
from runner.env.base import Env, envs_per_process
from runner.model.base import Model
from runner.seeds import derive
from runner.system.memory import host_memory
from runner.system.section_timer import timer
from runner.tracking.metrics import MetricSums
from runner.workloads.base import Workload

if TYPE_CHECKING:
    from models.qnet import WithTarget
    from runner.workloads.dqn.actor import Actor, Policy
    from runner.workloads.dqn.replay import Transitions

log = logging.getLogger(__name__)


@dataclass
class DQN(Workload):
    """An agent that learns the values of actions from what it remembers (Mnih et al., Human-level control, 2015).

    Every process acts in its share of the environments and keeps its share of the replay.

    Args:
        model: the network of action values.
        env: what the agent acts in.
        env_steps: how long the run is, in steps of environments, over all of them and all processes.
        warm_up: so many of these come before the first update, with random actions.
        replay_ratio: updates per environment step after that (Fedus et al., Revisiting Fundamentals of Experience
            Replay, 2020).
        replay_size: how many transitions are remembered, over all processes (Lin, 1992).
        replay_device: `learner`, where the model is, or `cpu`.
        discount: γ, what a reward one step later counts for.
        n_step: rewards that are summed up before the bootstrap (Hessel et al., Rainbow, 2018).
        double: the online network chooses the action that the target network judges (van Hasselt et al., 2016).
        td_loss: `huber` (|error| beyond 1, as Mnih et al., 2015, clip it) or `mse`.
        target_every: updates between two of the target network's.
        target_tau: how far it then moves to the online network: 1 copies it (Mnih et al., 2015), less follows slowly
            (Lillicrap et al., Continuous Control with Deep Reinforcement Learning, 2016).
        epsilon_start: share of random actions in the beginning (Watkins, 1989).
        epsilon_final: share of them later.
        epsilon_fraction: share of the run over which it falls along a line.
        normalize: shift and scale observations by their mean and deviation under random actions, measured beforehand:
            fixed numbers, so that the stored transitions keep their meaning.
        eval_episodes: played greedily in an evaluation.
        record_video: film an episode of each evaluation, and keep the best policy's.
    """

    model: Model
    env: Env
    env_steps: int = 50_000
    warm_up: int = 1_000
    replay_ratio: float = 0.2
    replay_size: int = 50_000
    replay_device: str = "learner"
    discount: float = 0.99
    n_step: int = 5
    double: bool = True
    td_loss: str = "huber"
    target_every: int = 1
    target_tau: float = 0.01
    epsilon_start: float = 1.0
    epsilon_final: float = 0.1
    epsilon_fraction: float = 0.2
    normalize: bool = False
    eval_episodes: int = 100
    record_video: bool = False

    metrics: ClassVar[tuple[str, ...]] = ("td_loss", "q_mean")
    best: ClassVar[tuple[str, str]] = ("return", "max")
    may_change_on_resume: ClassVar[tuple[str, ...]] = ("env_steps", "replay_device", "eval_episodes", "record_video")

    def __post_init__(self) -> None:
        for key in ("env_steps", "replay_size", "n_step", "target_every", "eval_episodes"):
            check_range(self, key, least=1, most=2**31 - 1)
        check_range(self, "replay_ratio", above=0, most=1000)
        check_range(self, "discount", least=0, most=1)
        check_range(self, "target_tau", above=0, most=1)
        for key in ("epsilon_start", "epsilon_final", "epsilon_fraction"):
            check_range(self, key, least=0, most=1)
        check_choice(self, "replay_device", ("learner", "cpu"))
        check_choice(self, "td_loss", ("huber", "mse"))
        least = self.n_step * self.env.num_envs
        why = f"the first transitions are complete after n_step · env.num_envs = {least} steps"
        check(self.warm_up >= least, "warm_up", self.warm_up, why, f"at least workload.warm_up={least}")
        longer = math.ceil(self.warm_up + 1 / self.replay_ratio)
        why = "the warm-up takes all of them, and nothing is learned"
        check(self.env_steps >= longer, "env_steps", self.env_steps, why, f"at least workload.env_steps={longer}")
        self._actor: Actor | None = None
        self._saved: dict[str, Any] = {}
        self._best = -math.inf

    def prepare(self) -> None:
        with errors_under("env"):
            self.env.prepare()
        name, shape, takes = type(self.model).__name__, self.env.shape, self.model.num_dims
        seen = f"{self.env.id} shows {'images' if len(shape) == 3 else 'vectors'} of {' × '.join(map(str, shape))}"
        check(takes is None or len(shape) == takes, "model", name, f"it takes images, and {seen}", "model=qnet")
        check(len(shape) < 3, "env.id", self.env.id, f"{seen}; agents here see vectors", "choose another")
        if self.record_video and (missing := self.env.cannot_be_drawn()):
            raise ConfigError("workload.record_video", True, *missing)
        self._check_memory()

    def describe(self) -> dict[str, str]:
        env, shape = self.env, "×".join(map(str, self.env.shape))
        return {
            "env": f"{env.num_envs} × {env.id}, observations of {shape}, {env.num_actions} actions",
            "replay": f"{self.replay_size:,} transitions, {self.env_steps:,} environment steps in all",
        }

    def _check_memory(self) -> None:
        machine = host_memory()
        room = min(machine[key] or math.inf for key in ("available_bytes", "limit_bytes", "total_bytes"))
        row = 4 * (2 * math.prod(self.env.shape) + 3)
        why = f"{self.replay_size * row / 1e9:.1f} GB, and {room / 1e9:.1f} GB are free"
        fitting = f"at most workload.replay_size={int(room // row)}"
        check(self.replay_size * row <= room, "workload.replay_size", self.replay_size, why, fitting)

    def num_steps(self, batch_size: int) -> int:
        why = f"a batch of {batch_size} would hold most transitions more than once"
        least = f"at least workload.replay_size={batch_size}"
        check(self.replay_size >= batch_size, "workload.replay_size", self.replay_size, why, least)
        return math.floor((self.env_steps - self.warm_up) * self.replay_ratio + 1e-6)

    def check_plan(self, plan: Plan) -> None:
        envs_per_process(self.env.num_envs, plan.num_workers)

    def build_model(self) -> torch.nn.Module:
        from models.qnet import WithTarget  # here, not above: it loads torch
        from runner.workloads.dqn.evaluation import observation_statistics  # as above, and numpy

        with errors_under("model"):
            online = self.model.build(self.env.shape, self.env.num_actions)
        return WithTarget(online, *(observation_statistics(self.env, self.warm_up) if self.normalize else ()))

    # -----------------------------------------------------------------------------------------------------------------
    # Acting, which is this workload's data loading

    def batches(
        self, model: torch.nn.Module, plan: Plan, after_step: int, device: torch.device
    ) -> Iterator[Transitions]:
        self._count = plan.num_workers
        self._logged = (_training_time(), 0)
        self._actor = actor = self._new_actor(plan, device)
        if after_step:
            self._go_on(actor, after_step + 1 + plan.step_shard[0] - plan.step_shard[1])
        return self._stream(actor, _greedy(model, device), plan, after_step, device)

    def _stream(
        self, actor: Actor, policy: Policy, plan: Plan, after_step: int, device: torch.device
    ) -> Iterator[Transitions]:
        from runner.workloads.dqn.replay import unpack  # here, not above: it loads torch

        sizes = [micro.stop - micro.start for micro in plan.micro_batches(1)]
        index, count = plan.step_shard
        with actor.vector:  # closed when the loop lets go of this stream
            for step in itertools.count(after_step + 1 + index, count):
                while actor.num_steps < self._due(step):
                    warming = actor.num_steps * self._count < self.warm_up
                    actor.step(None if warming else policy, self.epsilon(actor.num_steps * self._count))
                # Drawn at once for the whole step: the same transitions, into however many parts they are cut.
                for rows in actor.sample(sum(sizes)).split_with_sizes(sizes):
                    yield unpack(rows.to(device, non_blocking=True))

    def _due(self, step: int) -> float:
        """The environment steps of this process before the update of `step`: the same number on every process."""
        return (self.warm_up + step / self.replay_ratio - 1e-6) / self._count

    def epsilon(self, env_steps: int) -> float:
        """The share of random actions after `env_steps`."""
        fallen = min(1.0, env_steps / max(self.epsilon_fraction * self.env_steps, 1))
        return self.epsilon_start + (self.epsilon_final - self.epsilon_start) * fallen

    def _new_actor(self, plan: Plan, device: torch.device) -> Actor:
        from runner.workloads.dqn.actor import Actor  # here, not above: these load torch and numpy
        from runner.workloads.dqn.n_step import NStepBuffer
        from runner.workloads.dqn.replay import Replay

        num_envs, size = envs_per_process(self.env.num_envs, plan.num_workers), math.prod(self.env.shape)
        capacity, place = -(-self.replay_size // self._count), device if self.replay_device == "learner" else "cpu"
        try:
            replay = Replay(capacity, size, place)
        except RuntimeError as error:  # torch's for memory that is not there
            why = f"there is no room for it on {place}: {str(error).splitlines()[0]}"
            raise ConfigError("workload.replay_size", self.replay_size, why, "smaller, or replay_device=cpu") from None
        n_step_buffer = NStepBuffer(num_envs, size, self.n_step, self.discount)
        with errors_under("env"):
            vector = self.env.vector(num_envs)
        return Actor(vector, self.env.num_actions, n_step_buffer, replay, derive(plan.seed, "agent", plan.worker))

    def _go_on(self, actor: Actor, last_step: int) -> None:
        """Take over what was saved for this process, whose last update was that of `last_step`.

        Where nothing was saved, it remembers random actions for a beginning.
        """
        if self._saved:
            actor.load_state_dict(self._saved)
            self._saved = {}
        else:
            log.warning("no replay was saved for this process: it is filled by %d random steps", self.warm_up)
            while actor.num_steps * self._count < self.warm_up:
                actor.step(None, 1.0)
        # A function of the step, however many processes there were: what is extra does not count.
        each = actor.vector.num_envs
        actor.num_steps = math.ceil(self._due(last_step) / each) * each
        self._logged = (_training_time(), actor.num_steps * self._count)

    # -----------------------------------------------------------------------------------------------------------------
    # Learning

    def loss(self, model: torch.nn.Module, batch: Transitions) -> tuple[torch.Tensor, torch.Tensor]:
        # One call for both networks: a mode that wraps the model sees one forward pass.
        values, following = model(batch.observations, batch.next_observations, double=self.double)
        chosen = values.gather(1, batch.actions)
        targets = torch.addcmul(batch.returns, batch.discounts, following)  # float32, or the network's float64
        chosen = chosen.to(targets.dtype)  # 16 bits are for the network, not for the sums
        compare = torch.nn.functional.smooth_l1_loss if self.td_loss == "huber" else torch.nn.functional.mse_loss
        loss = compare(chosen, targets)
        sums = torch.stack((loss.detach() * len(targets), chosen.detach().sum())).float()
        return loss, sums

    def after_step(self, model: torch.nn.Module, step: int) -> None:
        if step % self.target_every == 0:
            cast("WithTarget", model).update_target(self.target_tau)

    # -----------------------------------------------------------------------------------------------------------------
    # Looking at it

    def evaluate(
        self, infer: Callable[[torch.Tensor], torch.Tensor], shard: tuple[int, int], device: torch.device
    ) -> MetricSums:
        from runner.workloads.dqn import evaluation  # here, not above: it loads numpy

        self._film = evaluation.film(self.env, infer, device) if self.record_video else None
        return evaluation.play(self.env, infer, self.eval_episodes, shard, device)

    def summarize(self, sums: MetricSums) -> dict[str, float]:
        return {name: float(sums[name] / sums["count"]) for name in ("return", "length")}

    def images(self, sums: MetricSums) -> dict[str, torch.Tensor]:
        mean = self.summarize(sums)["return"]
        is_best, self._best = mean > self._best, max(mean, self._best)
        return {"eval/best_policy": self._film} if is_best and self._film is not None else {}

    def scalars(self) -> dict[str, float]:
        assert self._actor is not None
        env_steps = self._actor.num_steps * self._count
        now, (since, before) = _training_time(), self._logged
        self._logged = (now, env_steps)
        return self._actor.take_episodes() | {
            "episode/env_steps": env_steps,
            "episode/epsilon": self.epsilon(env_steps),
            "time/env_steps_per_second": (env_steps - before) / (now - since),
        }

    def extra_results(self) -> dict[str, Any]:
        if self._actor is None:
            return {}
        return {"env_steps": self._actor.num_steps * self._count, "episodes": self._actor.num_episodes}

    def state_dict(self) -> dict[str, Any]:
        return {} if self._actor is None else self._actor.state_dict() | {"best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state
        self._best = state.get("best", -math.inf)


def _training_time() -> float:
    """Seconds that pass while nothing is logged, evaluated or saved."""
    return time.perf_counter() - timer.paused()


def _greedy(model: torch.nn.Module, device: torch.device) -> Policy:
    """The action of the highest value, by the weights as they are when it is asked."""

    def policy(observations):
        with torch.no_grad():
            return model(torch.from_numpy(observations).to(device)).argmax(1).cpu().numpy()

    return policy
