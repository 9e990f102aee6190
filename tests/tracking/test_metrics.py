"""Tests of `runner.tracking.metrics`: the metric sums between two logs, and step times with a fake clock."""

import weakref
from typing import Any

import pytest
import torch
from helpers.clock import FakeClock
from helpers.events import scalar_curves

import runner.state
import runner.system.section_timer
import runner.tracking.metrics
from runner.system.section_timer import SectionTimer
from runner.tracking.metrics import DivergedError, MetricBuffer, StepTimer, batch_sums, quantiles
from runner.workloads.base import Workload


def with_counts(sums: list[Any], count: int) -> torch.Tensor:
    table = torch.tensor(sums, dtype=torch.float64)
    return torch.stack((table, torch.full_like(table, count)), 1)


def test_a_buffer_adds_the_micro_batches_of_each_step_to_those_of_the_checkpoint():
    buffer, doubled = MetricBuffer(("loss", "accuracy")), lambda sums: {"train": 2 * sums["train"]}
    buffer.load(with_counts([[1.0, 2.0], [3.0, 4.0]], 4), 8)
    for step, parts in ((9, [(1.0, 2.0), (3.0, 4.0)]), (10, [(0.0, 0.0)]), (11, [(5.0, 6.0), None])):
        for sums in parts:
            buffer.add(None if sums is None else with_counts([sums], 4)[0])
        buffer.end_step(step)
        found = buffer.peek(doubled)
    assert found[:, 0].tolist() == [[2, 4], [6, 8], [8, 12], [0, 0], [10, 12]]
    assert found[:, 1, 0].tolist() == [8, 8, 16, 8, 8]
    assert buffer.flush(doubled) == {"loss": 26 / 48, "accuracy": 36 / 48}
    assert buffer.peek(doubled).shape == (0, 2, 2)


def test_a_buffer_has_the_sums_of_every_step_and_does_not_keep_a_tensor_for_each():
    wanted, buffer = with_counts(torch.rand(1000, 2).tolist(), 3), MetricBuffer(("loss", "accuracy"))
    rows = [row.clone() for row in wanted]
    alive = [weakref.ref(row) for row in rows]
    for number in range(1, 1001):
        buffer.add(rows.pop(0))
        buffer.end_step(number)
    assert sum(reference() is not None for reference in alive) < 300
    assert torch.equal(buffer.peek(lambda sums: sums), wanted)
    assert [*buffer.flush(lambda sums: sums).values()] == pytest.approx((wanted[:, 0].mean(0) / 3).tolist())


def test_means_are_sums_over_counts_of_all_steps_and_a_loss_without_a_count_ends_the_run():
    buffer = MetricBuffer(("loss", "kl"))
    for step, (loss, count) in enumerate([(6.0, 2), (1.0, 5)], start=1):
        buffer.add(torch.tensor([[loss, 3.0], [count, 10]], dtype=torch.float64))
        buffer.end_step(step)
    assert buffer.flush(lambda sums: sums) == {"loss": 1, "kl": pytest.approx(0.3)}
    for step, count in ((3, 1.0), (4, 0.0)):
        buffer.add(torch.tensor([[1.0, 1.0], [count, 1]], dtype=torch.float64))
        buffer.end_step(step)
    with pytest.raises(DivergedError, match="the loss has the count 0, and no mean at step 4"):
        buffer.peek(lambda sums: sums)


def test_sums_of_a_micro_batch_are_the_loss_times_the_samples_and_the_sums_of_the_metrics():
    loss = torch.rand(())
    for metrics in (torch.rand(13, 0), torch.rand(13, 1) > 0.5, torch.rand(13, 3)):
        wanted = [13 * loss.item(), *(sum(column) for column in metrics.double().T.tolist())]
        assert batch_sums(loss, metrics).tolist() == [pytest.approx(wanted), [13] * len(wanted)]
    metrics = torch.tensor([[1.0], [2.0**-30], [2.0**-30]]).repeat(1 << 8, 1)
    sums = batch_sums(torch.tensor(1.0), metrics, torch.tensor(5))
    assert sums.dtype == torch.float64
    assert sums.tolist() == [[768, 256 + 2.0**-21], [5, 768]]


@pytest.mark.parametrize(
    ("bad", "at", "metric", "name"),
    [(float("nan"), 0, 0, "the loss"), (float("inf"), 2, 1, "train/accuracy"), (float("-inf"), 4, 0, "the loss")],
)
def test_the_first_step_whose_sums_are_not_finite_is_named(bad, at, metric, name):
    """Even if the buffer was flushed, and then loaded with rows of a mode whose rounds have another number of steps."""
    buffer = MetricBuffer(("loss", "accuracy"))
    buffer.add(torch.ones(2, 2))
    buffer.end_step(1)
    buffer.flush(lambda sums: sums)
    buffer.load(torch.ones(3, 2, 2), 7)
    steps = range(8, 21, 3)
    for i, step in enumerate(steps):
        sums = torch.ones(2, 2)
        sums[0, metric] = bad if i >= at else 1.0
        buffer.add(sums)
        buffer.end_step(step)
    with pytest.raises(DivergedError) as caught:
        buffer.flush(lambda sums: sums)
    assert (caught.value.step, caught.value.what) == (steps[at], name)


