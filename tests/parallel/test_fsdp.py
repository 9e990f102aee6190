"""Tests of FSDP: the shards of each process, the communication in a step, and tied weights."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, compose_config
from helpers.plain_loop import PLAIN_LOOP_OVERRIDES, largest_difference, weights_at
from helpers.ranks import connected_session
from helpers.strange_networks import CASES, CPU, PLAIN, Teacher, made_once, tanh, trained_with
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

from runner.config.user_code import passed
from runner.parallel.full_state import full_tensor
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
        outputs = self.copied(torch.ones(2, 6, dtype=torch.float64)).mean()
        with torch.no_grad():
            for q, p, r in zip(self.outside.parameters(), model.parameters(), self.copied.parameters(), strict=False):
                q.mul_(0.9).add_(p, alpha=0.1)
                p.lerp_(q, 0.1).add_(copy.deepcopy(r), alpha=float(outputs))


def test_a_hook_under_fsdp_computes_with_shards_and_whole_tensors(ranks, tmp_path):
    parts = {**CASES["plain"], "model": Taught}
    words = [*CPU, *PLAIN, "steps=3", "save_every=0"]
    for mode, size in (("single", 1), ("fsdp", 2)):
        config = compose_config(*passed(**parts, after_step=print).added_to([*words, f"parallel={mode}"]))
        (tmp_path / mode).mkdir()
        ranks(size).call_on_all(trained_with, {**parts, "after_step": AveragesByHook()}, config, tmp_path / mode)
    weights = [weights_at(tmp_path / mode, 3) for mode in ("single", "fsdp")]
    assert largest_difference(*weights) < 1e-12
