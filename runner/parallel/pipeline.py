"""`parallel=pipeline`: consecutive stages of the network compute at the same time, on different micro-batches."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from runner.batching import MicroBatch, Plan
from runner.config.errors import ConfigError, check
from runner.config.limits import PositiveInt
from runner.data.base import copied
from runner.device import Device, sum_dtype
from runner.optimizer import trainable
from runner.parallel import batch_norm, full_state
from runner.parallel.base import move
from runner.parallel.compiling import compile_in_place, refuse_step
from runner.parallel.full_state import TensorDict
from runner.parallel.launch.processes import Launcher
from runner.parallel.multiprocess import MultiProcess, finds_unused
from runner.parallel.pipelining.partition import (
    BlockProfile,
    Partition,
    blocks_of,
    first_inputs,
    stages_of_each_tensor,
    supervised,
)
from runner.parallel.pipelining.schedules import STAGES_EACH, ScheduleName, check_split_backward, num_micro_batches
from runner.parallel.pipelining.stages import StageModule, keep_only
from runner.parallel.pipelining.timeline import Span, Timeline, bubble, gantt
from runner.parallel.session import Session
from runner.storage.state_dict import with_versions
from runner.system.section_timer import timer
from runner.system.trees import Tree
from runner.tracking.image_grids import png
from runner.tracking.metrics import BatchSums, MetricSums

log = logging.getLogger(__name__)


@dataclass
class Pipeline(Partition, MultiProcess):
    """Pipeline parallelism: micro-batches pass through the stages of the network (Huang et al., GPipe, 2019).

    The gradients of the micro-batches are summed, as with gradient accumulation on one device. With `processes=auto`
    and an even number of stages, at least four, `interleaved_1f1b` has two stages per process.

    Schedules: `1f1b`: Narayanan et al., PipeDream (2019); `interleaved_1f1b`: Narayanan et al. (2021); `zero_bubble`:
    Qi et al. (2023). `conf/parallel/pipeline.yaml` explains the options.
    """

    description: ClassVar[str] = "pipeline"

    engine: Literal["processes", "streams"] = "processes"
    schedule: ScheduleName = "gpipe"
    split_size: PositiveInt | None = None
    num_micro_batches: PositiveInt | None = None
    batch_norm: Literal["micro", "defer"] = "micro"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine == "streams" and self.processes not in ("auto", 1):
            remedy = "leave parallel.processes=auto, or choose parallel.engine=processes"
            raise ConfigError("processes", self.processes, "parallel.engine=streams has one", remedy)
        if self.engine == "streams" and self.schedule != "gpipe":
            why = "parallel.engine=streams queues all forward passes before the backward passes"
            raise ConfigError("schedule", self.schedule, why, "parallel.schedule=gpipe, or parallel.engine=processes")

    @property
    def in_processes(self) -> bool:
        return self.engine == "processes"

    def launcher(self, choice: Device) -> Launcher:
        if self.in_processes:
            return super().launcher(choice)
        return Launcher(self._devices(choice))

    def _num_processes(self, num_gpus: int) -> int:
        stages = self.asked_stages
        if self.processes != "auto" or stages is None:
            return super()._num_processes(num_gpus)
        each = STAGES_EACH[self.schedule][0]
        return stages // each if stages % each == 0 and stages > each else stages

    def may_share(self, session: Session) -> bool:
        return self.in_processes or len(session.devices) == 1

    def num_stages(self, session: Session) -> int:
        if self.asked_stages is not None:
            return self.asked_stages
        if self.engine == "streams":
            return max(2, len(session.devices))
        return session.world_size * STAGES_EACH[self.schedule][0]

    def divide(self, session: Session) -> Plan:
        refuse_step(session.compile, "the stages compute at the same time")
        supervised(session.workload)
        if session.compile and self.schedule == "zero_bubble":
            why = "parallel.schedule=zero_bubble splits the backward pass, and a compiled one is a single graph"
            raise ConfigError("compile", session.compile, why, "compile=false, or another parallel.schedule")
        stages, processes, devices = self.num_stages(session), session.world_size, len(session.devices)
        if self.engine == "streams":
            why = f"there are {devices} GPUs, and each stage has its own"
            check(not 1 < devices < stages, "parallel.stages", stages, why, f"at most parallel.stages={devices}")
        else:
            remedy = "parallel.processes=2; on one GPU: parallel.engine=streams"
            check(processes >= 2, "parallel.processes", processes, "a pipeline has two or more", remedy)
            least, most = STAGES_EACH[self.schedule]
            each = 1 if most == 1 else max(least, stages // processes)
            number = "one stage" if most == 1 else f"as many stages, and at least {least}"
            why = f"under parallel.schedule={self.schedule}, each of the {processes} processes has {number}"
            fitting = f"parallel.stages={each * processes}"
            remedy = fitting if self.processes == "auto" else "parallel.processes=auto"
            check(stages == each * processes, "parallel.stages", stages, why, remedy)
        splitting = (session.plan.micro_size, self.split_size, self.num_micro_batches)
        chunks = num_micro_batches(*splitting, self.schedule, stages, processes)
        # The first stage takes the inputs of the batches, and the last one the targets.
        reads_batches = session.rank in (0, processes - 1)
        divided = {"reads_batches": reads_batches, "splits_network": self.in_processes}
        return replace(session.plan, chunks=chunks, rng_stream=session.rank, **divided)

    def check(self, session: Session) -> None:
        self.check_partition(session.workload, self.num_stages(session))

    def _place(self, model: torch.nn.Module, session: Session) -> torch.nn.Module:
        count = self.num_stages(session)
        self._num_workers = count if self.engine == "streams" else session.world_size
        self._names, self._elsewhere = list(model.state_dict()), set[str]()
        self._shared, self._finds_unused = dict[str, list[int]](), finds_unused("auto", model)
        self._spans: list[Span] = []
        self._timeline = Timeline(session.devices)
        if self.batch_norm == "defer":
            batch_norm.defer(model)

        def profiles_and_starts() -> tuple[list[tuple], list[int]]:
            inputs = first_inputs(model, session, session.plan.chunk_size)
            profiles, starts = self.profiled(model, inputs, session, count)
            return [*map(tuple, profiles)], starts

        sent, starts = session.collectives.from_rank_0(profiles_and_starts)  # by one process, as measured times differ
        profiles = [BlockProfile(*each) for each in sent]
        stages = self.cut(model, starts, session)
        size = session.plan.chunk_size
        if session.plan.chunks == 1:
            log.warning("one micro-batch of %d samples: one stage computes at a time, nothing overlaps", size)
        numbers = range(count)  # of the stages in this process
        if self.in_processes:
            check_split_backward(self.schedule, model)
            numbers = range(session.rank, count, session.world_size)
            stages_of = stages_of_each_tensor(model, stages).items()
            ranks_of = {name: sorted({number % session.world_size for number in found}) for name, found in stages_of}
            others = {id(m) for i, blocks in enumerate(stages) if i not in numbers for b in blocks for m in b.modules()}
            here = {id(m) for i in numbers for b in stages[i] for m in b.modules()}
            self._elsewhere = {name for name, m in model.named_modules() if id(m) in others - here}
            keep_only(model, {name for name, ranks in ranks_of.items() if session.rank in ranks})
            self._shared = {name: ranks for name, ranks in ranks_of.items() if len(ranks) > 1}
            why = f"process {session.rank} has nothing to train"
            check(bool(trainable(model)), "parallel.cuts", self.cuts, why, "cut elsewhere, or take fewer stages")
        move(model, session.device, session.channels_last)
        placed = {}
        for i in numbers:
            is_sent = self.in_processes and i < count - 1
            placed[i] = StageModule(stages[i], i > 0, is_sent, session.channels_last, session.precision.autocast)
        names = [name for name, _ in blocks_of(model)]
        self._blocks = {name for i in numbers for name in names[starts[i] :][: len(stages[i])]}
        if 0 in placed:
            session.precision.convert(placed[0])  # the inputs are passed to the first stage, not to the whole network

        from runner.parallel.pipelining.engines import ProcessEngine, StreamEngine

        self._engine: Any
        if self.in_processes:
            activations = [profiles[stop - 1] for stop in accumulate(map(len, stages))]
            rest = session.plan, session.device, self._timeline
            self._engine = ProcessEngine(placed, activations, self.schedule, *rest)
        else:
            devices = session.devices[:count]
            if len(devices) == 1:
                log.warning("parallel.engine=streams: there is one device, %s: stages cannot overlap", devices[0])
                devices *= count
            for number, device in enumerate(devices):
                placed[number].to(device)
            self._engine = StreamEngine(list(placed.values()), devices, size, self._timeline)
        for number, stage in placed.items():
            compile_in_place(stage, session.compile, stages[number])
        # The scaler allocates its scale on first use, but only the process of the last stage has a loss to scale.
        session.precision.scaled(torch.zeros((), device=session.device))
        return model

    def accumulate(self, model: torch.nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> BatchSums | None:
        session, workload, precision = self._session, supervised(self._session.workload), self._session.precision
        device, share = session.device, micro.weight / session.plan.chunks
        sums: list[torch.Tensor] = []

        def loss(outputs: torch.Tensor, targets: Tree) -> torch.Tensor:
            if (module := workload.loss_module()) is not None:
                module.to(outputs.device)
            with precision.autocast():
                value, of_chunk = workload.loss_of(outputs, copied(targets))  # as in `_FirstStage`
            sums.append(of_chunk.to(device, non_blocking=True))
            return precision.scaled(value * share)

        if micro.is_last and log_due:
            self._timeline.begin(self._session.collectives.barrier)
        with timer.section("pipeline"):
            self._engine.train(*(batch or (None, None)), loss)
        self._timeline.on = False
        if micro.is_last and self._shared:
            self._add_gradients(model)
        if micro.is_last and self.batch_norm == "defer":
            batch_norm.update(model)
        # Only the process of the last stage has sums, so the sums over all processes are the sums of the batch.
        return torch.stack(sums).sum(0) if sums else None

    def _shared_here(self, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters of this rank that other ranks have, too, by name."""
        here = {n: model.get_parameter(n) for n, ranks in self._shared.items() if self._session.rank in ranks}
        return {name: parameter for name, parameter in here.items() if parameter.requires_grad}

    @torch.no_grad()
    def _add_gradients(self, model: torch.nn.Module) -> None:
        """Give each parameter that several ranks have the sum of their gradients; none if no rank has used it."""
        from runner.parallel.pipelining.engines import add_up

        shared = self._shared_here(model)
        used = [name for name, parameter in shared.items() if parameter.grad is not None or not self._finds_unused]
        if self._finds_unused:
            used = [name for names in self._session.collectives.all_gather(used) for name in names]
        for name, parameter in shared.items():
            if name in used:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                add_up(parameter.grad, self._shared[name])

    def clip_gradients(self, model: torch.nn.Module, max_norm: float | None) -> torch.Tensor:
        parameters, shared = trainable(model), self._shared_here(model)
        counted_elsewhere = {p for name, p in shared.items() if self._shared[name][0] != self._session.rank}
        gradients = [p.grad for p in parameters if p.grad is not None and p not in counted_elsewhere]
        # Of one type on all ranks: without gradients, the norm is a zero in float32.
        norm = torch.nn.utils.get_total_norm(gradients).to(device := self._session.device, sum_dtype(device))
        total = self._session.collectives.all_reduce({"squares": norm.square()})["squares"].sqrt()
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def evaluate(self, model: torch.nn.Module) -> tuple[dict[str, float], MetricSums]:
        session, workload = self._session, self._session.workload
        sums: MetricSums = {}
        with torch.no_grad():
            if session.rank == 0:
                sums = workload.evaluate(self._engine.infer, session.plan.eval_shard, session.device)
            if self.in_processes:
                self._engine.serve()
        return session.collectives.from_rank_0(lambda: workload.summarize(sums)), sums

    def blocks(self, model: torch.nn.Module) -> list[str]:
        return [name for name in super().blocks(model) if name in self._blocks]  # others may share a parameter

    def scalars(self) -> dict[str, float]:
        gathered = self._session.collectives.all_gather([tuple(span) for span in self._timeline.take()])
        self._spans = [Span(*span) for spans in gathered for span in spans]
        return bubble(self._spans, self._num_workers) if self._spans else {}

    def images(self, directory: Path) -> dict[str, torch.Tensor]:
        if not self._spans:
            return {}
        idle, plan = bubble(self._spans, self._num_workers)["pipeline/bubble"], self._session.plan
        stages, pieces = self.num_stages(self._session), f"{plan.chunks} micro-batches of {plan.chunk_size}"
        picture = gantt(self._spans, self._num_workers, f"{stages} stages, {pieces}: {idle:.0%} idle")
        (directory / "pipeline.png").write_bytes(png(picture))
        return {"pipeline/step": picture}

    def full_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[TensorDict, dict[str, Any]]:
        tensors, optimizer_state = full_state.collect(model, optimizer, keep=True)
        tensors = {name: each for name, each in tensors.items() if name.rpartition(".")[0] not in self._elsewhere}
        flat = {(name, key): value for name, state in optimizer_state.items() for key, value in state.items()}
        gather = self._session.collectives.gather_to_rank0
        tensors, states = gather(tensors), defaultdict(dict)
        for (name, key), value in gather(flat).items():
            states[name][key] = value
        # In the order in which a single device saves them; then, buffers that begin as None.
        names = [name for name in dict.fromkeys((*self._names, *tensors)) if name in tensors]
        whole = with_versions({name: tensors[name] for name in names}, model.state_dict())
        return whole, {name: states[name] for name in names if name in states}

    def load_full_state(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: TensorDict, states: dict[str, Any]
    ) -> None:
        of_others = {name for name in tensors if name.rpartition(".")[0] in self._elsewhere}  # also what begins as None
        others = {*self._names, *of_others} - model.state_dict().keys()
        kept = {name: tensor for name, tensor in tensors.items() if name not in others}
        states = {name: state for name, state in states.items() if name not in others}
        super().load_full_state(model, optimizer, with_versions(kept, tensors), states)
