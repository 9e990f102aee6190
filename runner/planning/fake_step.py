"""A run that is only planned: its session, and the memory, operations and messages of a step with fake tensors.

No process is started.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from runner.batching import Accumulation, MicroBatch, Plan
from runner.config.errors import check
from runner.data.base import Samples
from runner.data.fetch import zeros_like_batch
from runner.failures import torch_refusals
from runner.models.blocks import blocks_of
from runner.models.layers import normalizes_batches
from runner.parallel.base import Parallel
from runner.parallel.collectives import Collectives
from runner.parallel.hogwild import Hogwild
from runner.parallel.launch.processes import LocalProcesses
from runner.parallel.pipeline import Pipeline
from runner.parallel.pipelining.partition import Partition, balanced, first_inputs
from runner.parallel.session import Session
from runner.planning.step_tracker import OWN_FLOPS, Costs, StepTracker
from runner.run import Run
from runner.state import State
from runner.system.fake_tensors import fake_process_group, fake_tensors
from runner.system.trees import call, map_tensors, tensors_of
from runner.tracking.log_file import quiet
from runner.training import prepare, train_step
from runner.workloads.base import Workload

_TRACED = 3
"""The maximum number of micro-batches per step that are traced: the first, the last, and one between them."""


class RankPlan(NamedTuple):
    """The memory, the operations and the messages of a training step of one rank.

    Args:
        peak, kept: bytes of tensors by kind, at the moment of the step when their total is largest, and between steps.
        placed: the largest memory of tensors in bytes before the first step, while the model is created and placed.
        saved: the bytes that each tensor of the model, by name, and its optimizer state add to a checkpoint.
        blocks: names of the blocks of the network that are on this rank.
        normalizes: whether the network has batch normalization.
    """

    rank: int
    peak: dict[str, int]
    kept: dict[str, int]
    placed: int
    costs: Costs
    saved: dict[str, int]
    blocks: list[str]
    normalizes: bool

    @property
    def peak_bytes(self) -> int:
        """The largest memory of tensors in bytes."""
        return max(self.placed, sum(self.peak.values()))


def prepared(run: Run, num_devices: int | None = None) -> Session:
    """Return the session of `first_process`, after all checks; a ConfigError if the run is refused."""
    return run.prepare(first_process(run, num_devices))


def first_process(run: Run, num_devices: int | None = None) -> Collectives:
    """Return rank 0 as the launcher of the run would give it; no process is started.

    `num_devices` is the number of devices to plan for, each represented by the CPU; None for those of this machine.
    """
    parallel = run.parallel
    if num_devices is None:
        launcher = parallel.launcher(run.device)
        devices, in_processes = launcher.devices, isinstance(launcher, LocalProcesses)
    else:
        if type(parallel) is Parallel:
            num_devices = 1  # the others are not used
        processes, in_processes = getattr(parallel, "processes", None), getattr(parallel, "in_processes", False)
        asked = processes if in_processes and isinstance(processes, int) else num_devices
        why = f"there are {num_devices} devices, and each process needs its own"
        check(asked <= num_devices, "parallel.processes", asked, why, f"--devices {asked}, or fewer processes")
        devices = [torch.device("cpu")] * asked
    world_size = len(devices) if in_processes else 1
    return Collectives(devices[:1] if in_processes else devices, 0, world_size)


def plan_of(run: Run, session: Session, rank: int) -> Plan:
    """Return the share of the work that `rank` of the run does, given the session of any rank."""
    return run.session(Collectives(session.devices, rank, session.world_size)).plan


def trace_ranks(run: Run, session: Session) -> list[RankPlan]:
    """Return the memory, operations and messages of a step of each rank.

    If every rank has different samples or a different seed, all do the same work, and only rank 0 is traced. As tracing
    hundreds of micro-batches would take minutes, a step of three is traced instead: the memory is assumed to be the
    same, and each further micro-batch to have the costs of the second.

    Raises:
        ConfigError: if the step fails because torch cannot train with this config.
    """
    run, plan = with_cuts(run, session), session.plan  # the same stages for all ranks
    if (further := max(0, plan.accumulation - _TRACED)) > 0:
        size = plan.batch_size // plan.accumulation * _TRACED
        run = dataclasses.replace(run, batch_size=size, accumulation=Accumulation(_TRACED))
        session = dataclasses.replace(session, plan=run.session(session.collectives).plan)
    world_size = session.world_size
    plans = [plan_of(run, session, rank) for rank in range(world_size)]
    if len({(plan.data_shard, plan.step_shard, plan.seed) for plan in plans}) == world_size:
        first = trace_rank(run, session, 0, further)
        return [first._replace(rank=rank) for rank in range(world_size)]
    return [trace_rank(run, session, rank, further) for rank in range(world_size)]


def block_flops(run: Run, session: Session) -> dict[str, int]:
    """Return the floating-point operations of a forward and a backward pass of each block for a chunk of samples."""
    found: dict[str, int] = {}
    with quiet(), fake_tensors() as fake_mode, torch.random.fork_rng(devices=[]):
        workload = _planned(run.workload, StepTracker(fake_mode))
        session = dataclasses.replace(session, collectives=Collectives([torch.device("cpu")]), workload=workload)
        run.precision.prepare(session.device)
        model = run.precision.convert(workload.build_model())
        dtype = next(model.parameters()).dtype
        x = first_inputs(model, session, session.plan.chunk_size)
        x = map_tensors(lambda each: each.to(dtype) if each.is_floating_point() else each, x)
        for name, block in blocks_of(model):
            with FlopCounterMode(display=False, custom_mapping=OWN_FLOPS) as counter:
                with run.precision.autocast():
                    x = call(block, x.detach().requires_grad_() if found else x)
                if x.requires_grad:
                    x.backward(torch.ones_like(x))
            found[name] = counter.get_total_flops()
    return found


def with_cuts(run: Run, session: Session) -> Run:
    """Return the run, with stages of about the same number of operations in place of `parallel.cuts=auto`.

    A run measures the time of its blocks, which fake tensors do not take.
    """
    parallel = run.parallel
    count = parallel.num_stages(session) if isinstance(parallel, Pipeline) else len(session.devices)
    if not isinstance(parallel, Partition) or parallel.cuts != "auto" or count < 2:
        return run
    flops = block_flops(run, session)
    names = list(flops)
    cuts = [names[index] for index in balanced(list(flops.values()), count)]
    return dataclasses.replace(run, parallel=dataclasses.replace(parallel, cuts=cuts, stages=None))


def trace_rank(run: Run, session: Session, rank: int, further: int = 0) -> RankPlan:
    """Execute a step of `rank` with fake tensors, and return the memory, operations and messages of the step.

    The tensors are on the CPU; on other devices, they have the same sizes. The model is not compiled; a compiled model
    keeps fewer activations. `run` names the blocks at which stages begin (see `with_cuts`); `session` is that of any
    process; `further` is as in `StepTracker`.

    Raises:
        ConfigError: if the step fails because torch cannot train with this config.
    """
    if isinstance(run.parallel, Hogwild):  # each worker trains by itself, as a single device does
        run = dataclasses.replace(run, parallel=Parallel())
    if getattr(run.parallel, "find_unused", False):  # which parameters were used is a value
        run = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, find_unused=False))
    world_size, devices = session.world_size, [torch.device("cpu")] * len(session.devices)
    process = FakeCollectives(devices, rank, world_size) if world_size > 1 else Collectives(devices)
    group = fake_process_group(rank, world_size) if world_size > 1 else nullcontext()
    with tempfile.TemporaryDirectory(prefix="runner-plan-") as scratch, quiet(), group, fake_tensors() as fake_mode:
        tracker = StepTracker(fake_mode, further)
        run = dataclasses.replace(run, workload=_planned(run.workload, tracker))
        part = dataclasses.replace(run.session(process), compile=False, num_steps=session.num_steps)
        with torch_refusals(run), tracker, torch.random.fork_rng(devices=[]):
            state = prepare(run, part, Path(scratch))
            _classify(tracker, state)
            state.optimizer.register_step_pre_hook(lambda *_: _classify(tracker, state))
            for parameter in state.model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda p: tracker.set_kind("gradients", (p.grad,)))
            batches = tracker.counting(part.batches(state.model, 0))
            state.model.train()
            placed = sum(tracker.peak.values())
            # Create the optimizer state and the averaged weights, as the first update does, without a forward pass.
            for parameter in state.model.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            run.precision.step(state.optimizer, None, update=lambda: run.parallel.update(state.optimizer))
            state.average.update()
            _classify(tracker, state)
            for step in part.plan.steps(0, 2 * part.plan.steps_per_round):
                tracker.begin()
                train_step(state, batches, step, log_due=False)
                _classify(tracker, state)
                if not tracker.current["gradients"]:
                    break
                # DDP keeps the memory of the gradients, but only the next step can tell it from other memory.
            return RankPlan(
                part.rank,
                tracker.peak,
                dict(tracker.current),
                placed,
                tracker.costs,
                _saved(state),
                run.parallel.blocks(state.model),
                normalizes_batches(state.model),
            )


def _planned(workload: Workload, tracker: StepTracker) -> Workload:
    """Return a copy of `workload` whose batches have no values, and are counted as `data` with its samples."""
    copied = copy.copy(workload)
    for name, value in vars(copied).items():
        if isinstance(value, Samples):
            setattr(copied, name, _planned_samples(value))
            tracker.current["data"] += sum(each.nbytes for each in tensors_of(vars(value)) if not each.is_meta)

    real_batches = copied.batches

    def batches(model: torch.nn.Module, plan: Plan, after_step: int, device: torch.device) -> Iterator[Any]:
        stream = copied.fake_batches(model, plan, device) or real_batches(model, plan, after_step, device)
        while True:
            tracker.allocates_data = True
            batch = next(stream)
            tracker.allocates_data = False
            yield batch

    copied.batches = batches
    return copied


def _planned_samples(samples: Samples) -> Samples:
    """Return a copy of `samples` whose batches are not read, but made like its example, if it has one."""
    copied = copy.copy(samples)
    if copied.example is None:
        # A few of many micro-batches are planned: what some hold of the next, 256 KiB at most, would be another amount.
        copied.numbers_at_once = 0  # pyright: ignore[reportAttributeAccessIssue]
        return copied

    def batches(micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Any]:
        for micro in micros:
            batch = zeros_like_batch(copied.example, micro.stop - micro.start)
            yield map_tensors(lambda each: each.to(device), batch)

    copied.batches = batches
    return copied


def _saved(state: State) -> dict[str, int]:
    of_parameter = state.optimizer.state
    models = 2 if state.average.tensors() else 1
    return {
        name: sum(
            each.numel() * each.element_size() for each in (*[tensor] * models, *of_parameter.get(tensor, {}).values())
        )
        for name, tensor in state.model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
    }


def _classify(tracker: StepTracker, state: State) -> None:
    tracker.set_kind("parameters", [*state.model.parameters(), *state.model.buffers()])
    tracker.set_kind("gradients", [parameter.grad for parameter in state.model.parameters()])
    values = [value for of_parameter in state.optimizer.state.values() for value in of_parameter.values()]
    tracker.set_kind("optimizer state", [*values, *state.average.tensors()])


class FakeCollectives(Collectives):
    """The collectives of one rank without its peers: `all_gather` assumes that every rank passes the same value."""

    def all_gather(self, value: Any) -> list[Any]:
        return [value] * self.world_size
