"""Tests of streams: which samples are read, what they draw, where they go on, and what is refused."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.command import ROOT
from helpers.plain_loop import largest_difference, weights_at
from helpers.streams import COUNT, KINDS, Rows, Stateful, network, plain_weights, samples
from torch.utils.data import IterableDataset, get_worker_info

import runner
from runner.batching import Plan
from runner.commands import plan
from runner.config.errors import ConfigError
from runner.config.user_code import passed, using
from runner.data.base import DataError
from runner.data.user import UserData
from runner.result import CrashedError

CPU = torch.device("cpu")
SHORT = ["device=cpu", "device.threads=1", "batch_size=12", "optimizer=sgd", "schedule=constant", "eval_every=0"]


def loaded(train: Any, held_out: Any = None, **options: Any) -> tuple[Any, Any]:
    with using(passed(data=(train, held_out or Rows()))):
        return UserData(**options).load()


def first_batches(train: Any, plan: Plan, count: int, after_step: int = 0) -> list[Any]:
    return [*itertools.islice(train.batches(plan.stream(after_step), plan.seed, CPU), count)]


def joined(batches: list[Any]) -> torch.Tensor:
    return torch.cat([batch.inputs for batch in batches])


@pytest.mark.parametrize("kind", KINDS)
def test_processes_and_micro_batches_read_slices_of_the_same_stream(kind):
    wanted = torch.stack([inputs for inputs, _ in samples(kind, 96, seed=5)])
    train, _ = loaded(KINDS[kind]())
    whole = Plan(12, seed=5)
    assert joined(first_batches(train, whole, 8)).equal(wanted)
    assert joined(first_batches(train, whole, 3, after_step=5)).equal(wanted[60:])
    for rank in range(2):
        part = Plan(12, accumulation=3, seed=5).sharded(rank, 2)
        rows = wanted.view(8, 2, 6, 6)[:, rank].flatten(0, 1)
        assert joined(first_batches(train, part, 24)).equal(rows)


def test_iterations_that_take_turns_read_the_same_samples_as_alone():
    train, held_out = loaded(KINDS["Noisy"](), KINDS["Noisy"]())
    alone = [first_batches(train, Plan(12), 4), [*held_out.in_order(7, (0, 1), CPU)]]
    together = train.batches(Plan(12).stream(0), 0, CPU)
    found = []
    for _ in range(4):
        found.append(next(together))
        assert joined([*held_out.in_order(7, (0, 1), CPU)]).equal(joined(alone[1]))
        assert joined(first_batches(train, Plan(12), 1)).equal(alone[0][0].inputs)
    assert joined(found).equal(joined(alone[0]))


@pytest.mark.parametrize("most", [None, 17])
def test_an_evaluation_reads_a_stream_to_its_end_or_as_far_as_is_said(most):
    _, held_out = loaded(Rows(), Rows(23), eval_samples=most)
    wanted = Rows(23).inputs[:most]
    assert joined([*held_out.in_order(5, (0, 1), CPU)]).equal(wanted)
    shards = [[*held_out.in_order(5, (rank, 3), CPU)] for rank in range(3)]
    in_order = [batch for group in itertools.zip_longest(*shards) for batch in group if batch is not None]
    assert joined(in_order).equal(wanted)


def test_an_evaluation_that_does_not_end_says_what_ends_it(monkeypatch, caplog):
    monkeypatch.setattr("runner.data.stream._SECONDS", 0.0)

    class Endless(Rows):
        def __iter__(self) -> Iterator[Any]:
            return itertools.cycle(super().__iter__())

    _, held_out = loaded(Rows(), Endless())
    next(itertools.islice(held_out.in_order(5, (0, 1), CPU), 3, None))
    assert "data.eval_samples=N" in caplog.messages[-1]


@pytest.mark.parametrize(("kind", "workers"), [("Stateful", 0), ("Stateful", 1), ("Shuffled", 0)])
def test_a_stream_goes_on_by_its_state_if_that_is_exact(kind, workers, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("runner.data.stream_reader._DISTANCE", 24)
    train, _ = loaded(KINDS[kind](), workers=workers)
    wanted = first_batches(train, Plan(12), 9)
    for step in (0, 1, 3, 5, 8) if workers else range(9):
        batches = train.batches(Plan(12).stream(0), 0, CPU)
        for _ in range(step):
            next(batches)
        state = train.state() if step else {}
        again, _ = loaded(KINDS[kind](), workers=workers)
        again.load_state(state)
        Stateful.num_read = 0
        caplog.clear()
        assert joined(first_batches(again, Plan(12), 1, after_step=step)).equal(wanted[step].inputs)
        if kind == "Stateful" and step >= 3:
            assert "by its load_state_dict" in caplog.messages[0]
            assert workers or Stateful.num_read <= 24 + 12 + 12 + 12
        elif step:
            assert f"data: {12 * step} samples of the stream are skipped" in caplog.messages[0]
        train.close()
        again.close()


@pytest.mark.parametrize(("kind", "why"), [("Late", "it yields others"), ("Fussy", "it raises KeyError")])
def test_a_state_that_does_not_help_is_said(kind, why, caplog):
    caplog.set_level(logging.INFO)
    train, _ = loaded(KINDS[kind]())
    wanted = first_batches(train, Plan(12), 5)
    again, _ = loaded(KINDS[kind]())
    again.load_state(train.state())
    assert joined(first_batches(again, Plan(12), 1, after_step=4)).equal(wanted[4].inputs)
    assert f"data: 48 samples of the stream are skipped, as {why}" in " ".join(caplog.messages)


def test_a_state_that_no_checkpoint_holds_is_said(caplog):
    train, _ = loaded(KINDS["Unsaved"]())
    first_batches(train, Plan(12), 5)
    assert train.state() == {}
    assert "a checkpoint does not hold what its state_dict returns" in caplog.messages[0]


def test_samples_that_are_skipped_and_a_stream_that_begins_anew_are_said(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("runner.data.stream._SECONDS", 0.0)
    monkeypatch.setattr("runner.data.stream._SLICE", 10)
    train, _ = loaded(Rows())
    train.load_state({})
    first_batches(train, Plan(12), 8, after_step=5)
    assert "data: 60 samples of the stream are skipped, as it has no state_dict and load_state_dict" in caplog.messages
    assert "data: 10 of 60 samples of the stream are skipped" in caplog.messages
    assert [text for text in caplog.messages if "anew" in text] == [
        f"data: the stream ended after {COUNT} samples, and begins anew"
    ]


class Locked(Rows):
    """Holds a lock while it is read, so that it can neither be copied nor read twice at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        assert self.lock.acquire(blocking=False), "it is being read"
        try:
            yield from super().__iter__()
        finally:
            self.lock.release()


