"""Tests that the samples of a batch are a pure function of seed and step."""

import itertools

import pytest
import torch

from runner.batching import Plan, SampleOrder
from runner.config.errors import ConfigError
from runner.seeds import derive

SPLITS = [(12, 1, 1), (12, 3, 1), (12, 1, 4), (12, 2, 3), (12, 12, 1), (8, 2, 4), (1, 1, 1)]


@pytest.mark.parametrize(("batch_size", "accumulation", "world_size"), SPLITS)
def test_micro_batches_tile_the_global_batch(batch_size, accumulation, world_size):
    for step in (1, 2, 1000):
        micros = [
            Plan(batch_size, accumulation, data_shard=(rank, world_size)).micro_batches(step)
            for rank in range(world_size)
        ]
        positions = [p for micro in itertools.chain(*micros) for p in range(micro.start, micro.stop)]
        assert positions == list(range((step - 1) * batch_size, step * batch_size))
        assert sum(micro.weight for micro in itertools.chain(*micros)) == pytest.approx(1)
        for of_one_rank in micros:
            assert [micro.is_last for micro in of_one_rank] == [False] * (accumulation - 1) + [True]
            assert {micro.stop - micro.start for micro in of_one_rank} == {batch_size // accumulation // world_size}


def test_a_stream_starts_after_any_step():
    plan = Plan(12, accumulation=2, data_shard=(1, 3))
    steps = [micro for step in range(1, 9) for micro in plan.micro_batches(step)]
    assert list(itertools.islice(plan.stream(0), 16)) == steps
    assert list(itertools.islice(plan.stream(5), 6)) == steps[10:]


def test_the_steps_of_a_run_are_numbered_from_one():
    plan = Plan(12, accumulation=2, data_shard=(1, 3))
    assert list(plan.steps(2, 5)) == [(step, step, plan.micro_batches(step)) for step in (3, 4, 5)]
    assert (plan.steps_per_round, plan.samples_per_round) == (1, 12)


@pytest.mark.parametrize("last", [6, 7, 8])
def test_processes_that_divide_the_steps_cover_each_step_once(last):
    plans = [Plan(12, step_shard=(index, 3)) for index in range(3)]
    rounds = list(zip(*(plan.steps(0, last) for plan in plans), strict=True))
    assert [step.local for each in rounds for step in each if step.micro_batches] == list(range(1, last + 1))
    for number, each in enumerate(rounds, start=1):
        assert {step.number for step in each} == {min(3 * number, last)}, "the last step of the round"
        for plan, step in zip(plans, each, strict=True):
            assert step.micro_batches == (plan.micro_batches(step.local) if step.local <= last else [])
    assert plans[1].steps_per_round == 3
    assert plans[1].samples_per_round == 36
    own = [micro for step in (2, 5, 8) for micro in plans[1].micro_batches(step)]
    assert list(itertools.islice(plans[1].stream(0), 3)) == own


def test_workers_are_numbered_over_both_kinds_of_shards():
    plans = [Plan(12, data_shard=(i, 2), step_shard=(j, 3)) for i in range(2) for j in range(3)]
    assert [plan.data_rank for plan in plans] == list(range(6))
    assert {plan.num_data_ranks for plan in plans} == {6}


@pytest.mark.cases(
    (10, 4, 1, "batch_size=8 or batch_size=12"),
    (3, 2, 2, "batch_size=4"),
    (100, 1, 3, "batch_size=99 or batch_size=102"),
)
def test_a_batch_that_does_not_divide_is_refused(batch_size, accumulation, world_size, remedy):
    with pytest.raises(ConfigError) as refused:
        Plan(batch_size, accumulation, data_shard=(0, world_size))
    assert (refused.value.key, refused.value.got) == ("batch_size", batch_size)
    assert refused.value.remedy.endswith(f": {remedy}")


def stream(num_samples: int, seed: int, epochs: int) -> list[int]:
    """Return the whole stream of sample indices, computed slowly: the permutations of all epochs, concatenated."""
    generators = [torch.Generator().manual_seed(derive(seed, "order", epoch)) for epoch in range(epochs)]
    return [i for generator in generators for i in torch.randperm(num_samples, generator=generator).tolist()]


@pytest.mark.parametrize("length", [1, 3, 7, 10, 25, 40])
def test_indices_follow_the_stream(length):
    expected = stream(10, seed=5, epochs=12)
    order = SampleOrder(10, seed=5)
    for start in range(0, 120 - length, length):
        assert order.indices(start, start + length).tolist() == expected[start : start + length]
        assert order.epochs(start, start + length).tolist() == [p // 10 for p in range(start, start + length)]
    for start in (95, 3, 50, 48, 8, 0, 77):  # in any order
        assert order.indices(start, start + 3).tolist() == expected[start : start + 3]


def test_the_order_does_not_use_the_global_generator():
    before = torch.get_rng_state()
    SampleOrder(10, seed=0).indices(0, 30)
    assert torch.equal(torch.get_rng_state(), before)
