"""The partition of a network into stages of consecutive blocks, by default of about the same time."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple, cast

import torch

from runner.config import user_code
from runner.config.errors import ConfigError, check, did_you_mean
from runner.config.limits import Range
from runner.config.options import chosen_option
from runner.device import synchronize
from runner.model.base import copied_module, structure
from runner.models.blocks import blocks_of as listed_blocks
from runner.parallel.attributes import without_value
from runner.parallel.base import move
from runner.parallel.pipelining.stages import named_tensors
from runner.parallel.session import Session
from runner.system.trees import Tree, call, leaves_of, map_tensors, rows_of, tensors_of
from runner.workloads.base import Workload
from runner.workloads.supervised import SupervisedWorkload

log = logging.getLogger(__name__)

_MIN_SECONDS, _MAX_REPEATS = 0.03, 20


@dataclass
class Partition:
    """The options of the modes that split a network into stages; `conf/parallel/pipeline.yaml` explains them.

    In `cuts`, the name of a layer, such as `layer2`, stands for the first block of the layer.
    """

    stages: Annotated[int, Range(least=2, most=4096)] | None = None
    cuts: Any = "auto"  # OmegaConf does not support `str | list`

    def __post_init__(self) -> None:
        if isinstance(self.cuts, list | tuple):  # blocks of a `Sequential` have numbers for names
            self.cuts = [str(name) if type(name) is int else name for name in self.cuts]
        names = self.cuts if isinstance(self.cuts, list | tuple) else []
        if self.cuts != "auto" and not (names and all(isinstance(name, str) for name in names)):
            why = "it is neither auto nor a list of blocks"
            raise ConfigError("cuts", self.cuts, why, "as in parallel.cuts=[layer3]")
        self._found: list[str] = []  # of this run, in earlier sessions as well; copies of this object share them
        if names and self.stages not in (None, len(names) + 1):
            why = f"{len(names)} cuts make {len(names) + 1} stages"
            raise ConfigError("stages", self.stages, why, "leave parallel.stages=null")

    @property
    def asked_stages(self) -> int | None:
        """The number of stages that `stages` or `cuts` specifies; None if neither does."""
        return self.stages if self.cuts == "auto" else len(self.cuts) + 1

    def check_partition(self, workload: Workload, count: int) -> None:
        """Check, without memory for weights, that the network of `workload` can be split into `count` stages."""
        names = [name for name, _ in blocks_of(structure(workload.build_model))]
        if count > len(names):
            why = f"the network has {len(names)} blocks: {', '.join(names)}"
            key, got, most = "parallel.stages", count, len(names)
            if self.asked_stages is None and isinstance(processes := getattr(self, "processes", None), int):
                key, got, most = "parallel.processes", processes, len(names) * processes // count
            raise ConfigError(key, got, why, f"at most {key}={most}")
        if self.cuts != "auto":
            positions_of(self.cuts, names)

    def signature(self) -> dict[str, Any]:
        return {"cuts": list(self._found)} if self._found else {}

    def continue_with(self, saved: Mapping[str, Any]) -> None:
        self._found[:] = saved.get("cuts", [])

    def profiled(
        self, model: torch.nn.Module, inputs: torch.Tensor, session: Session, count: int
    ) -> tuple[list[BlockProfile], list[int]]:
        """Return profiles of the blocks of `model`, and the positions of those with which `count` stages begin.

        With `cuts=auto`, blocks are timed only if the run has no cuts yet, as other stages sum in another order.
        """
        names, cuts = [name for name, _ in blocks_of(model)], self._found if self.cuts == "auto" else self.cuts
        timed = self.cuts == "auto" and (len(cuts) + 1 != count or not {*cuts} <= {*names})
        profiles = profile_blocks(model, inputs, session, timed)
        if timed:
            seconds, tied = [profile.seconds for profile in profiles], tied_positions(model, self.may_share(session))
            tied |= {i for i, profile in enumerate(profiles, start=1) if not profile.dtype.is_floating_point}
            inner = balanced(seconds, count, tied) or balanced(seconds, count)  # which is then refused
        else:
            inner = positions_of(cuts, names)
        return profiles, [0, *inner]

    def may_share(self, session: Session) -> bool:
        """Return whether several stages may have the same parameter."""
        return False

    def cut(self, model: torch.nn.Module, starts: Sequence[int], session: Session) -> list[list[torch.nn.Module]]:
        """Return the blocks of each stage of `model`, given the positions of those with which stages begin.

        Raises:
            ConfigError: if stages share a tensor, unless it is a parameter, and they may.
        """
        names, blocks = zip(*blocks_of(model), strict=True)
        bounds = [*starts, len(blocks)]
        stages = [list(blocks[start:stop]) for start, stop in pairwise(bounds)]
        ends = [(names[start], names[stop - 1]) for start, stop in pairwise(bounds)]
        self._found[:] = [names[start] for start in starts[1:]]
        log.info("stages: %s", " | ".join(first if first == last else f"{first} … {last}" for first, last in ends))
        parameters = {name for name, _ in model.named_parameters()} if self.may_share(session) else set()
        for name, numbers in stages_of_each_tensor(model, stages).items():
            why = f"stages {' and '.join(map(str, numbers))} share {name}"
            remedy = "cut elsewhere, or parallel=pipeline with processes, for parameters"
            check(len(numbers) < 2 or name in parameters, "parallel.cuts", self.cuts, why, remedy)
        return stages


def supervised(workload: Workload) -> SupervisedWorkload:
    """Return `workload`; raise a `ConfigError` if its loss needs more than the network's outputs and the targets."""
    if not isinstance(workload, SupervisedWorkload):
        why = "its loss is not criterion(model(inputs), targets), which is all that a split network can compute"
        name = user_code.given().names().get("workload") or chosen_option("workload", workload)
        raise ConfigError("workload", name, why, "parallel=ddp or fsdp spread it over processes")
    return workload