def test_a_stream_that_can_be_read_once_at_a_time_is_closed_before_it_is_read_again():
    train, _ = loaded(Locked())
    for _ in range(2):
        assert joined(first_batches(train, Plan(12), 2)).equal(Rows(24).inputs)
    train.close()
    assert not train._reader.dataset.lock.locked()


class Once(IterableDataset):
    """Ends for good: __iter__ returns the same iterator, which cannot be copied."""

    def __init__(self) -> None:
        self.rows = (row for row in Rows())

    def __iter__(self) -> Iterator[Any]:
        return self.rows


class Position(Rows):
    """Is its own iterator, and never begins anew by itself."""

    at = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.at == COUNT:
            raise StopIteration
        self.at += 1
        return self.inputs[self.at - 1], self.targets[self.at - 1]


def test_a_stream_that_keeps_its_position_is_read_from_where_it_was_given():
    stream = Position()
    train, _ = loaded(stream)
    for _ in range(2):
        assert joined(first_batches(train, Plan(12), 3)).equal(Rows(36).inputs)
    assert stream.at == 0
    with pytest.raises(DataError, match="no samples in pass 2, after 40 in the ones before"):
        first_batches(train, Plan(12), 4)


class Restless(Rows):
    """Yields other samples each time, whatever the seeds are."""

    turns = itertools.count()

    def __iter__(self) -> Iterator[Any]:
        turn = next(Restless.turns)
        return ((inputs + turn, target) for inputs, target in zip(self.inputs, self.targets, strict=True))


def test_samples_that_change_from_one_reading_to_the_next_are_said(caplog):
    loaded(Restless())
    assert "the first samples of Restless are others each time that it is read" in caplog.messages[0]


