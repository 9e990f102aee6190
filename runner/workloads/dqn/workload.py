"""The deep Q-learning workload, whose batches come from a replay buffer that an actor fills."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch

from runner.batching import Plan
from runner.config.errors import ABSENT, ConfigError, check, errors_under
from runner.config.limits import Fraction, PositiveInt, Range
from runner.env import EnvironmentBrokenError
from runner.env.base import Env, envs_per_process
from runner.model.base import Model
from runner.seeds import derive
from runner.storage.checkpoint import Part
from runner.storage.value_checks import CONTENT_ERRORS, check_like
from runner.system.section_timer import timer
from runner.system.trees import call
from runner.tracking.metrics import BatchSums, MetricSums, batch_sums
from runner.workloads.base import Workload
from runner.workloads.dqn import evaluation
from runner.workloads.dqn.actor import Actor, Policy, Repeats, check_saved, greedy_policy
from runner.workloads.dqn.annealing import Annealing
from runner.workloads.dqn.frame_replay import MAX_FRAMES, FrameReplay
from runner.workloads.dqn.replay import NStepBuffer, Replay, Transitions, check_host_memory, memory_errors, saved_bytes

log = logging.getLogger(__name__)

_MAX_FLAT = 4096  # values of an image that a multi-layer perceptron may take
_MAX_UNSCALED = 100  # of observations that are no images; larger ones are often images that were flattened


@dataclass
class DQN(Workload):
    """Deep Q-learning with a replay buffer and a target network (Mnih et al., Human-level control, 2015).

    Each process steps its share of the environments and holds its share of the replay buffer (Lin, 1992). The options
    are explained in `conf/workload/dqn.yaml`. `clip_targets` keeps values below every possible return, by the range of
    rewards seen so far (Andrychowicz et al., Hindsight Experience Replay, 2017). The scaling of `normalize` does not
    change during the training, so that stored transitions stay valid.
    """

    model: Model
    env: Env
    env_steps: PositiveInt = 50_000
    warm_up: int = 1_000
    replay_ratio: Annotated[float, Range(above=0, most=1000)] = 0.2
    replay_size: PositiveInt = 50_000
    replay_device: Literal["learner", "cpu"] = "learner"
    discount: Fraction = 0.99
    n_step: PositiveInt = 5
    double: bool = True
    clip_targets: bool = True
    td_loss: Literal["huber", "mse"] = "huber"
    huber_delta: Annotated[float, Range(above=0, most=1e6)] = 1.0
    target_every: PositiveInt = 1
    target_tau: Annotated[float, Range(above=0, most=1)] = 0.01
    epsilon_start: Fraction = 1.0
    epsilon_final: Fraction = 0.1
    epsilon_fraction: Fraction = 0.2
    epsilon_repeat: Annotated[int, Range(least=1, most=1000)] = 1
    epsilon_repeat_exponent: Annotated[float, Range(least=0, most=100)] = 2.0
    normalize: bool = False
    clip_rewards: bool = False
    terminal_on_life_loss: bool = False
    eval_episodes: PositiveInt = 100
    eval_epsilon: Fraction = 0.0
    record_video: bool = False
    save_replay: bool = True

    train_metrics: ClassVar[tuple[str, ...]] = ("td_loss", "q_mean")
    best: ClassVar[tuple[str, str]] = ("return", "max")
    forward_passes: ClassVar[int] = 5  # also of the next observation, by the network and by the target network
    outputs_are_scores: ClassVar[bool] = True
    may_change_on_resume: ClassVar[tuple[str, ...]] = (
        *("env_steps", "epsilon_fraction", "replay_device", "save_replay"),
        *("eval_episodes", "eval_epsilon", "record_video"),
    )
    not_in_passes: ClassVar[tuple[str, ...]] = (
        *("env_steps", "warm_up", "replay_ratio", "replay_size", "discount", "target_every", "target_tau"),
        *("epsilon_start", "epsilon_final", "epsilon_fraction", "epsilon_repeat", "epsilon_repeat_exponent"),
        *("clip_rewards", "eval_episodes", "eval_epsilon"),
    )

    def __post_init__(self) -> None:
        min_warm_up = self.n_step * self.env.num_envs
        why = f"the first transitions are complete after n_step · env.num_envs = {min_warm_up} steps"
        check(self.warm_up >= min_warm_up, "warm_up", self.warm_up, why, f"use at least workload.warm_up={min_warm_up}")
        min_env_steps = math.ceil(self.warm_up + 1 / self.replay_ratio)
        why = f"the warm-up takes {self.warm_up} steps, which leaves none for the first update"
        fits, remedy = self.env_steps >= min_env_steps, f"use at least workload.env_steps={min_env_steps}"
        check(fits, "env_steps", self.env_steps, why, remedy)
        self._epsilon = Annealing(self.epsilon_start, self.epsilon_final, self.epsilon_fraction, self.env_steps)
        self._actor: Actor | None = None
        self._batches: Generator[Transitions] | None = None
        self._saved: dict[str, Any] = {}
        self._saved_parts: dict[str, Path] = {}
        self._best = -math.inf

    def prepare(self) -> None:
        with errors_under("env"):
            self.env.prepare()
        shape, num_dims = self.env.shape, len(self.env.shape)
        if self.model.takes_tokens or self.model.num_dims not in (None, num_dims):
            kind = "texts" if self.model.takes_tokens else "images"
            raise self.model.refused(f"it takes {kind}, and {self.env.name} has none", "use model=qnet")
        if self.env.pixels is not None:
            fits, why = self.replay_size <= MAX_FRAMES, f"the numbers of its frames are below {MAX_FRAMES:,}"
            check(fits, "workload.replay_size", self.replay_size, why, f"workload.replay_size={MAX_FRAMES}")
            if self.model.num_dims is None and math.prod(shape) > _MAX_FLAT:
                why = f"it would flatten images of {'×'.join(map(str, shape))} to vectors"
                raise self.model.refused(why, "use model=nature_cnn")
            why, remedy = "images are scaled anyway", "workload.normalize=false"
            check(not self.normalize, "workload.normalize", True, why, remedy)
        if self.terminal_on_life_loss:
            with self.env.vector(1, in_process=True) as vector:
                vector.reset(0)
                why, remedy = f"{self.env.name} does not tell how many lives are left", "leave it false"
                check(vector.lives is not None, "workload.terminal_on_life_loss", True, why, remedy)
        if missing := self.record_video and self.env.cannot_be_drawn("rgb_array", "set workload.record_video=false"):
            raise ConfigError("workload.record_video", True, *missing)

    def describe(self) -> dict[str, str]:
        env, shape = self.env, "×".join(map(str, self.env.shape)) + ", flattened" * (len(self.env.shape) == 2)
        shape += "" if env.pixels is None else env.pixels.origin
        if env.pixels is None and env.largest > _MAX_UNSCALED and not self.normalize:
            shape += f" with values up to {env.largest:g} (workload.normalize=true scales them)"
        limit = "" if env.longest else f", no limit of steps ({evaluation.MAX_STEPS:,} in evaluations)"
        limit = ", masked" * env.has_masks + limit
        return {
            "env": f"{env.num_envs} × {env.name}, observations of {shape}, {env.num_actions} actions{limit}",
            "replay": f"{self.replay_size:,} transitions, {self.replay_ratio:g} updates per environment step",
        }

    def num_steps(self, batch_size: int) -> int:
        why = f"it is smaller than batch_size={batch_size}, so a batch would repeat transitions"
        remedy = f"use at least workload.replay_size={batch_size}"
        check(self.replay_size >= batch_size, "workload.replay_size", self.replay_size, why, remedy)
        return math.floor((self.env_steps - self.warm_up) * self.replay_ratio + 1e-6)

    def check_plan(self, plan: Plan) -> None:
        envs_per_process(self.env.num_envs, plan.num_data_ranks)

    def build_model(self) -> torch.nn.Module:
        from runner.models.layers import normalizes_batches
        from runner.models.qnet import WithTarget

        with errors_under("model"):
            online = self.model.build(self.env.shape, self.env.num_actions)
        if normalizes_batches(online):
            why = "its batch normalization would let an action depend on what is seen in other environments"
            raise self.model.refused(why, "use model.norm=group if it has it, or model=nature_cnn")
        pixel_scale = None if self.env.pixels is None else self.env.pixels.scale
        scaling = evaluation.observation_scaling(self.env, self.warm_up) if self.normalize else (None, None)
        return WithTarget(online, *scaling, pixel_scale)

    def input_shape(self) -> tuple[int, ...]:
        return self.env.shape

    def batches(
        self, model: torch.nn.Module, plan: Plan, after_step: int, device: torch.device
    ) -> Iterator[Transitions]:
        self._count = plan.num_data_ranks
        self._actor, policy = self._new_actor(plan, device), greedy_policy(partial(call, model), device)
        if after_step:
            last_step = after_step + 1 + plan.step_shard[0] - plan.step_shard[1]
            # A forward pass of a sharded model is a collective, and other ranks may have saved theirs.
            self._resume(self._actor, None if plan.shards_parameters else policy, last_step)
        self._logged = (_training_time(), self._actor.num_steps * self._count)
        self._batches = self._stream(self._actor, policy, plan, after_step, device)
        return self._batches

    def _stream(
        self, actor: Actor, policy: Policy, plan: Plan, after_step: int, device: torch.device
    ) -> Generator[Transitions]:
        sizes = [micro.stop - micro.start for micro in plan.micro_batches(1)]
        index, count = plan.step_shard
        with actor.vector:  # closed with this generator
            for step in itertools.count(after_step + 1 + index, count):
                while actor.num_steps < self._due(step):
                    warming = actor.num_steps * self._count < self.warm_up
                    actor.step(None if warming else policy, self._epsilon.value(actor.num_steps * self._count))
                possible = actor.possible_returns(device)
                # Sampled once per step, so that the transitions do not depend on the number of micro-batches.
                for rows in actor.sample(sum(sizes)).split_with_sizes(sizes):
                    yield actor.replay.batch(rows, device)._replace(possible_returns=possible)

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()

    def fake_batches(self, model: torch.nn.Module, plan: Plan, device: torch.device) -> Iterator[Transitions]:
        replay = self._new_replay(plan, device)
        sizes = [micro.stop - micro.start for micro in plan.micro_batches(1)]
        while True:
            indices = torch.zeros(sum(sizes), dtype=torch.int64, device=replay.rows.device)
            for rows in replay.rows.index_select(0, indices).split_with_sizes(sizes):
                yield replay.batch(rows, device)

    def _due(self, step: int) -> float:
        """Return the number of environment steps of each process before optimizer step `step`; it may be fractional."""
        return (self.warm_up + step / self.replay_ratio - 1e-6) / self._count  # a rounding error must not add a step

    def _new_actor(self, plan: Plan, device: torch.device) -> Actor:
        num_envs = envs_per_process(self.env.num_envs, plan.num_data_ranks)
        if "cpu" in (self.replay_device, device.type):
            check_host_memory(self.env, self.replay_size, self._count)
        with memory_errors(self.replay_size):
            replay = self._new_replay(plan, device)
        size = 1 if self.env.pixels is not None else math.prod(self.env.shape)
        n_step_buffer = NStepBuffer(num_envs, size, self.n_step, self.discount, self.env.num_masked)
        with errors_under("env"):
            vector = self.env.vector(num_envs)
        exponent, seed = self.epsilon_repeat_exponent, derive(plan.seed, "agent", plan.data_rank)
        repeats = Repeats(num_envs, self.epsilon_repeat, exponent) if self.epsilon_repeat > 1 else None
        training = (repeats, self.clip_rewards, self.terminal_on_life_loss)
        return Actor(vector, self.env.num_actions, n_step_buffer, replay, seed, *training)

    def _new_replay(self, plan: Plan, device: torch.device) -> Replay:
        capacity = math.ceil(self.replay_size / plan.num_data_ranks)
        replay_device = device if self.replay_device == "learner" else torch.device("cpu")
        if self.env.pixels is None:
            return Replay(capacity, math.prod(self.env.shape), replay_device, self.env.num_masked)
        num_envs = envs_per_process(self.env.num_envs, plan.num_data_ranks)
        return FrameReplay(capacity, num_envs, self.env.pixels, self.n_step, replay_device, self.env.num_masked)

    def _resume(self, actor: Actor, policy: Policy | None, last_step: int) -> None:
        """Restore what was saved for this process, whose last step was `last_step`, or fill its replay anew."""
        replay, saved, parts = actor.replay, self._saved, self._saved_parts
        self._saved, self._saved_parts = {}, {}
        if saved and (not isinstance(replay, FrameReplay) or replay.fits(saved["replay"])):
            try:
                with memory_errors(self.replay_size):
                    actor.load_state_dict(saved, parts)
            except (*CONTENT_ERRORS, EnvironmentBrokenError) as error:
                why = f"the state of the environments in the checkpoint is not that of {self.env.name}: {error}"
                raise ConfigError("resume", ABSENT, why, "do not trust it, and resume another checkpoint") from None
        else:
            replay.begun = last_step
            epsilon = self._epsilon.value(math.ceil(self._due(last_step)) * self._count)
            while actor.num_steps * self._count < self.warm_up:
                actor.step(policy, 1.0 if policy is None else epsilon)
            steps = f"{actor.num_steps} {'random steps' if policy is None else 'steps of the agent'}"
            log.warning("no replay buffer of this size was saved for this process: %s fill it", steps)
        # The count is a function of the optimizer step, for any number of processes: extra warm-up steps do not count.
        num_envs = actor.vector.num_envs
        actor.num_steps = math.ceil(self._due(last_step) / num_envs) * num_envs

    def loss(self, model: torch.nn.Module, batch: Transitions) -> tuple[torch.Tensor, BatchSums]:
        # A single forward pass for both networks, as wrappers such as DDP expect.
        values, next_values = model(batch.observations, batch.following, double=self.double)
        if self.clip_targets:  # not in 16 bits, whose range may be smaller
            full_range = next_values.to(torch.promote_types(next_values.dtype, torch.float32))
            next_values = full_range.clamp(*batch.possible_returns)
        chosen = values.gather(1, batch.actions)
        targets = torch.addcmul(batch.returns, batch.discounts, next_values)  # float32, or float64 if the network is
        chosen = chosen.to(targets.dtype)  # under autocast, only the network computes in 16 bits
        if self.td_loss == "huber":
            loss = torch.nn.functional.huber_loss(chosen, targets, delta=self.huber_delta)
        else:
            loss = torch.nn.functional.mse_loss(chosen, targets)
        return loss, batch_sums(loss.detach(), chosen.detach())  # q_mean is the value of the action

    def after_step(self, model: torch.nn.Module, step: int) -> None:
        if step % self.target_every == 0:
            model.update_target(self.target_tau)  # pyright: ignore[reportCallIssue]

    def evaluate(
        self, infer: Callable[[torch.Tensor], torch.Tensor], shard: tuple[int, int], device: torch.device
    ) -> MetricSums:
        # On every rank, though rank 0 alone logs the video: in an ensemble, `infer` is a collective.
        self._video = evaluation.record_video(self.env, infer, device) if self.record_video else None
        return evaluation.play(self.env, infer, self.eval_episodes, shard, device, self.eval_epsilon)

    def summarize(self, sums: MetricSums) -> dict[str, float]:
        return {name: float(sums[name] / sums["count"]) for name in ("return", "length")}

    def images(self, sums: MetricSums) -> dict[str, torch.Tensor]:
        mean = self.summarize(sums)["return"]
        is_best, self._best = mean > self._best, max(mean, self._best)
        return {"eval/best_policy": self._video} if is_best and self._video is not None else {}

    def scalars(self, rates: Mapping[str, float]) -> dict[str, float]:
        assert self._actor is not None
        env_steps = self._actor.num_steps * self._count
        now, (last_time, last_env_steps) = _training_time(), self._logged
        self._logged = (now, env_steps)
        return self._actor.take_episodes() | {
            "episode/epsilon": self._epsilon.value(env_steps),
            "time/env_steps_per_second": (env_steps - last_env_steps) / (now - last_time),
        }

    def extra_results(self, all_gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        if self._actor is None:
            return {}
        actors = all_gather([self._actor.num_steps, self._actor.num_episodes])
        steps, episodes = map(sum, zip(*(actors if self._count > 1 else actors[:1]), strict=True))
        return {"env_steps": steps, "episodes": episodes}

    def state_dict(self) -> dict[str, Any]:
        if self._actor is None:
            return {}
        return (self._actor.state_dict() if self.save_replay else {}) | {"best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check `state`, and keep it until `batches` creates the environments and buffers."""
        self._saved = {} if state.keys() == {"best"} else state
        if self._saved:
            check_saved(state, self.env, self.n_step, self.epsilon_repeat)
        elif state:
            check_like(state, {"best": float}, "the agent")
        self._best = state.get("best", -math.inf)

    def shared_state(self) -> dict[str, float]:
        return self._epsilon.state()

    def load_shared_state(self, state: dict[str, float]) -> None:
        self._epsilon.load(state)

    def parts(self) -> dict[str, Part]:
        return self._actor.replay.parts() if self._actor is not None and self.save_replay else {}

    def state_bytes(self) -> tuple[int, int]:
        return saved_bytes(self.env, self.replay_size, self.env_steps) if self.save_replay else (0, 0)

    def check_disk(self, free_bytes: int) -> None:
        if (needed := sum(self.state_bytes())) > free_bytes:
            why = f"checkpoints of the replay buffer take {needed / 1e9:.1f} GB, and {free_bytes / 1e9:.1f} GB are free"
            most = f"workload.replay_size={int(self.replay_size * free_bytes / needed)}"
            raise ConfigError("workload.save_replay", True, why, f"workload.save_replay=false, or at most {most}")

    def load_parts(self, files: dict[str, Path]) -> None:
        self._saved_parts = files


def _training_time() -> float:
    """Return the time in seconds on a clock that stops during logging, evaluation and saving."""
    return time.perf_counter() - timer.paused()
