"""Tests that `ProcessEngine` computes the gradients and outputs of the whole network under every schedule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from helpers.ranks import PersistentRanks
from torch import nn

from runner.parallel.launch.cluster import external_rank_info
from runner.parallel.launch.processes import ExternalProcesses
from runner.parallel.pipelining.process_engine import ProcessEngine
from runner.parallel.pipelining.schedules import SCHEDULES
from runner.parallel.pipelining.stages import ActivationSpec, StageModule
from runner.parallel.pipelining.timeline import Span, Timeline

CPU = torch.device("cpu")
WIDTHS = (3, 5, 4, 6, 2)
SIZE, NUM_MICROS = 3, 4


def network() -> list[nn.Module]:
    """Return four blocks."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(one, other), nn.Tanh()).double() for one, other in pairwise(WIDTHS)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    count = SIZE * NUM_MICROS
    inputs = torch.randn(count, WIDTHS[0], generator=generator, dtype=torch.float64)
    return inputs, torch.randn(count, WIDTHS[-1], generator=generator, dtype=torch.float64)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().sum()


def stages_of(schedule: str) -> list[list[nn.Module]]:
    """Return the blocks of each stage. Each of the two processes has one stage or two, as the schedule requires."""
    blocks = network()
    return [blocks[:2], blocks[2:]] if schedule in ("gpipe", "1f1b") else [[block] for block in blocks]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_and_outputs_are_those_of_the_whole_network(
    schedule: str, ranks: Callable[[int], PersistentRanks]
) -> None:
    whole, (inputs, targets) = nn.Sequential(*network()), batch()
    outputs = whole(inputs)
    loss(outputs, targets).backward()
    found = ranks(2).call_on_all(in_rank, schedule)
    got = {number: gradients for each, _, _ in found for number, gradients in each.items()}
    flat = [gradient for number in sorted(got) for gradient in got[number]]
    for gradient, parameter in zip(flat, whole.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-12)
    for _, inferred, _ in found[:1]:
        torch.testing.assert_close(inferred, outputs[:-1].detach(), rtol=1e-12, atol=1e-12)

    spans = [span for _, _, own in found for span in own]
    stages = range(len(got))
    for kind in ("forward", "backward"):
        seen = sorted((span.stage, span.micro) for span in spans if span.kind == kind)
        assert seen == [(stage, micro) for stage in stages for micro in range(NUM_MICROS)]
    assert any(span.kind == "weights" for span in spans) is (schedule == "zero_bubble")


def in_rank(schedule: str) -> tuple[dict[int, list[torch.Tensor]], torch.Tensor | None, list[Span]]:
    """Train on the batch in this rank, then compute outputs for the batch without its last sample.

    Returns:
        The gradients of each stage of this rank, by the number of the stage; the outputs, on rank 0; and the spans.
    """
    rank_info = external_rank_info()
    assert rank_info is not None
    with ExternalProcesses(rank_info, CPU, 300).connect() as process:
        grouped = stages_of(schedule)
        shapes = [WIDTHS[0], *(group[-1][0].out_features for group in grouped)]  # type: ignore[index]
        specs = [ActivationSpec((width,), torch.float64) for width in shapes]
        last = len(grouped) - 1
        own = {
            number: StageModule(
                grouped[number],
                specs[number] if number > 0 else None,
                specs[number + 1] if number < last else None,
                nullcontext,
            )
            for number in range(process.rank, len(grouped), 2)
        }
        timeline = Timeline([CPU])
        engine = ProcessEngine(own, specs, schedule, SIZE, NUM_MICROS, CPU, timeline)
        inputs, targets = batch()
        timeline.begin(process.barrier)
        engine.train(inputs, targets, loss)
        timeline.on = False
        gradients = {n: [p.grad for p in stage.parameters() if p.grad is not None] for n, stage in own.items()}
        with torch.inference_mode():
            inferred = engine.infer(inputs[:-1]).clone() if process.rank == 0 else None
            engine.serve()
            return gradients, inferred, timeline.take()
