"""Tests of FSDP: the shards of each process, the communication in a step, and tied weights."""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import code_with_state
from helpers.compose import TINY_CPU, build_composed_run, compose_config
from helpers.plain_loop import PLAIN_LOOP_OVERRIDES, largest_difference, weights_at
from helpers.ranks import connected_session
from helpers.strange_networks import CASES, CPU, PLAIN, Teacher, made_once, tanh, trained_with
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

from runner.config.user_code import passed
from runner.parallel.full_state import full_tensor
from runner.parallel.whole_tensors import WholeTensors
from runner.state import State
from runner.training import prepare, train_step


@pytest.fixture
def config() -> dict[str, Any]:
    return compose_config(*TINY_CPU, *PLAIN_LOOP_OVERRIDES, "parallel=fsdp")


def test_weights_gradients_and_optimizer_state_are_sharded(config, ranks, tmp_path):
    whole = build_composed_run(*TINY_CPU).workload.model.build((1, 8, 8), 10)
    for rank, held in enumerate(ranks(3).call_on_all(shapes_held, config, tmp_path)):
        for name, parameter in whole.named_parameters():
            rows = -(-len(parameter) // 3)  # rounded up; the last process has the remaining rows
            shape = (max(0, min(rows, len(parameter) - rank * rows)), *parameter.shape[1:])
            assert held.pop(name) == [shape] * 3
        assert not held


def shapes_held(config: dict[str, Any], directory: Path) -> dict[str, list[tuple[int, ...]]]:
    """In a rank: return the shapes of its shards of weights, gradients and optimizer state after a step."""
    with connected_session(config) as (run, session):
        state = prepare(run, session, directory)
        one_step(state)
        named = dict(state.model.named_parameters())
        held = {name: [p, p.grad] for name, p in named.items()}
        state.optimizer.step()
        shards = {name: [*held[name], state.optimizer.state[p]["momentum_buffer"]] for name, p in named.items()}
        return {name: [tuple(each.to_local().shape) for each in own] for name, own in shards.items()}


def one_step(state: State, counts: Callable[[], int] = lambda: 0) -> list[int]:
    """Run the forward and backward passes of the first step, and return `counts()` after each micro-batch."""
    session, after = state.session, []
    batches = session.workload.batches(state.model, session.plan, 0, session.device)
    for micro in session.plan.micro_batches(1):
        state.run.parallel.accumulate(state.model, next(batches), micro, False)
        after.append(counts())
    return after


@pytest.mark.parametrize(("reshard", "gathers"), [("true", 8), ("false", 4)])
def test_gradients_are_reduced_once_a_step_and_weights_gathered_per_option(reshard, gathers, ranks, tmp_path):
    """Each of four blocks is gathered for the forward pass and, if it was resharded, again for the backward pass."""
    more = ("parallel=fsdp", "accumulation=4", f"parallel.reshard_after_forward={reshard}")
    config = compose_config(*TINY_CPU, *PLAIN_LOOP_OVERRIDES, *more)
    for sent, gathered, single_updates in ranks(2).call_on_all(collectives, config, tmp_path):
        assert sent == [0, 0, 0, 4], "gradients of four blocks, after the last micro-batch"
        assert gathered == gathers
        assert single_updates == 0


def collectives(config: dict[str, Any], directory: Path) -> tuple[list[int], int, int]:
    """In a rank: count reduce-scatters by micro-batch of a step, all-gathers in the last of another, and updates."""
    with connected_session(config) as (run, session), Operations() as seen:
        state = prepare(run, session, directory)
        sent = one_step(state, lambda: seen.count("reduce_scatter"))
        run.parallel.evaluate(state.model.eval())
        state.model.train()
        gathered = one_step(state, lambda: seen.count("allgather"))
        before = len(seen.names)
        state.optimizer.step()
        updates = seen.names[before:]
        assert "aten._foreach_add_.List" in updates
        return sent, gathered[-1] - gathered[-2], updates.count("aten.add_.Tensor") + updates.count("aten.mul_.Tensor")


@pytest.mark.parametrize("mode", ["fsdp", "fsdp_averaged"])
def test_an_evaluation_gathers_one_block_at_a_time_with_any_number_of_batches_on_each_process(mode, ranks, tmp_path):
    """The processes have 0, 1 and 3 batches. A step between two evaluations trains the weights, not their average."""
    more = ("parallel=fsdp", *(("ema.decay=0.5",) if mode == "fsdp_averaged" else ()))
    config = compose_config(*TINY_CPU, *PLAIN_LOOP_OVERRIDES, *more, "batch_size=48")
    alone = config | {"parallel": compose_config(*TINY_CPU)["parallel"]}
    with connected_session(alone) as (run, session):
        expected = evaluated(run, session, tmp_path, range(4))
    for found in ranks(3).call_on_all(evaluated_in_rank, config, tmp_path):
        for tensors, others in zip(found[0], expected[0], strict=True):
            torch.testing.assert_close(tensors, others, rtol=1e-4, atol=1e-5)
        assert found[1] == {"hidden": {"conv1", "conv2", "head"}}, "sharded during the pass of another block"


def evaluated_in_rank(config: dict[str, Any], directory: Path) -> tuple[list[torch.Tensor], dict[str, set[str]]]:
    with connected_session(config) as (run, session):
        return evaluated(run, session, directory, [range(0), range(1), range(1, 4)][session.rank])


def evaluated(
    run: Any, session: Any, directory: Path, batches: range
) -> tuple[list[torch.Tensor], dict[str, set[str]]]:
    """Evaluate some of four batches of zeros, ones, twos and threes before and after each of two steps.

    Return the sums of the outputs over all processes, and the blocks that were sharded during a pass of `hidden`.
    """
    workload, sharded = session.workload, {}
    state = prepare(run, session, directory)

    def note(*_: Any) -> None:
        names = {name.partition(".")[0] for name, p in state.model.named_parameters() if hasattr(p, "to_local")}
        if names and not state.model.training:
            sharded["hidden"] = names

    state.model.hidden.fc.register_forward_hook(note)
    workload.evaluate = lambda infer, shard, device: {
        "sum": sum((infer(torch.full((2, 1, 8, 8), float(n))).sum(0) for n in batches), torch.zeros(10))
    }
    workload.summarize = lambda sums: sums["sum"]
    stream, found = workload.batches(state.model, session.plan, 0, session.device), []
    for step in session.plan.steps(0, 3):
        state.model.eval()
        with state.average.applied():
            found.append(run.parallel.evaluate(state.model)[0])
        state.model.train()
        train_step(state, stream, step, log_due=False)
    return found, sharded


class Operations(TorchDispatchMode):
    """A context that records the names of the torch operations that are called in it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def count(self, word: str) -> int:
        """Return how many operations have `word` in their names."""
        return sum(word in name for name in self.names)

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        self.names.append(str(operation))
        return operation(*arguments, **(options or {}))


class Tied(torch.nn.Module):
    """A network whose second block has the weights of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (torch.nn.Linear(64, size) for size in (64, 64, 10))
        self.second.weight = self.first.weight

    def blocks(self) -> list[tuple[str, torch.nn.Module]]:
        return [("first", self.first), ("second", self.second), ("head", self.head)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))


