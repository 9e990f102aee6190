"""Tests of DDP: batch normalization, compilation, and the communication of gradients."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, compose_config
from helpers.narrow_resnet import use_narrow_resnet
from helpers.plain_loop import (
    OPTIMIZER_CASES,
    PLAIN_LOOP_OVERRIDES,
    STEPS,
    PlainSettings,
    largest_difference,
    plain_loop,
    weights_at,
)
from helpers.ranks import connected_session

from runner.parallel.session import Session
from runner.run import Run
from runner.training import prepare

SHORT = 3
BATCH_NORM = (*PLAIN_LOOP_OVERRIDES, "optimizer.lr=0.002", "model=resnet18", "model.norm=batch", "precision=64")
BATCH_NORM += ("data.holdout=0.02", "batch_size=12", f"steps={SHORT}")


@functools.cache
def plain_batch_norm(num_parts: int, num_steps: int = SHORT) -> dict[str, torch.Tensor]:
    run = use_narrow_resnet(build_composed_run(*TINY_CPU, *BATCH_NORM))
    settings = PlainSettings(num_steps, torch.float64, num_batch_shards=num_parts)
    return plain_loop(run, lambda p: torch.optim.SGD(p, lr=0.002, momentum=0.9), settings).weights


@pytest.mark.parametrize(("mode", "parts"), [("ddp", 2), ("fsdp", 2), ("ddp parallel.sync_batch_norm=true", 1)])
def test_batch_normalization_uses_a_shard_or_with_sync_the_whole_batch(mode, parts, ranks, tmp_path):
    """Running statistics are compared too; without sync, they are averaged over the processes.

    The checkpoint of step 2 is saved without an evaluation, and that of the last step after one.
    """
    config = compose_config(*TINY_CPU, *BATCH_NORM, "save_every=2", *f"parallel={mode}".split())
    ranks(2).train(config, tmp_path, use_narrow_resnet)
    for step in (2, SHORT):
        assert largest_difference(weights_at(tmp_path, step), plain_batch_norm(parts, step)) <= 1e-9
    assert "each micro-batch" not in (tmp_path / "log.txt").read_text()
    if parts == 1:
        config |= {"accumulation": {**config["accumulation"], "steps": 2}, "steps": 1}
        ranks(2).train(config, tmp_path / "two", use_narrow_resnet)
        assert "normalizes each micro-batch by itself" in (tmp_path / "two" / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("synchronized", "parts", "bucket_mb"), [(False, 2, 1), (True, 1, 1), (False, 2, 0.5)])
def test_a_compiled_network_with_batch_normalization_equals_a_plain_loop(
    synchronized, parts, bucket_mb, ranks, tmp_path
):
    """The gradients fill several buckets. If the compiler can split the network, it does so between the buckets."""
    options = [f"parallel.sync_batch_norm={synchronized}", f"parallel.bucket_mb={bucket_mb}", "compile=true"]
    ranks(2).train(compose_config(*TINY_CPU, *BATCH_NORM, "parallel=ddp", *options), tmp_path, narrow_without_codegen)
    assert largest_difference(weights_at(tmp_path, SHORT), plain_batch_norm(parts)) <= 1e-9


def test_a_compiled_network_that_is_split_at_buckets_equals_a_plain_loop(ranks, tmp_path):
    overrides = (*TINY_CPU, *PLAIN_LOOP_OVERRIDES, "model.hidden=2048", "precision=64", "optimizer.lr=0.05", "steps=3")
    options = ("parallel=ddp", "parallel.bucket_mb=1", "compile=true")  # 2 MiB of gradients
    ranks(2).train(compose_config(*overrides, *options), tmp_path, without_codegen)
    settings = PlainSettings(SHORT, torch.float64)
    plain = plain_loop(build_composed_run(*overrides), OPTIMIZER_CASES["sgd"][1], settings)
    assert largest_difference(weights_at(tmp_path, SHORT), plain.weights) <= 1e-13


def narrow_without_codegen(run: Run, session: Session) -> None:
    without_codegen(use_narrow_resnet(run), session)


def without_codegen(run: Run, session: Session) -> None:
    """Capture the graph of `compile=true`, but generate no code, to save a minute."""
    build = session.workload.build_model

    def network() -> torch.nn.Module:
        model = build()
        model.compile = functools.partial(model.compile, backend="eager")
        return model

    session.workload.build_model = network


@pytest.mark.parametrize(
    ("compression", "least", "most"),
    [("fp16", 1e-7, 1e-2), ("bf16", 1e-6, 5e-2), ("powersgd", 1e-3, 1.0)],
)
def test_training_with_compressed_gradients_rounds(compression, least, most, ranks, tmp_path):
    overrides = (*PLAIN_LOOP_OVERRIDES, "optimizer.lr=0.05", "parallel=ddp", f"parallel.compression={compression}")
    ranks(2).train(compose_config(*TINY_CPU, *overrides), tmp_path)
    plain = plain_loop(build_composed_run(*TINY_CPU, *PLAIN_LOOP_OVERRIDES), OPTIMIZER_CASES["sgd"][1])
    assert least < largest_difference(weights_at(tmp_path, STEPS), plain.weights) < most


def test_gradients_are_sent_once_a_step_with_the_last_micro_batch(ranks, tmp_path):
    config = compose_config(*TINY_CPU, *PLAIN_LOOP_OVERRIDES, "parallel=ddp", "accumulation=4")
    for sent in ranks(2).call_on_all(elements_sent, config, tmp_path):
        assert sent == [0, 0, 0, NUM_PARAMETERS]


NUM_PARAMETERS = 16 * 9 + 16 + 32 * 16 * 9 + 32 + 128 * 64 + 64 + 64 * 10 + 10
"""Number of parameters of model=tiny on 8×8 digits."""


def elements_sent(config: dict[str, Any], directory: Path) -> list[int]:
    """In a rank: return how many gradient elements each micro-batch of the first step sends."""
    with connected_session(config) as (run, session):
        state, sent = prepare(run, session, directory), [0]

        def hook(_, bucket):  # without annotations, because torch checks them
            sent[-1] += bucket.buffer().numel()
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        run.parallel._replicas[""].register_comm_hook(None, hook)
        batches = session.workload.batches(state.model, session.plan, 0, session.device)
        for micro in session.plan.micro_batches(1):
            run.parallel.accumulate(state.model, next(batches), micro, False)
            sent.append(0)
        return sent[:-1]