class Fails(Rows):
    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(super().__iter__(), 20)
        raise ValueError("a damaged file")


class Ragged(Rows):
    def __iter__(self) -> Iterator[Any]:
        for number, (inputs, target) in enumerate(super().__iter__()):
            yield (inputs, target, 0) if number == 3 else (inputs, target)


class Empty(Rows):
    def __init__(self) -> None:
        super().__init__(0)


def generator() -> Iterator[Any]:
    yield from Rows()


@pytest.mark.cases(
    (["steps=2"], (Empty(), Rows()), "it yields no samples"),
    (["steps=2"], (Once(), Rows()), "it yields no samples when it is read again|are others"),
    (["steps=2"], Rows(), "no share can be held out"),
    (["steps=2"], generator, "an iterator can be read once only"),
    (["steps=2"], (Ragged(), Rows()), "sample 3 is tuple of 3"),
    ([], (Rows(), Rows()), "steps=… is required"),
    (["epochs=2"], (Rows(), Rows()), "steps=… is required"),
    (["steps=2", "data.workers=2"], (Rows(), Rows()), "one process"),
    (["steps=2", "data.eval_samples=9"], ([*Rows()], [*Rows()]), "the held-out samples are no stream"),
)
def test_what_cannot_be_trained_on_is_refused(words, data, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=text):
        runner.train([*SHORT, *words], model=network, data=data)


def test_one_stream_for_both_is_refused_if_it_cannot_be_copied(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stream = Locked()
    with pytest.raises(ConfigError, match="pass two objects"):
        runner.train([*SHORT, "steps=2"], model=network, data=(stream, stream))


def test_an_error_of_a_stream_names_the_sample_and_the_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CrashedError, match=r"sample 20 of Fails: ValueError: a damaged file \(.*test_streams.py"):
        runner.train([*SHORT, "steps=4"], model=network, data=(Fails(), Rows()))


class Divided(Rows):
    """Takes every other sample in one of two workers of a `DataLoader`."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return itertools.islice(super().__iter__(), info.id if info else 0, None, info.num_workers if info else 1)


def test_a_stream_that_divides_itself_among_workers_is_read_whole_by_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [
        runner.train([*SHORT, "steps=2", f"data.workers={count}"], model=network, data=(Divided(), Rows()))
        for count in (0, 1)
    ]
    assert found[0].metrics["eval/loss"] == found[1].metrics["eval/loss"]


def test_a_run_on_a_stream_is_planned_verified_evaluated_and_has_its_first_samples_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = {"model": network, "data": (KINDS["Noisy"](), Rows(23))}
    assert plan.main([f"workload={ROOT / 'docs' / 'examples' / 'stream.py'}", "steps=2"]) == 0
    assert runner.verify([*SHORT, "accumulation=2"], **code).verdict == 0
    result = runner.train([*SHORT, "steps=2", "workload.overfit_batches=1"], **code)
    assert result.directory is not None
    run = runner.load(result.directory, **code)
    assert run.evaluate("last") == pytest.approx(result.evaluation)
    with pytest.raises(ConfigError, match="now, with other content"):
        runner.train(["steps=4", f"resume={result.directory}"], model=network, data=(Rows(), Rows(23)))


def test_the_batch_at_which_a_run_diverges_is_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = Rows()
    rows.inputs = rows.inputs.clone()
    rows.inputs[30] = float("nan")
    result = runner.train([*SHORT, "steps=4", "log_every=1"], model=network, data=(rows, Rows()))
    assert result.status == "diverged"
    assert result.directory is not None
    saved = torch.load(next(result.directory.glob("diverged_step_*")), weights_only=True)
    assert saved["inputs"].nan_to_num().equal(rows.inputs[24:36].nan_to_num())


def test_the_weights_are_those_of_a_plain_loop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["optimizer.lr=0.1", "optimizer.momentum=0", "optimizer.weight_decay=0", "precision=64", "steps=4"]
    result = runner.train([*SHORT, *words], model=network, data=(Stateful(), [*Rows()]))
    assert result.directory is not None
    assert largest_difference(weights_at(result.directory, 4), plain_weights("Stateful")) < 1e-12