class TiedOutside(Tied):
    """Like `Tied`, but the second layer is not in any block."""

    def blocks(self) -> list[tuple[str, torch.nn.Module]]:
        return [("first", self.first), ("head", self.head)]


@pytest.mark.parametrize("network", [Tied, TiedOutside])
def test_tied_weights_stay_tied(network, config, ranks, tmp_path):
    alone = weights_of_tied(compose_config(*TINY_CPU, *PLAIN_LOOP_OVERRIDES), tmp_path, network)
    assert alone.keys() == {"first.weight", "first.bias", "second.bias", "head.weight", "head.bias"}
    for weights in ranks(2).call_on_all(weights_of_tied, config, tmp_path, network):
        for name, weight in alone.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)


def weights_of_tied(config: dict[str, Any], directory: Path, network: type[Tied]) -> dict[str, torch.Tensor]:
    """In a rank: return the parameters of `network` after three steps."""
    with connected_session(config) as (run, session):
        session.workload.build_model = network
        state = prepare(run, session, directory)
        batches = session.workload.batches(state.model, session.plan, 0, session.device)
        for step in session.plan.steps(0, 3):
            train_step(state, batches, step, log_due=False)
        assert state.model.first.weight is state.model.second.weight
        return {name: full_tensor(parameter.detach()).clone() for name, parameter in state.model.named_parameters()}


