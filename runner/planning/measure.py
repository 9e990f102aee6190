"""The predicted time of a step, from short measurements of its parts.

The parts are:

- the forward and backward pass of a micro-batch, including the messages between processes;
- only for a pipeline: the forward and backward pass of each block, for several numbers of samples;
- only for a pipeline: the forward and backward pass of an accumulation step, for several split sizes;
- the optimizer's update;
- the making of a batch.

The additional parts for a pipeline serve to predict the times of other schedules, and of split sizes that are not
measured.

All processes of the parallel mode measure at the same time, so that they share the caches, the memory and the links of
the machine as in training. Nothing is trained: the update is measured with gradients of zero, and the model is
discarded.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runner.batching import MicroBatch
from runner.config.errors import ConfigError
from runner.device import synchronize
from runner.optimizer import trainable
from runner.parallel.base import move
from runner.parallel.collectives import Collectives
from runner.parallel.pipeline import Pipeline
from runner.parallel.pipelining.micro_batches import divisors
from runner.parallel.pipelining.partition import blocks_of, first_inputs
from runner.result import Result
from runner.run import Run, build_run
from runner.session import Session
from runner.training import initial_state

_REPEATS = 3
_MICRO_BATCHES_PER_STAGE = (1, 2, 4, 8, 16)
"""The numbers of micro-batches per stage for which a pipeline and its blocks are measured.

The times for numbers in between are interpolated.
"""


class Parts:
    """Measured times of the parts of a step in seconds.

    All ranks begin a pass at the same time, and it ends with the slowest rank: in a pipeline, the last stage is the
    first to have no work left. The times of passes are therefore the maxima over all ranks, all others the means.

    Args:
        values: a dict with the following keys:

            - `last_pass`: the time of the forward and backward pass of the last micro-batch of a step, including the
              reduction of the gradients over processes, if the parallel mode has one;
            - `pass`: the time of the forward and backward pass of any other micro-batch; only with accumulation;
            - `update`: the time of an optimizer step, in which each process updates the parameters that it has;
            - `batch`: the time that the workload takes to make the data of one accumulation step;
            - `blocks`: only for a pipeline: a dict from each measured number of samples, as a string such as `"32"`, to
              the list of the times of the blocks;
            - `pipelines`: only for a pipeline: a dict from each measured split size, as a string, to the time of the
              forward and backward pass of an accumulation step with this split size and the schedule of the config. The
              split size of the config is among them; those that the schedule does not support are left out.
    """

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def blocks(self, size: int) -> list[float]:
        """Return the times of the blocks in seconds for micro-batches of `size` samples.

        Between measured sizes, the times are interpolated; for smaller and larger sizes, they are proportional to the
        size.
        """
        measured = {int(key): value for key, value in self.values["blocks"].items()}
        low, high, share = neighbors(sorted(measured), size)
        if low == high:
            return [each * size / low for each in measured[low]]
        return [a + share * (b - a) for a, b in zip(measured[low], measured[high], strict=True)]


def neighbors(sizes: Sequence[int], size: int) -> tuple[int, int, float]:
    """Return the two of `sizes` between which `size` lies, and the position of `size` between them.

    Args:
        sizes: the measured numbers of samples, in increasing order.
        size: the number of samples to predict a time for.

    Returns:
        A tuple (smaller, larger, position): the nearest smaller and the nearest larger size in `sizes`, and the
        position of `size` between them, from 0 (smaller) to 1 (larger). If `size` is one of `sizes` or lies outside of
        their range, the tuple is (nearest, nearest, 0), where `nearest` is the nearest size in `sizes`.
    """
    index = bisect_left(sizes, size)
    if index == len(sizes) or index == 0 or sizes[index] == size:
        nearest = sizes[min(index, len(sizes) - 1)]
        return nearest, nearest, 0.0
    low, high = sizes[index - 1], sizes[index]
    return low, high, (size - low) / (high - low)


def measure(run: Run) -> Parts:
    """Measure the parts of a step of `run` in the processes of its parallel mode.

    Raises:
        ConfigError: if the run is refused.
        RankError: if a process that was started for the measurement fails.
    """
    launcher = run.parallel.launcher(run.device)
    with tempfile.TemporaryDirectory(prefix="runner-plan-") as scratch, launcher.connect() as process:
        session = run.prepare(process)
        rank_main = partial(measure_rank, run.config, Path(scratch))
        launcher.launch(partial(rank_main, process), rank_main, session, Path(scratch))
        return Parts(json.loads(Path(scratch, "parts.json").read_text(encoding="utf-8")))


def measure_rank(config: dict[str, Any], directory: Path, process: Collectives) -> Result:
    """Measure the parts of a step in `process`; rank 0 writes them (see `Parts`) to `directory`/parts.json."""
    run = build_run(config)
    session = run.prepare(process)
    with run.settings(session.device):
        own: dict[str, Any] = {"blocks": _blocks(session)} if isinstance(run.parallel, Pipeline) else {}
        state = initial_state(run, session, directory)
        state.model.train()
        own |= _passes(run, session, state.model) | _update(session, state.model, state.optimizer)
    del state  # each of the following pipelines has a model of its own
    if isinstance(run.parallel, Pipeline):
        samples = _samples_per_micro_batch(session)
        others = [int(size) for size in own["blocks"] if int(size) != samples]
        own["pipelines"] = {str(samples): own["last_pass"]} | _pipelines(config, others, directory, process)
    gathered = session.collectives.all_gather(own)
    if session.rank == 0:
        (directory / "parts.json").write_text(json.dumps(over_ranks(gathered)), encoding="utf-8")
    return Result("done")


def over_ranks(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the values for `Parts`, given the times that each rank has measured."""
    passes = [{key: own[key] for key in ("pass", "last_pass", "pipelines") if key in own} for own in measured]
    return _combined(measured, statistics.fmean) | _combined(passes, max)


