"""A pipeline: consecutive pieces of the network work on consecutive micro-batches at the same time."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch

from runner.batching import MicroBatch
from runner.clock import clock
from runner.config import ConfigError, check, check_choice, check_range
from runner.device import Device
from runner.gantt import gantt
from runner.optimizer import trainable
from runner.parallel.base import move
from runner.parallel.cluster import outer_processes
from runner.parallel.cuts import Block, Cuts, probed, stages_of, told
from runner.parallel.devices import check_not_hidden, spread
from runner.parallel.gather import gathered
from runner.parallel.micro import Rule, micro_batches
from runner.parallel.processes import Processes
from runner.parallel.timeline import Span, Timeline, bubble
from runner.pictures import save
from runner.precision import Precision
from runner.workloads.base import Sums, Workload

if TYPE_CHECKING:
    from runner.parallel.pieces import Border, Piece
    from runner.run import Run

log = logging.getLogger(__name__)

_ONE_STAGE_EACH = ("gpipe", "1f1b")
_PICTURE = "pipeline.png"
_ONE = "leave parallel.processes=auto, or choose parallel.engine=processes"


@dataclass
class Pipeline(Cuts, Processes):
    """Huang et al., GPipe (2019): a batch goes through the stages in micro-batches, whose gradients are added up.

    The same samples, the same loss and the same update as on one device that accumulates. Batch normalisation sees
    micro-batches, as it does there.

    Args:
        engine: `processes`: a process a stage, on `torch.distributed.pipelining`; `streams`: one process with several
            CUDA devices, and copies between them on streams of their own.
        schedule: `gpipe`: all forward passes, then all backward passes; `1f1b`: in turns as soon as can be, which holds
            fewer activations (Narayanan et al., PipeDream, 2019); `interleaved_1f1b`: two or more stages a process, a
            smaller bubble (Narayanan et al., 2021); `zero_bubble`: the gradients of weights are put off into the bubble
            (Qi et al., 2023).
        split_size: samples in a micro-batch.
        num_micro_batches: how many there are, in the place of `split_size`; both null: about four a stage.
        batch_norm: running statistics of `micro`-batches, or, by `defer`, of the whole batch (GPipe, section 2.2), so
            that the evaluated model does not depend on `split_size`.
    """

    engine: str = "processes"
    schedule: str = "gpipe"
    split_size: int | None = None
    num_micro_batches: int | None = None
    batch_norm: str = "micro"

    def __post_init__(self) -> None:
        check_choice(self, "engine", ("processes", "streams"))
        check_choice(self, "schedule", (*_ONE_STAGE_EACH, "interleaved_1f1b", "zero_bubble"))
        check_choice(self, "batch_norm", ("micro", "defer"))
        check_range(self, "split_size", least=1)
        check_range(self, "num_micro_batches", least=1)
        Cuts.__post_init__(self)
        if self.engine == "streams":
            check(self.processes in ("auto", 1), "processes", self.processes, "engine=streams has one", _ONE)
            why = "engine=streams queues all forward passes before the backward passes"
            check(
                self.schedule == "gpipe",
                "schedule",
                self.schedule,
                why,
                "parallel.schedule=gpipe, or parallel.engine=processes",
            )
            self.processes = 1
        elif self.processes == "auto" and self.stages is not None and outer_processes() == 1:
            two_each = self.schedule == "interleaved_1f1b" and self.stages % 2 == 0 and self.stages > 2
            self.processes = self.stages // 2 if two_each else self.stages
        Processes.__post_init__(self)
        self._devices: list[torch.device] = []
        self._num_micros = 1
        self._spans: list[Span] = []

    # -----------------------------------------------------------------------------------------------------------------
    # Who does what

    @property
    def data_shard(self) -> tuple[int, int]:
        return (0, 1)  # every process walks the same batches

    @property
    def num_parts(self) -> int:
        return self._num_micros

    @property
    def num_stages(self) -> int:
        """How many pieces the network is cut into."""
        if self.stages is not None:
            return self.stages
        if self.engine == "streams":
            return max(2, len(self._devices))
        return self.world_size * (2 if self.schedule == "interleaved_1f1b" else 1)

    @property
    def num_workers(self) -> int:
        """How many stages may be at work at the same time; stage i is at worker i modulo their number."""
        return self.num_stages if self.engine == "streams" else self.world_size

    def device(self, choice: Device) -> torch.device:
        if self.engine == "streams":
            check_not_hidden(choice)
        device = super().device(choice)
        self._devices = spread(choice, device) if self.engine == "streams" else [device]
        return self._devices[0]

    def prepare(self, device: torch.device, run: Run) -> None:
        if self.engine == "streams":
            started = outer_processes()
            why = f"{started} processes were started by torchrun or SLURM, and this engine has one"
            check(started == 1, "engine", self.engine, why, "choose engine=processes, or start one process")
        super().prepare(device, run)
        self._check_counts()
        samples = run.batch_size // run.accumulation.steps
        rule = Rule(self.schedule, self.num_stages, self.world_size)
        self._num_micros = micro_batches(samples, self.split_size, self.num_micro_batches, rule)
        self._size = samples // self._num_micros

    def _check_counts(self) -> None:
        """Refuse stages that do not fit the processes or the devices."""
        stages, processes, devices = self.num_stages, self.world_size, len(self._devices)
        if self.engine == "streams":
            why = f"there are {devices} GPUs, and each stage has its own"
            fits = devices == 1 or stages <= devices
            check(fits, "stages", stages, why, f"at most parallel.stages={devices}")
            return
        why = "a pipeline has two or more"
        check(processes >= 2, "processes", processes, why, "parallel.processes=2; on one GPU: parallel.engine=streams")
        if self.schedule in _ONE_STAGE_EACH:
            why = f"each of the {processes} processes has one stage under schedule={self.schedule}"
            check(stages == processes, "stages", stages, why, f"parallel.stages={processes}, or leave it null")
        least = 2 if self.schedule == "interleaved_1f1b" else 1
        each = max(least, stages // processes)
        why = f"schedule={self.schedule} has equally many on each of {processes} processes, at least {least}"
        check(stages == each * processes, "stages", stages, why, f"parallel.stages={each * processes}")

    def check_workload(self, run: Run) -> None:
        super().check_workload(run)
        compiled = run.compile and self.schedule == "zero_bubble"
        why = "schedule=zero_bubble takes the backward pass apart, and a compiled one is whole"
        check(not compiled, "compile", True, why, "compile=false, or another parallel.schedule")
        self.check_cuts(run, self.num_stages)

    # -----------------------------------------------------------------------------------------------------------------
    # The pieces

    def place(self, model: torch.nn.Module, device: torch.device, run: Run) -> torch.nn.Module:
        from runner.parallel import deferred, pieces

        self._run, self._names = run, list(model.state_dict())
        if self.batch_norm == "defer":
            deferred.defer(model)
        (shape, dtype), blocks = self.on_rank_0(partial(self._probed, model, run, device))
        cuts = self.borders(blocks, self.num_stages)
        log.info("stages: %s", told(blocks, cuts))
        if self._num_micros == 1:
            log.warning("one micro-batch of %d samples: one stage is at work at a time, nothing overlaps", self._size)
        stages = [stage for _, stage in stages_of(model)]
        grouped = [stages[start:stop] for start, stop in pairwise(cuts)]
        borders = [
            pieces.Border(blocks[stop - 1].shape, blocks[stop - 1].dtype, run.channels_last) for stop in cuts[1:]
        ]
        borders = [pieces.Border(shape, dtype), *borders[:-1], borders[-1]._replace(channels_last=False)]
        self._timeline = Timeline(self._devices)
        place = self._place_here if self.engine == "streams" else self._place_own
        self._pieces = place(model, grouped, borders, device, run)
        if run.compile:
            for piece in self._pieces.values():
                piece.compile()
        run.precision.scaled(torch.zeros((), device=device))  # a scale is made where it is first asked for
        return model

    def _probed(
        self, model: torch.nn.Module, run: Run, device: torch.device
    ) -> tuple[tuple[tuple[int, ...], torch.dtype], list[Block]]:
        """Shape and format of the inputs, and what is seen of the blocks as they compute."""
        with closing(cast(Any, run.workload.batches(model, run.plan, 0, device))) as batches:
            inputs = next(batches)[0][: self._size]
        stages, kind = stages_of(model), next(model.parameters()).dtype
        seen = inputs.to(kind) if inputs.is_floating_point() else inputs  # as under precision=64
        timed = self.cuts == "auto"
        blocks = probed(stages, seen, run.precision.autocast, run.channels_last, timed)
        return (tuple(inputs.shape[1:]), inputs.dtype), blocks

    def _place_own(
        self, model: torch.nn.Module, grouped: list[Any], borders: list[Border], device: torch.device, run: Run
    ) -> dict[int, Piece]:
        """This process's pieces; what belongs to the others is taken out of `model`."""
        from runner.parallel.pieces import Piece, keep_only, owners
        from runner.parallel.scheduled import Scheduled

        try:
            owner = owners(model, grouped)
        except ValueError as error:
            raise ConfigError("parallel.cuts", self.cuts, str(error), "cut elsewhere") from None
        own = range(self.rank, len(grouped), self.world_size)
        keep_only(model, {name for name, number in owner.items() if number in own})
        why = f"process {self.rank} has nothing to train"
        check(bool(trainable(model)), "parallel.cuts", self.cuts, why, "cut elsewhere, or take fewer stages")
        move(model, device, run.channels_last)
        sent, autocast = [None, *borders[1:-1], None], run.precision.autocast
        pieces = {number: Piece(grouped[number], sent[number], sent[number + 1], autocast) for number in own}
        if 0 in pieces:
            run.precision.convert(pieces[0])  # it takes the inputs, where the whole network did
        size, count = self._size, self._num_micros
        self._engine: Any = Scheduled(pieces, borders, self.schedule, size, count, device, self._timeline)
        return pieces

    def _place_here(
        self, model: torch.nn.Module, grouped: list[Any], borders: list[Border], device: torch.device, run: Run
    ) -> dict[int, Piece]:
        """All pieces, each on a device of its own where there are several."""
        from runner.parallel.pieces import Piece
        from runner.parallel.streams import Streams

        devices = (self._devices * len(grouped))[: len(grouped)] if len(self._devices) == 1 else self._devices
        if len(self._devices) == 1:
            log.warning("parallel.engine=streams: there is one device, %s: stages cannot overlap", device)
        pieces = [Piece(blocks, None, None, run.precision.autocast) for blocks in grouped]
        move(model, device, run.channels_last)
        for piece, its_own in zip(pieces, devices, strict=False):
            piece.to(its_own)
        run.precision.convert(pieces[0])
        self._engine = Streams(pieces, devices[: len(grouped)], self._size, self._timeline)
        return dict(enumerate(pieces))

    # -----------------------------------------------------------------------------------------------------------------
    # A step

    def accumulate(
        self, model: torch.nn.Module, workload: Workload, batch: Any, precision: Precision, micro: MicroBatch
    ) -> torch.Tensor:
        device, share = batch.inputs.device, micro.weight / self._num_micros
        sums: list[torch.Tensor] = []

        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            # The outputs stand for the model's; what the workload then says of them is what it always says.
            with precision.autocast():
                value, own = workload.loss(lambda _: outputs, batch._replace(targets=targets))  # pyright: ignore[reportArgumentType]
            sums.append(own.to(device, non_blocking=True))
            return precision.scaled(value * share)

        step = (micro.stop - 1) // self._run.batch_size + 1
        if micro.is_last and self._run.due(self._run.log_every, step):
            self._timeline.begin(self.barrier)
        with clock.section("pipeline"):
            self._engine.train(batch.inputs, batch.targets, loss)
        self._timeline.end()
        if micro.is_last and self.batch_norm == "defer":
            from runner.parallel import deferred

            deferred.update(model)
        # On one process only, so that their sum over all is the batch's.
        return torch.stack(sums).sum(0) if sums else torch.zeros(len(workload.metrics), device=device)

    def clip_gradients(self, model: torch.nn.Module, max_norm: float | None) -> torch.Tensor:
        parameters = [parameter for parameter in trainable(model) if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        total = norm.square()
        torch.distributed.all_reduce(total)
        total = total.sqrt()
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def anywhere(self, flag: torch.Tensor) -> None:
        if self.world_size == 1:
            return
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)

    def infer(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return self._engine.infer(inputs)

    def evaluate(
        self, model: torch.nn.Module, workload: Workload, precision: Precision, device: torch.device
    ) -> tuple[dict[str, float], Sums]:
        with torch.inference_mode():
            sums = workload.evaluate(partial(self.infer, model), self.eval_shard, device)
        return workload.summarize(sums), sums  # every process has seen all outputs: there is nothing to add up

    # -----------------------------------------------------------------------------------------------------------------
    # What is told of it

    def scalars(self) -> dict[str, float]:
        parts: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(parts, self._timeline.take())
        self._spans = [span for part in parts for span in part]
        return bubble(self._spans, self.num_workers).scalars() if self._spans else {}

    def pictures(self) -> dict[str, torch.Tensor]:
        if self.rank > 0 or not self._spans:
            return {}
        found = bubble(self._spans, self.num_workers)
        title = f"{self.num_stages} stages, {self._num_micros} micro-batches of {self._size}: "
        title += f"{found.share:.0%} idle (equal stages {found.theory:.0%}, these at least {found.bound:.0%})"
        picture = gantt(self._spans, self.num_workers, title)
        save(picture, self._run.directory / _PICTURE)
        return {"pipeline/step": picture}

    # -----------------------------------------------------------------------------------------------------------------
    # The mode-free state

    def gathered(self, tensors: Sums) -> Sums:
        return gathered(super().gathered(tensors), self.rank, self.world_size)

    def full_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Sums, dict[str, Any]]:
        tensors, moments = self._state_on_cpu(model, optimizer, kept=True)
        flat = {(name, key): value for name, state in moments.items() for key, value in state.items()}
        tensors, flat = (gathered(own, self.rank, self.world_size) for own in (tensors, flat))
        states: dict[str, Any] = {}
        for (name, key), value in flat.items():
            states.setdefault(name, {})[key] = value
        return tuple({name: found[name] for name in self._names if name in found} for found in (tensors, states))  # pyright: ignore[reportReturnType]

    def load_full_state(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        tensors: Sums,
        moments: dict[str, Any],
    ) -> None:
        own = model.state_dict().keys()
        others = set(self._names) - own
        super().load_full_state(
            model,
            optimizer,
            {name: tensor for name, tensor in tensors.items() if name not in others},
            {name: state for name, state in moments.items() if name not in others},
        )