def blocks_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the blocks of `model` by name, in forward order; raise a `ConfigError` if it lists none."""
    if found := listed_blocks(model):
        return found
    why = "it does not say where it can be split: it has no blocks()"
    remedy = "another model, parallel=ddp or fsdp, or a method blocks() that returns [(name, module), …] in order"
    raise ConfigError("model", type(model).__name__, why, remedy)


def positions_of(cuts: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the indices of the blocks in `names` that `cuts` names, which must be in forward order."""
    layers = {name.rpartition(".")[0]: i for i, name in reversed(list(enumerate(names))) if "." in name}
    positions = layers | {name: i for i, name in enumerate(names)}
    for cut in cuts:
        check(cut in positions, "parallel.cuts", cut, "there is no such block;", did_you_mean(cut, positions))
    found = [positions[cut] for cut in cuts]
    if found != sorted({*found} - {0}):
        why = f"blocks begin stages, in the network's order, once each, and not {names[0]}"
        in_order = ",".join(names[i] for i in sorted({*found} - {0}))
        raise ConfigError("parallel.cuts", list(cuts), why, f"'parallel.cuts=[{in_order or names[1]}]'")
    return found


def stages_of_each_tensor(model: torch.nn.Module, stages: Sequence[Sequence[torch.nn.Module]]) -> dict[str, list[int]]:
    """Return the numbers of the stages that have a parameter or buffer of `model`, by its name, given their blocks.

    A tensor that is not part of any block belongs to stage 0.
    """
    uses: dict[int, list[int]] = {}
    for number, blocks in enumerate(stages):
        for key in {id(tensor) for block in blocks for _, tensor in named_tensors(block)}:
            uses.setdefault(key, []).append(number)
    return {name: uses.get(id(tensor), [0]) for name, tensor in named_tensors(model)}


def tied_positions(model: torch.nn.Module, may_share: bool) -> set[int]:
    """Return positions of blocks of `model` with which no stage can begin: earlier and later blocks share a tensor.

    If they `may_share` parameters, only buffers count.
    """
    uses = stages_of_each_tensor(model, [[block] for _, block in blocks_of(model)])
    counted = [uses[name] for name in (dict(model.named_buffers()) if may_share else uses)]
    return {position for found in counted for position in range(found[0] + 1, found[-1] + 1)}


