"""Tests of `Parallel`, the single-device mode from which the other modes inherit."""

from __future__ import annotations

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, prepare_session

from runner.batching import Plan
from runner.config.errors import ConfigError
from runner.parallel.base import move
from runner.parallel.collectives import Collectives
from runner.parallel.launch.cluster import RankInfo


def test_a_single_process_does_all_of_the_work() -> None:
    run = build_composed_run(*TINY_CPU)
    session = prepare_session(run)
    assert (session.rank, session.world_size, session.device) == (0, 1, torch.device("cpu"))
    assert session.plan == Plan(run.batch_size, seed=run.seed)
    assert run.parallel.scalars() == {}
    assert run.parallel.combine_overflow(torch.zeros(())) is None


def test_each_data_parallel_rank_has_its_own_shard_and_random_numbers() -> None:
    run = build_composed_run(*TINY_CPU, "parallel=ddp", "batch_size=10")
    found = run.session(Collectives([torch.device("cpu")], 2, 5)).plan
    assert found == Plan(10, seed=run.seed, data_shard=(2, 5), eval_shard=(2, 5), rng_stream=2)


@pytest.mark.parametrize("mode", ["single", "dp", "model", "hogwild", "pipeline parallel.engine=streams"])
def test_several_externally_launched_processes_are_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RankInfo(1, 2, 1, 2, "127.0.0.1", 1234).variables().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refusal:
        prepare_session(build_composed_run(*TINY_CPU, *f"parallel={mode}".split()))
    assert (refusal.value.key, refusal.value.got) == ("parallel.processes", 2)


def test_an_evaluation_covers_every_held_out_sample_in_inference_mode() -> None:
    run = build_composed_run(*TINY_CPU)
    session = prepare_session(run)
    model = run.parallel.place(session.workload.build_model(), session)
    seen: list[bool] = []
    model.register_forward_hook(
        lambda module, *_: seen.append(torch.is_inference_mode_enabled() and not module.training)
    )
    metrics, sums = run.parallel.evaluate(model.eval())
    assert int(sums["count"]) == 359
    assert metrics.keys() == {"loss", "accuracy"}
    assert all(seen)
    assert seen


@pytest.mark.parametrize("channels_last", [True, False])
def test_move_converts_weights_to_the_memory_format(channels_last: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Linear(3, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    move(model, torch.device("cpu"), channels_last)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last) is channels_last
    assert model[0].weight.is_contiguous() is not channels_last
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