def _combined(values: Sequence[Any], function: Callable[[Any], float]) -> Any:
    """Return `function(values)`; for dicts or lists, a dict or list with the result for each item."""
    if isinstance(values[0], dict):
        return {key: _combined([each[key] for each in values], function) for key in values[0]}
    if isinstance(values[0], list):
        return [_combined(each, function) for each in zip(*values, strict=True)]
    return function(values)


def _passes(run: Run, session: Session, model: torch.nn.Module) -> dict[str, float]:
    """Measure the times `last_pass`, `pass` (only with accumulation) and `batch`, which `Parts` describes.

    Args:
        run: the run.
        session: its session in this process.
        model: the model that the parallel mode has placed.
    """
    parallel, plan = run.parallel, session.plan
    batches = session.batches(model, 0)
    batch, last = next(batches), plan.micro_batches(1)[-1]

    def forward_backward(micro: MicroBatch) -> None:
        parallel.accumulate(model, batch, micro, log_due=False)
        model.zero_grad()

    found = {}
    if plan.accumulation > 1:
        found["pass"] = _seconds(session, lambda: forward_backward(last._replace(is_last=False)))
    found["last_pass"] = _seconds(session, lambda: forward_backward(last))
    return found | {"batch": _seconds(session, lambda: next(batches))}


def _pipelines(config: dict[str, Any], sizes: Sequence[int], directory: Path, process: Collectives) -> dict[str, float]:
    """Measure the forward and backward pass of an accumulation step with the split sizes `sizes`.

    Returns:
        A dict from each split size, as a string, to the time in seconds. Split sizes that the schedule does not support
        are left out.
    """
    seconds = {}
    for size in sizes:
        options = config["parallel"] | {"split_size": size, "num_micro_batches": None}
        try:
            run = build_run(config | {"parallel": options})
            session = run.prepare(process)
        except ConfigError:
            continue
        with run.settings(session.device):
            model = initial_state(run, session, directory).model
            model.train()
            seconds[str(size)] = _passes(run, session, model)["last_pass"]
    return seconds


