"""Tests of the pipeline in one process: the order of computations, and the operations queued on each stream."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from runner.parallel.pipelining.stages import StageModule
from runner.parallel.pipelining.streams import StreamEngine, clock
from runner.parallel.pipelining.timeline import Timeline
from runner.system.copy_stream import NoCopy, PeerCopyStream, copy_stream

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
    return [StageModule([block], None, None, nullcontext) for block in blocks]


def test_gradients_equal_those_of_the_whole_batch() -> None:
    own, inputs, targets = stages(), torch.randn(12, 3), torch.randn(12, 2)
    timeline = Timeline([CPU])
    timeline.begin(lambda: None)
    StreamEngine(own, [CPU] * 3, 4, timeline).train(inputs, targets, lambda y, t: (y - t).square().sum())
    got = [parameter.grad for stage in own for parameter in stage.parameters()]
    same = stages()
    y = inputs
    for stage in same:
        y = stage(y)
    wanted = torch.autograd.grad((y - targets).square().sum(), [p for stage in same for p in stage.parameters()])
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert [span[:3] for span in timeline.take()] == [
        *((stage, "forward", micro) for micro, stage in clock(3, 3)),
        *((2 - stage, "backward", micro) for micro, stage in clock(3, 3)),
    ]


@pytest.mark.parametrize("count", [1, 4, 11])
def test_inference_keeps_the_order_with_a_short_last_micro_batch(count: int) -> None:
    own, inputs = stages(), torch.randn(count, 3)
    wanted = inputs
    for stage in own:
        wanted = stage(wanted)
    torch.testing.assert_close(StreamEngine(own, [CPU] * 3, 4, Timeline([CPU])).infer(inputs), wanted)


def test_on_one_device_nothing_is_copied() -> None:
    stream = copy_stream(CPU, CPU, None)
    tensor = torch.zeros(2)
    assert type(stream) is NoCopy
    assert stream.receive(stream.send((tensor,)))[0] is tensor


# ---------------------------------------------------------------------------------------------------------------------
# Copies between devices, with a recorder in place of `torch.cuda`


class Recorder:
    """A fake of `torch.cuda` that records the calls of streams, events and tensors."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.current = {ONE: Stream(self, ONE, "compute 0"), TWO: Stream(self, TWO, "compute 1")}

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, device, f"copy {device.index}")

    def current_stream(self, device: torch.device) -> Stream:
        return self.current[device]

    @contextmanager
    def stream(self, stream: Stream):
        before, self.current[stream.device] = self.current[stream.device], stream
        yield
        self.current[stream.device] = before


class Stream:
    def __init__(self, recorder: Recorder, device: torch.device, name: str):
        self.recorder, self.device, self.name = recorder, device, name

    def record_event(self) -> str:
        self.recorder.calls.append(("record", self.name))
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.recorder.calls.append(("wait", self.name, event))


class Tensor:
    def __init__(self, recorder: Recorder, name: str):
        self.recorder, self.name = recorder, name

    def to(self, device: torch.device, non_blocking: bool) -> Tensor:
        assert non_blocking
        streams = tuple(self.recorder.current[each].name for each in (ONE, TWO))
        self.recorder.calls.append(("copy", self.name, device.index, *streams))
        return Tensor(self.recorder, "copy")

    def record_stream(self, stream: Stream) -> None:
        self.recorder.calls.append(("record_stream", self.name, stream.name))


def test_only_the_copy_waits_for_the_source_and_only_the_reader_for_the_copy() -> None:
    cuda = Recorder()
    between: Any = copy_stream(ONE, TWO, cuda)
    assert type(between) is PeerCopyStream
    transfer = between.send((Tensor(cuda, "activations"),))
    assert cuda.calls == [
        ("record", "compute 0"),
        ("wait", "copy 0", "event of compute 0"),
        ("copy", "activations", 1, "copy 0", "copy 1"),
        ("record", "copy 1"),
        ("record_stream", "activations", "copy 0"),
    ], "what is queued on the computing streams after this overlaps with the copy"

    cuda.calls.clear()
    assert between.receive(transfer)[0].name == "copy"
    assert cuda.calls == [("wait", "compute 1", "event of copy 1"), ("record_stream", "copy", "compute 1")]


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
