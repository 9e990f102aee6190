"""Tests of collectives, with one process and with three."""

import math
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoint_edits import Call
from helpers.ranks import Ranks
from helpers.runs import assert_bitwise_equal

from runner.config.errors import ABSENT, ConfigError
from runner.device import Device
from runner.parallel.collectives import Collectives, decode, encode
from runner.parallel.ddp import DDP
from runner.parallel.launch.supervisor import LostError

Work = Callable[[Collectives], Any]


@contextmanager
def joined() -> Iterator[Collectives]:
    """In a rank: a context that yields the collectives of all ranks."""
    with DDP().launcher(Device(kind="cpu")).connect() as process:
        yield process


def in_rank(work: Work) -> Any:
    with joined() as collectives:
        return work(collectives)


@pytest.fixture
def on_three(ranks: Ranks) -> Callable[[Work], list[Any]]:
    """Return a function that runs `work(collectives)` on three ranks, and returns the result of each."""
    return lambda work: ranks(3).call_on_all(in_rank, work)


def sums_and_lists(collectives: Collectives) -> Any:
    rank = collectives.rank
    return collectives.all_reduce({"sum": torch.tensor(rank + 1), "list": [rank, {"row": torch.full((rank,), rank)}]})


def test_tensors_are_added_and_lists_joined_in_the_order_of_the_ranks(on_three):
    joined = [each for rank in range(3) for each in (rank, {"row": torch.full((rank,), rank)})]
    for found in on_three(sums_and_lists):
        assert_bitwise_equal(found, {"sum": torch.tensor(6), "list": joined})
    alone = {"sum": torch.tensor(1), "list": [0, {"row": torch.zeros(0, dtype=torch.int64)}]}
    assert_bitwise_equal(sums_and_lists(Collectives([torch.device("cpu")])), alone)


def test_a_message_restores_values_and_tensors():
    value = [None, True, 0.1, math.inf, "ü\n", [], {"lr": 1e-300, None: (2, ()), ("weight", "step"): torch.bfloat16}]
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        value += [(torch.randn(shape) * 3).to(dtype) for shape in ((), (0, 3), (2, 3))]
    assert_bitwise_equal(decode(encode(value)), value)


EXECUTES = Call(os.system, "touch executed")


@pytest.mark.cases(
    pickle.dumps(EXECUTES, 2),
    *map(encode, ([EXECUTES], [object()], print, [torch.nn.Linear], Path())),
    b"",
    b"{}",
    ids=range(8),
)
def test_other_messages_are_refused_and_execute_nothing(message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=NOT_SENT):
        decode(message)
    assert not list(tmp_path.iterdir())


def test_reductions_and_gathered_values(on_three, tmp_path):
    first, *others = found = on_three(partial(reduced_and_gathered, tmp_path))
    for rank, each in enumerate(found):
        assert each["numbers"] == (rank, 3)
        assert each["totals"] == {"loss": [3.0, 6.0], "count": 30}
        assert each["arguments"] == {"loss": [float(rank), 2.0], "count": 10}, "unchanged"
        assert each["ranks"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert each["files after a barrier"] == ["0", "1", "2"]
    assert sum(each["share"] for each in found) == 7.0

    assert [each["rank 0"] for each in others] == [{}, {}]
    gathered = first["rank 0"]
    assert gathered.keys() == {"shared", "of 0", "of 1", "of 2", "number"}
    assert gathered["shared"].tolist() == [0.0, 0.0], "of the lowest rank"
    assert gathered["number"] == 0
    for rank in range(3):
        own = gathered[f"of {rank}"]
        assert own.dtype == (torch.float32, torch.int64, torch.bfloat16)[rank]
        assert own.tolist() == [[rank, rank], [rank + 1, rank + 1], [rank + 2, rank + 2]]


def reduced_and_gathered(directory: Path, collectives: Collectives) -> dict[str, Any]:
    rank, dtypes = collectives.rank, (torch.float32, torch.int64, torch.bfloat16)
    sums = {"loss": torch.tensor([float(rank), 2.0]), "count": torch.tensor(10)}
    totals = collectives.all_reduce(sums)
    (directory / str(rank)).touch()
    collectives.barrier()
    files = sorted(path.name for path in directory.iterdir())
    own = torch.stack([torch.arange(rank, rank + 3)] * 2).to(dtypes[rank]).t()
    assert not own.is_contiguous()
    named = {"shared": torch.full((2,), float(rank)), f"of {rank}": own, "number": rank}
    return {
        "numbers": (rank, collectives.world_size),
        "totals": {name: tensor.tolist() for name, tensor in totals.items()},
        "arguments": {name: tensor.tolist() for name, tensor in sums.items()},
        "share": float(collectives.local_share(torch.tensor(7.0))),
        "ranks": collectives.all_gather({"rank": rank}),
        "files after a barrier": files,
        "rank 0": collectives.gather_to_rank0(named),
    }


def test_any_rank_returns_the_result_of_the_previous_call_on_all_ranks(on_three):
    """The all-reduce that is pending at the end of a run is waited for, and does not affect the next run."""
    for _ in range(2):
        assert on_three(call_any_rank) == [[False, False, True, False]] * 3


def call_any_rank(collectives: Collectives) -> list[bool]:
    """Call `any_rank` in four steps; only rank 1 passes true, in the second step."""
    return [collectives.any_rank(collectives.rank == 1 and step == 1) for step in range(4)]


NOT_SENT = "a message from another rank has other values than plain ones, tensors and dtypes"


def test_from_rank_0_returns_or_raises_on_all_ranks(on_three):
    refused, unsent = "ConfigError: steps: got -1: they are counted\n  steps=1", f"ValueError: {NOT_SENT}"
    error, lost = "ValueError: no", "LostError: rank 0 failed: ValueError: no"
    assert on_three(decided) == [["by rank 0", text, refused, unsent] for text in (error, lost, lost)]


def decided(collectives: Collectives) -> list[str]:
    """Return the result of `from_rank_0`, and the errors that it raises after two errors and an object on rank 0."""
    texts = [collectives.from_rank_0(lambda: f"by rank {collectives.rank}")]
    refusal = ConfigError("steps", -1, "they are counted", "steps=1")
    for make in (partial(raise_it, ValueError("no")), partial(raise_it, refusal), object):
        with pytest.raises((ValueError, LostError, ConfigError)) as caught:
            collectives.from_rank_0(make)
        texts.append(f"{type(caught.value).__name__}: {caught.value}")
    return texts


def raise_it(error: Exception) -> None:
    raise error


def test_a_refusal_of_any_rank_is_raised_on_all_ranks(on_three):
    for rank, (number, errors) in enumerate(on_three(agreed)):
        assert number == rank
        for error, got in zip(errors, REFUSED, strict=True):
            assert (error.key, error.why, error.remedy) == ("rank 1", "no", "nothing")
            assert error.got == got or str(error.got) == str(got) == "Identity()"


REFUSED = [3, None, ABSENT, [1, "two"], torch.nn.Identity()]


def agreed(collectives: Collectives) -> tuple[int, list[Any]]:
    """Return the result of `on_all_ranks` where no rank refuses, and the errors where all but rank 0 do."""

    def refuse(got: Any) -> None:
        if collectives.rank > 0:
            raise ConfigError(f"rank {collectives.rank}", got, "no", "nothing")

    number, errors = collectives.on_all_ranks(lambda: collectives.rank), []
    for got in REFUSED:
        with pytest.raises(ConfigError) as refusal:
            collectives.on_all_ranks(partial(refuse, got))
        errors.append(refusal.value)
    return number, errors