def _samples_per_micro_batch(session: Session) -> int:
    """Return the number of samples in a micro-batch of the pipeline."""
    return session.plan.chunk_size


def _blocks(session: Session) -> dict[str, list[float]]:
    """Return the times of the network's blocks for several numbers of samples, as in the key `blocks` of `Parts`."""
    plan = session.plan
    session.precision.prepare(session.device)
    model = session.precision.convert(session.workload.build_model())
    move(model, session.device, session.channels_last)
    model.train()
    samples, stages = plan.batch_size // plan.accumulation, max(2, session.world_size, len(session.devices))
    sizes = measured_sizes(samples, stages, _samples_per_micro_batch(session))
    inputs = first_inputs(model, session, sizes[0])
    times = {}
    for size in sizes:
        session.collectives.barrier()
        times[str(size)] = _block_seconds(session, model, inputs[:size])
    return times


def _block_seconds(session: Session, model: torch.nn.Module, inputs: torch.Tensor) -> list[float]:
    """Return the time of a forward and backward pass of each block in seconds.

    The blocks are measured one after another, as in training. If each were repeated by itself, its weights and
    gradients would stay in the caches of the processor, and small micro-batches would seem faster than they are.
    """
    repeats = [_block_seconds_once(session, model, inputs) for _ in range(1 + _REPEATS)]
    return [statistics.median(times) for times in zip(*repeats[1:], strict=True)]


def _block_seconds_once(session: Session, model: torch.nn.Module, inputs: torch.Tensor) -> list[float]:
    dtype = next(model.parameters()).dtype
    x, outputs, seconds = inputs.to(dtype) if inputs.is_floating_point() else inputs, [], []

    def now() -> float:
        synchronize(*session.devices)
        return time.perf_counter()

    for _, block in blocks_of(model):
        start = now()
        with session.precision.autocast():
            outputs.append(block(x))
        seconds.append(now() - start)
        x = outputs[-1].detach().requires_grad_()
    for index in reversed(range(len(outputs))):
        output = outputs.pop()
        gradient = torch.ones_like(output)
        start = now()
        if output.requires_grad:  # not that of a first block whose parameters are frozen
            output.backward(gradient)
        seconds[index] += now() - start
    return seconds


def measured_sizes(samples: int, stages: int, own: int) -> list[int]:
    """Return the numbers of samples per micro-batch for which the blocks of a pipeline are measured, largest first.

    Args:
        samples: number of samples in one pass through the pipeline.
        stages: number of stages.
        own: number of samples per micro-batch with the config of the run; the returned list includes this number.
    """
    possible = divisors(samples)
    wanted = [samples / (stages * count) for count in _MICRO_BATCHES_PER_STAGE]
    return sorted({own, *(min(possible, key=lambda size: abs(size - each)) for each in wanted)}, reverse=True)


def _update(session: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Measure a step of `optimizer`, which updates the parameters of `model`."""
    for parameter in trainable(model):
        parameter.grad = torch.zeros_like(parameter)
    return {"update": _seconds(session, lambda: optimizer.step())}


def _seconds(session: Session, work: Callable[[], Any]) -> float:
    """Return the median time of `work` after a warm-up; all ranks begin together."""
    times = []
    for _ in range(1 + _REPEATS):
        synchronize(*session.devices)
        session.collectives.barrier()
        since = time.perf_counter()
        work()
        synchronize(*session.devices)
        times.append(time.perf_counter() - since)
    return statistics.median(times[1:])


def step_seconds(session: Session, parts: Parts) -> float:
    """Return the predicted time of an iteration of the training loop in seconds."""
    values, accumulation = parts.values, session.plan.accumulation
    passes = values["last_pass"] + (accumulation - 1) * values.get("pass", 0.0)
    return passes + accumulation * values["batch"] + values["update"]
