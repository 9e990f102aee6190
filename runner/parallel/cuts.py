"""Where a network is cut into pieces: places by name, and the cuts that share the time evenly."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from runner.config import check, check_range, did_you_mean
from runner.device import synchronize

if TYPE_CHECKING:
    from runner.run import Run

Stages = list[tuple[str, "torch.nn.Module"]]
"""The blocks of a network by name, in the order of the forward pass: it can be cut between any two."""

_LEAST_SECONDS, _MOST_REPEATS = 0.03, 20


@dataclass
class Cuts:
    """The options of the modes that cut a network.

    Args:
        stages: how many pieces; null: as many as there are processes or devices.
        cuts: `auto` measures the blocks, and shares the time evenly; a list names the block that each further piece
            begins with: [layer2, layer3.1]. `layer2` is the first block of that layer.
    """

    stages: int | None = None
    cuts: Any = "auto"  # OmegaConf has no type for a text or a list

    def __post_init__(self) -> None:
        check_range(self, "stages", least=2, most=4096)
        names = self.cuts if isinstance(self.cuts, list | tuple) else []
        known = self.cuts == "auto" or (len(names) > 0 and all(isinstance(name, str) for name in names))
        check(known, "cuts", self.cuts, "it is neither auto nor a list of blocks", "as in parallel.cuts=[layer3]")
        if names:
            told = len(names) + 1
            why = f"{len(names)} cuts make {told} stages"
            check(self.stages in (None, told), "stages", self.stages, why, "leave parallel.stages=null")
            self.cuts, self.stages = list(names), told

    def check_workload(self, run: Run) -> None:
        why = "its loss is not criterion(model(inputs), targets), which is all that a cut network knows"
        known = run.workload.criterion is not None
        check(known, "workload", type(run.workload).__name__, why, "parallel=ddp or fsdp spread it over processes")

    def check_cuts(self, run: Run, count: int) -> None:
        """Refuse a network that cannot be cut into `count` pieces as asked; without memory for its weights.

        Raises:
            ConfigError: with the key from the root.
        """
        names = [name for name, _ in stages_of(network(run))]
        why = f"the network has {len(names)} blocks: {', '.join(names)}"
        check(count <= len(names), "parallel.stages", count, why, f"at most parallel.stages={len(names)}")
        if self.cuts != "auto":
            parsed(self.cuts, names)

    def borders(self, blocks: Sequence[Block], count: int) -> list[int]:
        """Where the `count` pieces begin and end: [0, …, len(blocks)]."""
        if self.cuts == "auto":
            inner = balanced([block.seconds for block in blocks], count)
        else:
            inner = parsed(self.cuts, [block.name for block in blocks])
        return [0, *inner, len(blocks)]


def network(run: Run) -> torch.nn.Module:
    """The network of `run`, laid out without memory."""
    import warnings

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading weights onto nothing does nothing, as torch says
        return run.workload.build_model()


def stages_of(model: torch.nn.Module) -> Stages:
    """The blocks of `model`.

    Raises:
        ConfigError: when it does not say what they are.
    """
    stages: Any = getattr(model, "stages", None)
    kind = type(model).__name__
    check(stages is not None, "model", kind, "it does not say where it can be cut: it has no stages()", _OTHER)
    return stages()


_OTHER = "choose another model (convnet, resnet18, resnet50, …), or parallel=single"


def parsed(cuts: Sequence[str], names: Sequence[str]) -> list[int]:
    """The numbers of the blocks that begin a new piece.

    Args:
        cuts: names of blocks, or of the layers that they begin, in the order of the network.
        names: of all blocks.

    Raises:
        ConfigError: when one is no place to cut at.
    """
    layers = {name.rpartition(".")[0]: i for i, name in reversed(list(enumerate(names))) if "." in name}
    places = layers | {name: i for i, name in enumerate(names)}
    for cut in cuts:
        check(cut in places, "parallel.cuts", cut, "there is no such block;", did_you_mean(cut, places))
        check(places[cut] > 0, "parallel.cuts", cut, "nothing comes before it", f"cut at {names[1]} or later")
    found = [places[cut] for cut in cuts]
    rising = all(one < next_one for one, next_one in pairwise(found))
    in_order = f"[{','.join(names[i] for i in sorted(set(found)))}]"
    check(
        rising,
        "parallel.cuts",
        list(cuts),
        "they are not in the network's order, each once",
        f"parallel.cuts={in_order}",
    )
    return found


def balanced(seconds: Sequence[float], count: int) -> list[int]:
    """The cuts into `count` runs of blocks whose longest takes the least time; of several such, the most even.

    A pipeline goes at the pace of its slowest stage. Exact, by dynamic programming over (blocks, pieces).

    Returns:
        `count` − 1 numbers of blocks that begin a piece, rising.
    """
    assert 1 <= count <= len(seconds), f"{len(seconds)} blocks do not make {count} pieces"
    sums = [0.0]
    for each in seconds:
        sums.append(sums[-1] + each)
    best: list[tuple[float, float, list[int]]] = [(total, total**2, []) for total in sums]
    for pieces in range(2, count + 1):
        worse = best
        best = [(float("inf"), float("inf"), [])] * len(sums)
        for stop in range(pieces, len(sums)):
            options = (_with_last(worse[start], start, sums[stop] - sums[start]) for start in range(pieces - 1, stop))
            best[stop] = min(options)
    return best[-1][2]


def _with_last(before: tuple[float, float, list[int]], start: int, last: float) -> tuple[float, float, list[int]]:
    longest, squares, cuts = before
    return max(longest, last), squares + last**2, [*cuts, start]


class Block(NamedTuple):
    """What was seen of a block.

    Args:
        seconds: of its forward and its backward pass; 0.0 where that was not asked for.
        shape: of its output, without the batch.
        dtype: of its output.
    """

    name: str
    seconds: float
    shape: tuple[int, ...]
    dtype: torch.dtype


def probed(
    stages: Stages,
    inputs: torch.Tensor,
    autocast: Callable[[], AbstractContextManager],
    channels_last: bool,
    timed: bool,
) -> list[Block]:
    """Run the blocks one after the other, in copies that leave the network as it is, one at a time on the device.

    Args:
        inputs: of the first, on the device, as large as a piece will see them.
        timed: measure them, in training; otherwise only look at a single sample, in evaluation.
    """
    blocks, x = [], inputs if timed else inputs[:1]
    for name, stage in stages:
        own = copy.deepcopy(stage).to(x.device).train(timed)
        if channels_last:
            own.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        # The first block's inputs are data, whose gradient nobody wants.
        seconds = _seconds(own, x, autocast, bool(blocks)) if timed else 0.0
        with torch.no_grad(), autocast():
            x = own(x)
        blocks.append(Block(name, seconds, tuple(x.shape[1:]), x.dtype))
    return blocks


def _seconds(
    block: torch.nn.Module, x: torch.Tensor, autocast: Callable[[], AbstractContextManager], inner: bool
) -> float:
    """The median time of a forward and a backward pass; the first one warms up, and is left out."""
    x = x.detach().clone().requires_grad_(inner)
    times: list[float] = []
    while len(times) < 4 or (sum(times[1:]) < _LEAST_SECONDS and len(times) < _MOST_REPEATS):
        synchronize(x.device)
        start = time.perf_counter()
        with autocast():
            output = block(x)
        output.backward(torch.ones_like(output))
        synchronize(x.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def told(blocks: Sequence[Block], borders: Sequence[int]) -> str:
    """The pieces in words: `stem … layer2.1 (51 %) | layer2.2 … head (49 %)`."""
    whole = sum(block.seconds for block in blocks)
    parts = []
    for start, stop in pairwise(borders):
        own = blocks[start:stop]
        share = f" ({sum(block.seconds for block in own) / whole:.0%})" if whole else ""
        names = own[0].name if len(own) == 1 else f"{own[0].name} … {own[-1].name}"
        parts.append(names + share)
    return " | ".join(parts)
