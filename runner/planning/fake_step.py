"""A training step of one rank, executed with fake tensors: its memory by kind, its operations and its messages."""

from __future__ import annotations

import copy
import dataclasses
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from models.blocks import blocks_of
from runner.batching import Accumulation, MicroBatch, Plan
from runner.data.base import Samples
from runner.parallel.base import Parallel
from runner.parallel.collectives import Collectives
from runner.parallel.hogwild import Hogwild
from runner.parallel.pipelining.partition import first_inputs, profile_blocks
from runner.planning.costs import Costs
from runner.planning.memory_tracker import MemoryTracker
from runner.planning.planned_session import plan_of
from runner.run import Run
from runner.session import Session
from runner.state import State
from runner.system.fake_tensors import fake_process_group, fake_tensors
from runner.tracking.metrics import BatchSums
from runner.training import prepare, refused_by_torch, train_step
from runner.workloads.base import Workload

T = TypeVar("T")

_TRACED = 3
"""The maximum number of micro-batches per step that are traced."""


class RankPlan(NamedTuple):
    """The memory, the operations and the messages of a training step of one rank.

    Args:
        rank: the rank.
        peak: memory of tensors in bytes, by kind, at the moment of the step when the total of all kinds is largest.
        kept: memory of tensors in bytes, by kind, between two steps.
        placed: the largest memory of tensors in bytes before the first step, while the model is created and placed.
        costs: operations and messages of the step.
        saved: a dict from the name of each tensor of the model to the bytes that the tensor and its optimizer state add
            to a checkpoint.
        blocks: names of the blocks of the network that are on this rank; empty if the network has no blocks.
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


def trace(run: Run, session: Session) -> list[RankPlan]:
    """Return the memory, operations and messages of a step of each rank.

    If every rank has different samples or a different seed, only rank 0 is traced, and the result for each rank is that
    of rank 0.

    If a step has more than three micro-batches, two shorter steps are traced instead, because tracing hundreds of
    micro-batches would take minutes. One of these steps has two micro-batches, and the other has three. The
    micro-batches are as large as in the run. The returned memory is that of the step with three micro-batches. Each
    further micro-batch is assumed to add the same costs as the third micro-batch.

    Raises:
        ConfigError: if the step fails because torch cannot train with this config.
    """
    count = session.plan.accumulation
    if count <= _TRACED:
        return _trace_ranks(run, session)
    more, less = (_trace_ranks(*_with_micro_batches(run, session, each)) for each in (_TRACED, _TRACED - 1))
    return [
        longer._replace(costs=longer.costs.repeated(shorter.costs, count - _TRACED))
        for longer, shorter in zip(more, less, strict=True)
    ]


def _with_micro_batches(run: Run, session: Session, count: int) -> tuple[Run, Session]:
    """Return `run` and `session` with `count` micro-batches per step, each as large as before."""
    plan = session.plan
    size = plan.batch_size // plan.accumulation * count
    run = dataclasses.replace(run, batch_size=size, accumulation=Accumulation(count))
    return run, dataclasses.replace(session, plan=run.session(session.collectives).plan)


def _trace_ranks(run: Run, session: Session) -> list[RankPlan]:
    world_size = session.world_size
    plans = [plan_of(run, session, rank) for rank in range(world_size)]
    if len({(plan.data_shard, plan.step_shard, plan.seed) for plan in plans}) == world_size:
        first = trace_rank(run, session, 0, world_size)
        return [first._replace(rank=rank) for rank in range(world_size)]
    sent: list[Any] = []
    return [trace_rank(run, session, rank, world_size, sent) for rank in range(world_size)]


def trace_blocks(run: Run, session: Session, size: int) -> list[float]:
    """Return the floating-point operations of a forward and a backward pass of each block, in billions.

    Args:
        run: the run, whose network has blocks.
        session: its session in any process.
        size: number of samples in the pass.
    """
    process = Collectives([torch.device("cpu")])
    with _quiet(), fake_tensors() as fake_mode, torch.random.fork_rng(devices=[]):
        tracker = MemoryTracker(fake_mode, CpuWorkspace(1))
        workload = _planned(run.workload, tracker)
        session = dataclasses.replace(session, collectives=process, workload=workload, time_block=tracker.time_block)
        run.precision.prepare(session.device)
        model = run.precision.convert(workload.build_model())
        with tracker:
            profiles = profile_blocks(model, first_inputs(model, session, size), session, timed=True)
        return [profile.seconds for profile in profiles]


def trace_rank(run: Run, session: Session, rank: int, world_size: int, sent: list[Any] | None = None) -> RankPlan:
    """Execute a step of `rank` with fake tensors, and return the memory, operations and messages of the step.

    The optimizer state is created before the step. The tensors are on the CPU; on other devices, they have the same
    sizes. The model is not compiled; a compiled model keeps fewer activations.

    Args:
        run: the run.
        session: its session in any process.
        rank: the rank.
        world_size: number of processes of the run.
        sent: list of the values that rank 0 sends to the other ranks. The call for rank 0 appends them, and the calls
            for the other ranks read them. None for an empty list.

    Raises:
        ConfigError: if the step fails because torch cannot train with this config.
    """
    if isinstance(run.parallel, Hogwild):  # each worker trains by itself, as a single device does
        run = dataclasses.replace(run, parallel=Parallel())
    devices = [torch.device("cpu")] * len(session.devices)
    process = Collectives(devices)
    if world_size > 1:
        process = FakeCollectives(devices, rank, world_size, [] if sent is None else sent)
    group = fake_process_group(rank, world_size) if world_size > 1 else nullcontext()
    with tempfile.TemporaryDirectory(prefix="runner-plan-") as scratch, _quiet(), group, fake_tensors() as fake_mode:
        threads = run.device.threads or max(1, torch.get_num_threads() // world_size)
        tracker = MemoryTracker(fake_mode, CpuWorkspace(threads))
        parallel, workload = _counted(run.parallel, tracker), _planned(run.workload, tracker)
        run = dataclasses.replace(run, parallel=parallel, workload=workload)
        part = run.session(process)
        part = dataclasses.replace(part, compile=False, time_block=tracker.time_block, num_steps=session.num_steps)
        try:
            return _trace(run, part, Path(scratch), tracker)
        except Exception as error:
            if (refusal := refused_by_torch(run, error)) is not None:
                raise refusal from error
            raise


def _counted(parallel: Parallel, tracker: MemoryTracker) -> Parallel:
    """Return a copy of `parallel` whose forward passes are tracked.

    The memory that they allocate is counted by `tracker` as `activations`.
    """
    copied = copy.copy(parallel)
    own = copied.accumulate

    def accumulate(model: torch.nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> BatchSums:
        with tracker.allocating("activations"):
            return own(model, batch, micro, log_due)

    copied.accumulate = accumulate
    return copied


def _planned(workload: Workload, tracker: MemoryTracker) -> Workload:
    """Return a copy of `workload` whose batches have no values; the original and its data do not change.

    Under the kind `data`, `tracker` counts the memory of the batches and the memory of the tensors that hold the
    samples of `workload`.
    """
    copied = copy.copy(workload)
    for name, value in vars(copied).items():
        if isinstance(value, Samples):
            setattr(copied, name, _planned_samples(value))
            tensors = [each for each in vars(value).values() if isinstance(each, torch.Tensor) and not each.is_meta]
            tracker.current["data"] += sum(each.nbytes for each in tensors)

    own = copied.batches

    def batches(model: torch.nn.Module, plan: Plan, after_step: int, device: torch.device) -> Iterator[Any]:
        stream = copied.fake_batches(model, plan, device) or own(model, plan, after_step, device)
        while True:
            with tracker.allocating("data"):
                batch = next(stream)
            yield batch

    copied.batches = batches
    return copied


def _planned_samples(samples: Samples) -> Samples:
    """Return a copy of `samples` whose batches have no values; `samples` itself does not change."""
    copied = copy.copy(samples)
    batches = copied.batches
    copied.batches = lambda micros, seed, device: copied.fake_batches(micros, device) or batches(micros, seed, device)
    return copied


def _trace(run: Run, session: Session, directory: Path, tracker: MemoryTracker) -> RankPlan:
    with tracker, torch.random.fork_rng(devices=[]):
        state = prepare(run, session, directory)
        _classify(tracker, state)
        state.optimizer.register_step_pre_hook(lambda *_: _classify(tracker, state))
        for parameter in state.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: tracker.set_kind("gradients", (p.grad,)))
        batches = session.batches(state.model, 0)
        state.model.train()
        placed = sum(tracker.peak.values())
        _create_optimizer_state(state)
        _classify(tracker, state)
        for step in session.plan.steps(0, 2 * session.plan.steps_per_round):
            tracker.begin()
            train_step(state, batches, step, log_due=False)
            _classify(tracker, state)
            if not tracker.current["gradients"]:
                break
            # DDP keeps the memory of the gradients, but only the next step can tell it from other memory.
        return RankPlan(
            session.rank,
            tracker.peak,
            dict(tracker.current),
            placed,
            tracker.costs,
            _saved(state),
            _blocks(state.model),
            any(isinstance(module, _BatchNorm) for module in state.model.modules()),
        )


def _create_optimizer_state(state: State) -> None:
    """Create the optimizer state and the averaged weights, as the first update does, without a forward pass."""
    for parameter in state.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    state.run.precision.step(state.optimizer, None)
    state.average.update()


def _saved(state: State) -> dict[str, int]:
    """Return a dict from the name of each tensor of the model to the bytes that this tensor adds to a checkpoint.

    The bytes include the optimizer state of the tensor. If the run averages its weights, the bytes also include the
    averaged copy of the tensor.
    """
    of_parameter = state.optimizer.state
    models = 2 if state.average.tensors() else 1
    return {
        name: sum(
            each.numel() * each.element_size() for each in (*[tensor] * models, *of_parameter.get(tensor, {}).values())
        )
        for name, tensor in state.model.state_dict(keep_vars=True).items()
    }


def _blocks(model: torch.nn.Module) -> list[str]:
    """Return the names of the blocks of `model` that have parameters on this rank; empty if it lists no blocks."""
    return [name for name, block in blocks_of(model) if any(True for _ in block.parameters())]


def _classify(tracker: MemoryTracker, state: State) -> None:
    """Tell `tracker` the kind of each tensor in `state`: `parameters`, `gradients` or `optimizer state`.

    Buffers count as `parameters`, and averaged weights count as `optimizer state`.
    """
    tracker.set_kind("parameters", [*state.model.parameters(), *state.model.buffers()])
    tracker.set_kind("gradients", [parameter.grad for parameter in state.model.parameters()])
    values = [value for of_parameter in state.optimizer.state.values() for value in of_parameter.values()]
    tracker.set_kind("optimizer state", [*values, *state.average.tensors()])


class CpuWorkspace:
    """A callable that returns the size of the temporary buffers that an operation needs on the CPU, in bytes.

    Args:
        threads: number of threads that execute an operation.
    """

    def __init__(self, threads: int) -> None:
        self._threads, self._sent = threads, 0

    def __call__(self, func: Any, args: tuple[Any, ...]) -> int:
        """Return the size of the temporary buffers of `func` and of the latest reduce-scatter, in bytes.

        Gloo's reduce-scatter runs in the background on a copy of its input. This copy is counted until the next
        reduce-scatter.
        """
        own = 0
        if func is torch.ops.aten.convolution_backward.default:
            inputs, weight = args[1], args[2]
            # oneDNN reorders the weights and their gradients; weights in another memory format are converted before.
            converted = _is_channels_last(inputs) and not weight.is_contiguous(memory_format=torch.channels_last)
            copies = 4 * self._threads if _is_summed_per_thread(inputs, weight) else 2
            own = weight.nbytes * (copies + converted)
        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            # gloo reduces a copy, while the backward pass goes on; FSDP waits for it at its next reduce-scatter.
            self._sent = args[1].nbytes
        return own + self._sent


def _is_summed_per_thread(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether oneDNN uses separate buffers for each thread to compute the weight gradient of a convolution.

    oneDNN uses separate buffers if the CPU has no AVX-512, the inputs are a float32 batch of several samples, and the
    inputs are smaller than the kernel in at least one spatial dimension. The buffers of each thread are four times as
    large as the weights (oneDNN 3.12: `gemm:jit`, backward_weights; found by measuring).
    """
    smaller = any(size < kernel for size, kernel in zip(inputs.shape[2:], weight.shape[2:], strict=True))
    without_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX2"
    return smaller and without_avx512 and len(inputs) > 1 and inputs.dtype == torch.float32


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and info messages within this context, because the run is only planned."""
    logger = logging.getLogger("runner")
    before, logger.disabled, level = logger.disabled, True, logger.manager.disable
    logging.disable(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.disabled = before
        logging.disable(level)


class FakeCollectives(Collectives):
    """The collectives of one rank without its peers: `all_gather` assumes that every rank passes the same value.

    Args:
        devices, rank, world_size: as in `Collectives`.
        sent: list of the results of `from_rank_0` on rank 0, in the order of the calls. On rank 0, `from_rank_0`
            appends its result to the list. On any other rank, `from_rank_0` returns the next result in the list; if
            none is left, it calls `make` on this rank and returns the result.
    """

    def __init__(self, devices: Sequence[torch.device], rank: int, world_size: int, sent: list[Any]):
        super().__init__(devices, rank, world_size)
        self._sent, self._num_received = sent, 0

    def from_rank_0(self, make: Callable[[], T]) -> T:
        if self.rank > 0 and self._num_received < len(self._sent):
            self._num_received += 1
            return self._sent[self._num_received - 1]
        value = make()
        if self.rank == 0:
            self._sent.append(value)
        return value

    def all_gather(self, value: Any) -> list[Any]:
        return [value] * self.world_size
