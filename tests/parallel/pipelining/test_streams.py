"""Tests of the pipeline in one process: the order of computations, and the operations queued on each stream."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from runner.parallel.pipelining.stages import StageModule
from runner.parallel.pipelining.streams import StreamEngine, clock
from runner.parallel.pipelining.timeline import Timeline

CPU = torch.device("cpu")
ONE, TWO = torch.device("cuda", 0), torch.device("cuda", 1)


def test_each_stage_has_a_different_micro_batch_in_each_clock_cycle() -> None:
    assert list(clock(3, 2)) == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]
    for micros, stages in ((1, 3), (4, 3), (5, 1)):
        order = list(clock(micros, stages))
        assert sorted(order) == [(micro, stage) for micro in range(micros) for stage in range(stages)]
        for micro, stage in order[1:]:
            if stage:
                assert order.index((micro, stage - 1)) < order.index((micro, stage))


def stages() -> list[StageModule]:
    torch.manual_seed(0)
    blocks = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]
    return [StageModule([block], False, False, False, nullcontext) for block in blocks]


def test_the_recording_has_every_computation() -> None:
    timeline = Timeline([CPU])
    timeline.begin(lambda: None)
    engine = StreamEngine(stages(), [CPU] * 3, 4, timeline)
    engine.train(torch.randn(12, 3), torch.randn(12, 2), lambda y, t: (y - t).square().sum())
    assert [span[:3] for span in timeline.take()] == [
        *((stage, "forward", micro) for micro, stage in clock(3, 3)),
        *((2 - stage, "backward", micro) for micro, stage in clock(3, 3)),
    ]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_compute_the_same_as_one() -> None:
    for devices in ([ONE, ONE, ONE], [ONE, TWO, TWO]):
        own = [stage.to(device) for stage, device in zip(stages(), devices, strict=True)]
        torch.manual_seed(1)
        inputs, targets = torch.randn(12, 3, device=ONE), torch.randn(12, 2, device=ONE)
        StreamEngine(own, devices, 2, Timeline(devices)).train(inputs, targets, lambda y, t: (y - t).square().sum())
        gradients = [p.grad.cpu() for stage in own for p in stage.parameters() if p.grad is not None]
        if devices[1] == ONE:
            wanted = gradients
    torch.testing.assert_close(gradients, wanted)