def balanced(seconds: Sequence[float], count: int, tied: Collection[int] = ()) -> list[int]:
    """Return the first block of every stage except the first, so that the slowest of `count` stages is fastest.

    Among such partitions of blocks that take `seconds`, one with stages of similar times is preferred. No stage begins
    at a position in `tied`; if that is impossible, the list is empty.
    """
    sums = [0.0, *accumulate(seconds)]
    # For the first blocks of each number: the time of the slowest stage, the sum of the squared times, and the cuts.
    best: list[tuple[float, float, list[int]]] = [(total, total**2, []) for total in sums]
    for num_stages in range(2, count + 1):
        fewer = best
        best = [(float("inf"), float("inf"), [])] * len(sums)
        for stop in range(num_stages, len(sums)):
            starts = [start for start in range(num_stages - 1, stop) if start not in tied]
            times = ((start, sums[stop] - sums[start], fewer[start]) for start in starts)
            found = ((max(most, last), rest + last**2, [*cuts, i]) for i, last, (most, rest, cuts) in times)
            best[stop] = min(found, default=best[stop])
    return best[-1][2] if best[-1][0] < float("inf") else []


class BlockProfile(NamedTuple):
    """The time of a block's forward and backward pass, 0.0 if it was not measured, and the form of its output."""

    name: str
    seconds: float
    shape: tuple[int, ...]
    dtype: torch.dtype


def first_inputs(model: torch.nn.Module, session: Session, size: int | None = None) -> Tree:
    """Return the first `size` inputs of the first micro-batch, or all if `size` is None.

    Raises:
        ConfigError: if a tensor does not have a row for each sample, so that a micro-batch cannot be divided.
    """
    with closing(cast(Any, session.workload.batches(model, session.plan, 0, session.device))) as batches:
        batch = next(batches)
    for name, leaf in leaves_of(dict(zip(("inputs", "targets"), batch, strict=True))):
        if isinstance(leaf, torch.Tensor) and (not leaf.dim() or len(leaf) != session.plan.micro_size):
            why = f"it divides micro-batches of {session.plan.micro_size} samples, and {name} has the shape "
            raise ConfigError("parallel", "pipeline", f"{why}{list(leaf.shape)}", "parallel=ddp or fsdp")
    return rows_of(batch.inputs, 0, size or session.plan.micro_size)


def profile_blocks(model: torch.nn.Module, inputs: Tree, session: Session, timed: bool) -> list[BlockProfile]:
    """Measure copies of the blocks of `model`, in forward order, on a chunk of `inputs` and its device.

    Times are measured in training mode; if not `timed`, only the outputs are described, in evaluation mode.
    """
    dtype, autocast = next(model.parameters()).dtype, session.precision.autocast
    # float64 under precision=64
    inputs = map_tensors(lambda each: each.to(dtype) if each.is_floating_point() else each, inputs)
    profiles, x = [], inputs
    for name, block in blocks_of(model):
        copied = copied_module(block)
        move(copied.train(timed), tensors_of(x)[0].device, session.channels_last)
        copied.register_forward_hook(partial(_check_output, name))
        # The inputs of the first block are data, which need no gradient.
        x = x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) if profiles else x
        seconds = _median_seconds(copied, x, autocast) if timed else 0.0
        with torch.no_grad(), autocast():
            try:
                outputs = call(copied, x)
            except Exception:
                if timed or not without_value(copied):
                    raise
                outputs = call(copied.train(), x)  # where a first step gives a buffer its value
        x = outputs
        profiles.append(BlockProfile(name, seconds, tuple(x.shape), x.dtype))
    return profiles


def _check_output(name: str, block: torch.nn.Module, inputs: Any, output: Any) -> None:
    why = f"block {name} returns a {type(output).__name__}, and stages and their outputs are one tensor each"
    remedy = "let it return a tensor, or choose parallel=ddp or fsdp"
    check(isinstance(output, torch.Tensor), "parallel", "pipeline", why, remedy)


def _median_seconds(block: torch.nn.Module, x: Tree, autocast: Callable[[], AbstractContextManager]) -> float:
    """Return the median time of a forward and backward pass of `block`, after a warm-up."""
    times, device = list[float](), tensors_of(x)[0].device
    while len(times) < 4 or (sum(times[1:]) < _MIN_SECONDS and len(times) < _MAX_REPEATS):
        synchronize(device)
        start = time.perf_counter()
        with autocast():
            output = call(block, map_tensors(torch.Tensor.clone, x))  # it may begin with an operation in place
        if output.requires_grad:  # not that of a first block whose parameters are frozen
            output.backward(torch.ones_like(output))
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