class Taught(Teacher):
    """Its teacher is an average that only the hook of the run writes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + 0.5 * self.teacher(x)


class AveragesByHook:
    """The hook also averages in a module of the file, and in copies of the network, and pulls the weights to both."""

    outside: Any = None
    copied: Any = None

    def __call__(self, state: Any) -> None:
        model = state.model
        self.outside = self.outside or made_once(tanh).double().requires_grad_(False)  # in each process its own
        for mine, average in zip(model.layers.parameters(), model.teacher.parameters(), strict=True):
            average.data = average.data * 0.5 + mine.data * 0.5
        self.copied = self.copied or AveragedModel(model)
        self.copied.update_parameters(model)
        inputs = torch.ones(2, 6, dtype=torch.float64)
        with torch.no_grad():
            outputs = (self.copied(inputs) * model(inputs)).mean()
            for q, p, r in zip(self.outside.parameters(), model.parameters(), self.copied.parameters(), strict=False):
                q.mul_(0.9).add_(p, alpha=0.1)
                p.lerp_(q, 0.1).add_(copy.deepcopy(r), alpha=float(outputs))
                p.add_(torch.randn_like(p), alpha=random.random() * np.random.randn())


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_hook_computes_the_same_with_shards_whole_tensors_and_random_numbers(mode, ranks, tmp_path):
    parts = {**CASES["plain"], "model": Taught}
    words = [*CPU, *PLAIN, "steps=3", "save_every=0"]
    for each, size in (("single", 1), (mode, 2)):
        config = compose_config(*passed(**parts, after_step=print).added_to([*words, f"parallel={each}"]))
        (tmp_path / each).mkdir()
        ranks(size).call_on_all(trained_with, {**parts, "after_step": AveragesByHook()}, config, tmp_path / each)
    weights = [weights_at(tmp_path / each, 3) for each in ("single", mode)]
    assert largest_difference(*weights) < 1e-12


@pytest.mark.parametrize("part", ["loss", "training_step", "attributes"])
def test_a_loss_and_a_step_read_parameters(part, ranks, tmp_path):
    words = [*CPU, *PLAIN, "steps=3", "eval_every=1", "accumulation=2"]
    for mode, size in (("single", 1), ("fsdp", 2)):
        config = compose_config(*passed(**penalized(part)).added_to([*words, f"parallel={mode}"]))
        (tmp_path / mode).mkdir()
        ranks(size).call_on_all(train_penalized, part, config, tmp_path / mode)
    weights = [weights_at(tmp_path / mode, 3) for mode in ("single", "fsdp")]
    assert largest_difference(*weights) < 1e-12


def penalized(part: str) -> dict[str, Any]:
    functions: dict[str, dict[str, Any]] = {
        "loss": {"loss": code_with_state.with_penalty},
        "training_step": {"training_step": code_with_state.step_with_penalty},
        "attributes": {"training_step": code_with_state.step_with_attributes},
    }
    return {**CASES["plain"], "model": code_with_state.network, **functions[part]}


def train_penalized(part: str, config: dict[str, Any], directory: Path) -> None:
    """In a rank, whose network is that of the function there."""
    trained_with(penalized(part), config, directory)


IN_A_HOOK = """
p.mul_(1 - 0.1 * abs(p.mean().item()))
p.sub_(0.1 * float(p.norm())).add_(p.sum(0).fill_(2.0))
p.mul_(2 if p.sum(0).max() > 0 else 3)
p.sub_(0.1 * F.mse_loss(p, torch.ones_like(p)) + F.smooth_l1_loss(p, p * p))
p.add_(sum(q.pow(2).sum().item() for q in ps)).div_(max(1.0, p.norm().item()))
p.add_(int((p > 0).sum()) / p.numel()).add_(torch.unique(p).numel())
p.add_(torch.cat([q.flatten() for q in ps]).norm())
p.add_(torch.tensor([q.sum() for q in ps]).sum())
p.add_(torch.linalg.svd(torch.atleast_2d(p)).S[0])
p.copy_(torch.from_numpy(p.detach().cpu().numpy() * 2) + torch.tensor(p.tolist()))
p[0].zero_()
p[0] = 1.0
p[-1].mul_(p.sum())
p[[0, 2]] *= 3
p[..., 1:].mul_(p[..., :1])
p[p.abs() < p.abs().flatten().sort().values[4]] = 0
p.masked_fill_(p.abs() < torch.quantile(p.abs(), 0.3), 0)
p.view(-1)[3] = p.flatten()[-1].item()
p.t().mul_(2); p.unsqueeze(0).add_(1); p.reshape(-1).mul_(3)
p.data.t().add_(1); p.add_(p.sum()); p.detach()[1].mul_(3); p.mul_(p.norm())
p.select(0, 1).mul_(3); p.split(2)[0].mul_(3); p.unbind(0)[1].mul_(3)
row = p.data[1]; p.mul_(2); row.add_(1); p.add_(p.sum(0)); row.mul_(3)
p.index_copy_(0, torch.tensor([0]), torch.ones_like(p[:1])).index_fill_(0, torch.tensor([2]), 7.0)
p.copy_(p.cumsum(0).roll(1, 0).flip(0).sort(0).values)
p.data.numpy()[2] = 5
p.data = p.data / p.data.norm() + torch.linspace(0, 1, p.shape[-1])
torch.diagonal(torch.atleast_2d(p)).zero_()
torch.nn.init.eye_(torch.atleast_2d(p))
torch._foreach_add_(ps, torch._foreach_norm(ps)[0].item())
torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(ps) * 2, ps)
torch.nn.utils.clip_grad_norm_(p, 0.01); p.sub_(p.grad)
p.grad[0] = 0; p.sub_(p.grad * p.grad.norm().item()); p.grad = p.grad * 2 + p; p.sub_(p.grad)
torch.add(p, p.sum(), out=p)
p.copy_(F.layer_norm(p, p.shape[-1:])).add_(copy.deepcopy(p)).add_(torch.full_like(p, 2))
""".strip().splitlines()


def test_statements_of_a_hook_do_to_shards_what_they_do_to_whole_tensors(config, ranks):
    found = ranks(2).call_on_all(weights_in_rank, config)
    for statement, whole, *of_ranks in zip(IN_A_HOOK, weights_after(sharded=False), *found, strict=True):
        for weights in of_ranks:
            torch.testing.assert_close(weights, whole, rtol=1e-12, atol=1e-12, msg=lambda m, s=statement: f"{s}: {m}")


def weights_in_rank(config: dict[str, Any]) -> list[list[torch.Tensor]]:
    with connected_session(config):
        return weights_after(sharded=True)


def weights_after(sharded: bool) -> list[list[torch.Tensor]]:
    """Return the weights of a layer with gradients after each statement alone."""
    found = []
    for statement in IN_A_HOOK:
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 7).double()  # seven rows: one rank has one more than the other
        if sharded:
            fully_shard(layer)
        layer(torch.arange(32.0, dtype=torch.float64).view(4, 8).sin()).square().mean().backward()
        with torch.no_grad(), WholeTensors() if sharded else nullcontext():
            ps = list(layer.parameters())
            for p in ps:
                exec(statement, {"torch": torch, "F": torch.nn.functional, "copy": copy, "p": p, "ps": ps})
        found.append([full_tensor(p.detach()).clone() for p in layer.parameters()])
    return found