@pytest.fixture
def clock(monkeypatch) -> FakeClock:
    """A fake clock for the step timer and a new section timer."""
    clock = FakeClock()
    monkeypatch.setattr(runner.system.section_timer, "time", clock)
    monkeypatch.setattr(runner.tracking.metrics, "time", clock)
    monkeypatch.setattr(runner.tracking.metrics, "timer", SectionTimer())
    return clock


def test_pauses_are_left_out_of_step_times(clock):
    def spend(name: str, seconds: float) -> None:
        with runner.tracking.metrics.timer.section(name):
            clock.now += seconds

    spend("data", 50)  # before the first step: not counted
    spend("log", 50)
    steps = StepTimer([torch.device("cpu")])
    clock.now += 7
    steps.start(num_rounds=3)
    spend("data", 1)
    clock.now += 2
    steps.lap(pausing=False)
    spend("data", 0.5)
    clock.now += 0.5
    steps.lap(pausing=True)
    assert steps.rates(8, 2**40) == {
        "time/samples_per_second": 16 / 4,
        "time/step_seconds": 2,
        "time/data_share": 1.5 / 4,
        "time/tflops": 16 / 4 * 2**40 / 1e12,
    }
    for name in ("log", "evaluate", "checkpoint"):
        spend(name, 1000)
    clock.now += 5
    steps.lap(pausing=True)
    assert steps.rates(8)["time/samples_per_second"] == 8 / 5
    assert steps.steady() == [1, 5]
    assert steps.elapsed() == 3009


class FakeAccelerator:
    """A device that computes what the host has queued; the host waits for it only in `synchronize`."""

    def __init__(self, clock: FakeClock):
        self.clock, self.done_at, self.num_waits = clock, 0.0, 0

    def queue(self, seconds: float) -> None:
        self.done_at = max(self.done_at, self.clock.now) + seconds

    def synchronize(self, *_: torch.device) -> None:
        self.num_waits += 1
        self.clock.now = max(self.clock.now, self.done_at)


def test_a_run_reports_the_step_times_of_the_device(trained, clock, monkeypatch):
    device, done = FakeAccelerator(clock), []

    def after_step(*_: Any) -> None:
        clock.now += 0.001
        device.queue(0.008)
        done.append(device.num_waits)

    monkeypatch.setattr(runner.tracking.metrics, "synchronize", device.synchronize)
    monkeypatch.setattr(runner.state, "StepTimer", lambda _: StepTimer([torch.device("meta")]))
    monkeypatch.setattr(Workload, "after_step", after_step)
    run = trained("steps=40", "log_every=16", "eval_every=20", "save_every=28")
    assert run.result.step_seconds["median"] == pytest.approx(0.008 + 0.001 / 16, rel=0.02)
    assert run.result.samples_per_second == pytest.approx(64 / run.result.step_seconds["median"])
    read = scalar_curves(run.directory)["time/step_seconds"]
    # Windows end after steps 8 (the warm-up), 16, 20 (an evaluation), 28 (a checkpoint), 32 and 40; each begins with an
    # idle device.
    assert read == [
        (16, pytest.approx(0.008 + 0.001 / 8)),
        *((step, pytest.approx(0.008, rel=0.1)) for step in (32, 40)),
    ]
    assert [done.index(count) for count in sorted(set(done))] == [0, 8, 16, 20, 28, 32], "no other step waits"


@pytest.mark.parametrize(("count", "left_out"), [(0, 0), (1, 0), (2, 1), (4, 1), (10, 2), (50, 10), (1000, 10)])
def test_the_warm_up_is_left_out_of_steady_step_times(clock, count, left_out):
    steps = StepTimer([torch.device("cpu")])
    steps.start(num_rounds=count)
    for step in range(count):
        clock.now += step
        steps.lap(pausing=False)
    assert steps.steady() == list(map(float, range(left_out, count)))


def test_quantiles():
    assert quantiles([]) == {}
    assert quantiles([3.0]) == {"median": 3, "p90": 3}
    assert quantiles([float(n) for n in range(10, 0, -1)]) == {"median": 5.5, "p90": 9}
    assert quantiles([float(n) for n in range(1, 101)]) == {"median": 50.5, "p90": 90}
