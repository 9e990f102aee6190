"""Where networks are cut: names, balance, and what is seen of the blocks."""

from __future__ import annotations

import itertools
import random
import time
from contextlib import nullcontext

import pytest
import torch
from helpers.compose import built

from models.convnet import ConvNet
from runner.config.errors import ConfigError
from runner.parallel.pipelining import partition as cuts
from runner.parallel.pipelining.partition import Block, Cuts, balanced, parsed, probed, stages_of, told

NAMES = ["stem", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "head"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [(["layer2.0"], [3]), (["layer2"], [3]), (["layer1", "layer2.1"], [1, 4]), (["layer1.1", "head"], [2, 5])],
)
def test_a_cut_is_a_block_or_the_layer_that_it_begins(asked: list[str], found: list[int]) -> None:
    assert parsed(asked, NAMES) == found


@pytest.mark.parametrize(
    ("asked", "told_of"),
    [
        (["layr2.1"], "did you mean layer2.1 or"),
        (["stem"], "nothing comes before it"),
        (["layer2", "layer1"], "parallel.cuts=[layer1.0,layer2.0]"),
        (["layer2", "layer2.0"], "each once"),
    ],
)
def test_a_place_where_no_cut_can_be_is_refused(asked: list[str], told_of: str) -> None:
    with pytest.raises(ConfigError, match=r"^parallel\.cuts: got") as refusal:
        parsed(asked, NAMES)
    assert told_of in str(refusal.value)


def every_partition(count: int, pieces: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(1, count), pieces - 1))


def longest(seconds: list[float], cut: tuple[int, ...] | list[int]) -> float:
    borders = [0, *cut, len(seconds)]
    return max(sum(seconds[a:b]) for a, b in itertools.pairwise(borders))


@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
def test_the_longest_piece_is_as_short_as_of_any_partition(pieces: int) -> None:
    draw = random.Random(0)
    for _ in range(20):
        seconds = [draw.random() ** 3 for _ in range(draw.randint(pieces, 9))]
        found = balanced(seconds, pieces)
        best = min(longest(seconds, cut) for cut in every_partition(len(seconds), pieces))
        assert longest(seconds, found) == pytest.approx(best)
        assert len(found) == pieces - 1
        assert found == sorted(set(found))


def test_of_equally_long_partitions_the_most_even_is_taken() -> None:
    assert balanced([9, 1, 1, 1, 1], 3) == [1, 3]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"stages": 1}, "stages"),
        ({"cuts": 3}, "cuts"),
        ({"cuts": []}, "cuts"),
        ({"cuts": [1]}, "cuts"),
        ({"cuts": "layer2"}, "cuts"),
        ({"cuts": ["a", "b"], "stages": 2}, "stages"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict, key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Cuts(**options)
    assert refusal.value.key == key


def test_a_list_of_cuts_says_how_many_stages_there_are() -> None:
    assert Cuts(cuts=["layer2", "layer3"]).stages == 3


def test_the_checks_need_no_memory_for_the_weights() -> None:
    run = built("model=resnet50", "data.size=8", "parallel=pipeline", "parallel.cuts=[layer2]")
    run.workload.prepare()
    assert all(parameter.is_meta for parameter in cuts.network(run).parameters())
    with pytest.raises(ConfigError, match="the network has 18 blocks"):
        Cuts(stages=19).check_cuts(run, 19)


def test_a_network_that_does_not_say_where_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model: got 'Linear': .* it has no stages\(\)"):
        stages_of(torch.nn.Linear(1, 1))


class Slow(torch.nn.Module):
    """Takes its time, forward and backward."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds, self.weight = seconds, torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x * self.weight


def test_blocks_are_measured_as_they_compute() -> None:
    stages = [(str(seconds), Slow(seconds)) for seconds in (0.01, 0.03, 0.01)]
    blocks = probed(stages, torch.zeros(2, 3), nullcontext, False, timed=True)
    assert [block.name for block in blocks] == ["0.01", "0.03", "0.01"]
    assert 2 < blocks[1].seconds / blocks[0].seconds < 4
    assert all(parameter.grad is None for _, stage in stages for parameter in stage.parameters()), "copies were run"


@pytest.mark.parametrize("timed", [True, False])
def test_shapes_and_formats_are_seen_and_the_network_stays_as_it_is(timed: bool) -> None:
    model = ConvNet(1, 8, 8, 10, channels=[4, 8], kernel_size=3, padding=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    blocks = probed(model.stages(), torch.zeros(5, 1, 8, 8), lambda: torch.autocast("cpu", torch.bfloat16), True, timed)
    assert [block.shape for block in blocks] == [(4, 4, 4), (8, 2, 2), (50,), (10,)]
    assert {block.dtype for block in blocks} == {torch.bfloat16}
    assert all((block.seconds > 0) is timed for block in blocks)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training


def test_pieces_are_told_with_their_shares() -> None:
    blocks = [Block(name, seconds, (), torch.float32) for name, seconds in (("a", 1), ("b", 2), ("c", 1))]
    assert told(blocks, [0, 1, 3]) == "a (25%) | b … c (75%)"
    assert told([block._replace(seconds=0.0) for block in blocks], [0, 2, 3]) == "a … b | c"
