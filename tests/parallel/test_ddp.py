"""Replicas in several processes: what their batch normalisation sees, when gradients are sent, and how."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compose import FAST, built, composed
from helpers.plain_loop import CASES, COMMON, STEPS, largest_difference, plain_loop, weights_at
from helpers.ranks import Ranks, prepared

from runner.train import prepare

# ---------------------------------------------------------------------------------------------------------------------
# Batch normalisation: over each process's part of the batch, or over all of it

SHORT = 3
BATCH_NORM = (
    *COMMON,
    "optimizer.lr=0.002",
    "model=resnet18",
    "model.norm=batch",
    "data.holdout=0.02",
    "batch_size=12",
    f"steps={SHORT}",
    "precision=64",
)


@functools.cache
def plain_batch_norm(parts: int, steps: int = SHORT) -> dict[str, torch.Tensor]:
    run = built(*FAST, *BATCH_NORM)
    return plain_loop(
        run, lambda p: torch.optim.SGD(p, lr=0.002, momentum=0.9), dtype=torch.float64, steps=steps, parts=parts
    ).weights


@pytest.mark.parametrize(
    ("mode", "parts"),
    [("ddp", 2), ("fsdp", 2), ("ddp parallel.sync_batch_norm=true", 1)],
)
def test_batch_normalisation_sees_what_is_said(
    mode: str, parts: int, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """Buffers too: running statistics are the mean of the parts'."""
    ranks(2).train(composed(*FAST, *BATCH_NORM, *f"parallel={mode}".split()), tmp_path)
    assert largest_difference(weights_at(tmp_path, SHORT), plain_batch_norm(parts)) <= 1e-9


def test_running_means_are_those_of_the_whole_batch_and_variances_lack_what_the_means_differ_by() -> None:
    """Of the first layer at the first step, where nothing else differs: as the words at `DDP` have it."""
    whole, parts = plain_batch_norm(1, steps=1), plain_batch_norm(2, steps=1)
    assert torch.allclose(parts["bn1.running_mean"], whole["bn1.running_mean"], rtol=1e-12, atol=1e-15)
    assert not torch.allclose(parts["bn1.running_var"], whole["bn1.running_var"], rtol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# What is sent


@pytest.mark.parametrize(
    ("compression", "least", "most"),
    [("fp16", 1e-7, 1e-2), ("bf16", 1e-6, 5e-2), ("powersgd", 1e-3, 1.0)],
)
def test_compressed_gradients_round_and_still_learn(
    compression: str, least: float, most: float, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    overrides = (*COMMON, *CASES["sgd"][0], "parallel=ddp", f"parallel.compression={compression}")
    ranks(2).train(composed(*FAST, *overrides), tmp_path / "short")
    plain = plain_loop(built(*FAST, *COMMON), CASES["sgd"][1])
    assert least < largest_difference(weights_at(tmp_path / "short", STEPS), plain.weights) < most
    result = ranks(2).train(composed(*FAST, *overrides, "steps=150", "log_every=150"), tmp_path / "long")
    assert result.metrics["eval/accuracy"] > 0.8


@pytest.mark.parametrize("accumulation", [1, 4])
def test_gradients_are_sent_once_a_step_with_the_last_micro_batch(
    accumulation: int, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    config = composed(*FAST, *COMMON, "parallel=ddp", f"accumulation={accumulation}")
    for sent in ranks(2).do(elements_sent, config, tmp_path):
        assert sent == [0] * (accumulation - 1) + [NUM_PARAMETERS]


NUM_PARAMETERS = 16 * 9 + 16 + 32 * 16 * 9 + 32 + 128 * 64 + 64 + 64 * 10 + 10
"""Of model=tiny on 8×8 digits."""


def elements_sent(config: dict[str, Any], directory: Path) -> list[int]:
    """In a rank: the numbers that each micro-batch of the first step gives away."""
    run = prepared(config, directory)
    with run.parallel.joined(run):
        state, sent = prepare(run, torch.device("cpu")), [0]

        def hook(_, bucket):  # torch wants its own annotations, or none
            sent[-1] += bucket.buffer().numel()
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        run.parallel._replica.register_comm_hook(None, hook)
        return counted(state, sent)


def counted(state: Any, sent: list[int]) -> list[int]:
    """One step; what each micro-batch adds to `sent[-1]` is told apart."""
    run = state.run
    batches = run.workload.batches(state.model, run.plan, 0, state.device)
    for micro in run.plan.micro_batches(1):
        run.parallel.accumulate(state.model, run.workload, next(batches), run.precision, micro)
        sent.append(0)
    return sent[:-1]
