"""Tests of data sets of users: what is handed to their code is theirs, and what they define is used or refused."""

from __future__ import annotations

import threading
from collections import UserList
from enum import Enum
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from helpers import user_objects
from helpers.array_likes import Closed, Column, Group, Table, masked_positive
from helpers.plain_loop import largest_difference, weights_at
from helpers.user_objects import (
    TENSORS,
    ByLists,
    Counts,
    Half,
    Noisy,
    Normalized,
    NormalizedSubset,
    Plain,
    Rows,
    changes_inputs,
    changes_targets,
    counts_ones,
)
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)  # fmt: skip

import runner
from runner.commands import convert
from runner.config.errors import ConfigError
from runner.config.user_code import passed, using
from runner.data.base import DataError
from runner.data.fetch import Fetch, Job
from runner.data.user import UserData

FILES = {"model": "changes_inputs", "data": "TENSORS"}
CPU = ["device=cpu", "device.threads=1", "optimizer=sgd", "schedule=constant", "batch_size=12", "log_every=1"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors that are handed to code of the user may be changed in place


def from_one(data: Any) -> Any:
    return tuple((each.tensors[0].clone(), each.tensors[1] + 1) for each in data)


@pytest.mark.parametrize("mode", ["single", "fsdp", "ensemble", "pipeline", "pipeline parallel.engine=streams"])
def test_operations_in_place_change_nothing_of_the_data_nor_of_what_is_measured(mode):
    words = [*CPU, "optimizer.lr=1e-30", "steps=3", "eval_every=1", "precision=32", *f"parallel={mode}".split()]
    data, model = from_one(TENSORS), changes_inputs()
    before = [tensor.clone() for pair in data for tensor in pair]
    metrics = {"first": counts_ones, "second": counts_ones}
    result = runner.train(words, model=model, data=data, loss=changes_targets, metrics=metrics)
    run = runner.load(result.directory, model=model, data=data, loss=changes_targets, metrics=metrics)
    with torch.no_grad():
        wanted = cross_entropy(model(before[2].clone()), before[3] - 1).item()
    curves, ones = run.curves(), (before[3] == 1).double().mean().item()
    for step in (1, 2, 3):
        assert curves["eval/loss"][step] == pytest.approx(wanted, rel=1e-5)
        assert curves["eval/first"][step] == curves["eval/second"][step] == pytest.approx(ones)
    assert run.evaluate("last") == result.evaluation
    assert all(now.equal(then) for now, then in zip((t for pair in data for t in pair), before, strict=True))


def test_verify_and_convert_give_each_pass_inputs_of_its_own():
    code = {"model": changes_inputs(), "data": from_one(TENSORS), "loss": changes_targets}
    found = runner.verify([*CPU, "accumulation=2"], **code)
    assert found.verdict == 0, str(found)
    words = [f"{part}={user_objects.__file__}:{name}" for part, name in FILES.items()]
    result = runner.train([*CPU, "steps=1", *words])
    assert convert.main([str(result.directory), "net.pt2", *words]) == 0
    network, inputs = runner.load(result.directory, model=changes_inputs).model("last"), TENSORS[1].tensors[0]
    program = torch.export.load("net.pt2").module()
    torch.testing.assert_close(program(inputs.clone()), network(inputs.clone()))


# ---------------------------------------------------------------------------------------------------------------------
# What a data set defines


def loaded(data: Any) -> tuple[Any, Any]:
    with using(passed(data=data)):
        return UserData().load()


def in_order(samples: Any) -> tuple[torch.Tensor, torch.Tensor]:
    [batch] = samples.in_order(999, (0, 1), torch.device("cpu"))
    return batch


def test_samples_are_those_that_a_loader_takes_from_subclasses():
    whole, (rows, more) = TENSORS[0], TENSORS[0].tensors
    sets = [Normalized(rows, more), NormalizedSubset(whole, range(5, 40)), ByLists(rows, more), Half(rows, more)]
    sets += [Subset(Normalized(rows, more), range(3, 50)), Subset(Subset(whole, range(9, 50)), [5, 2, 7])]
    sets += [Subset(whole, torch.arange(5, 9))]  # pyright: ignore[reportArgumentType]
    for dataset in sets:
        train, held_out = loaded((dataset, Normalized(rows, more)))
        [(inputs, targets)] = DataLoader(dataset, batch_size=99)
        assert in_order(train)[0].equal(inputs)
        assert in_order(train)[1].equal(targets)
        joined = train.joined(held_out)
        assert in_order(joined)[0].equal(torch.cat([inputs, rows / 4 - 1]))
    parts = [in_order(samples)[0] for samples in loaded(ByLists(rows, more))]
    assert sorted(torch.cat(parts).tolist()) == sorted((rows / 4 - 1).tolist())


class Pets(Dataset):
    def __init__(self, classes: Any = "cat dog"):
        self.classes = classes

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3), index % 3


NAMES = ["cat", "dog", "owl"]


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        (NAMES, NAMES),
        (tuple(NAMES), NAMES),
        (np.array(NAMES), NAMES),
        (pandas.Index(NAMES), NAMES),
        (pandas.Series(NAMES), NAMES),
        (pandas.Categorical(NAMES), NAMES),
        ({"cat": 0, "dog": 1, "owl": 2}, NAMES),
        ({0: "cat", 1: "dog", 2: "owl"}, NAMES),
        ({*NAMES}, NAMES),
        (torch.arange(3), ["0", "1", "2"]),
        (3, ["0", "1", "2"]),
        (np.int64(3), ["0", "1", "2"]),
        (torch.tensor(3), ["0", "1", "2"]),
        (dict.fromkeys(NAMES).keys(), NAMES),
        (UserList(NAMES), NAMES),
        (pandas.CategoricalIndex(NAMES), NAMES),
        ({"owl": 2, "cat": 0, "dog": np.int64(1)}, NAMES),
        ({2: "owl", 0: "cat", 1: "dog"}, NAMES),
        (Enum("Animals", NAMES), ["Animals.cat", "Animals.dog", "Animals.owl"]),
    ],
)
def test_classes_may_be_a_list_an_array_a_mapping_or_a_number(classes, names, caplog):
    for data in (Pets(classes), Subset(Pets(classes), range(6)), Subset(Subset(Pets(classes), range(6)), range(4))):
        train, held_out = loaded((data, data))
        assert train.class_names == held_out.class_names == names
    arrays = TensorDataset(torch.zeros(6, 3), torch.arange(6) % 3)
    arrays.classes = classes  # pyright: ignore[reportAttributeAccessIssue]
    assert loaded(arrays)[0].class_names == names
    assert not caplog.messages


@pytest.mark.parametrize("classes", ["cat dog", True, 0, ["cat", "cat"], np.eye(3), object(), lambda: NAMES, 2.5])
def test_classes_that_are_no_names_are_not_used_and_this_is_said(classes, caplog):
    assert loaded((Pets(classes), Pets(None)))[0].class_names == []
    [said] = caplog.messages
    assert said.startswith("data: the attribute classes of Pets is not used")


X, Y = TENSORS[0].tensors
MASKED = np.ma.masked_equal(np.where(np.arange(300).reshape(60, 5) == 33, -999.0, 1.0), -999.0)
RECORDS = np.array([(1.0, 2)] * 60, [("a", "f4"), ("b", "i4")])
DATED = Table({"a": Column(np.zeros(60)), "b": Column(np.array(["2026-01-01T00:00"] * 60, "M8[us]"))})
MISSING = pandas.array([1, None, *[2] * 58], dtype="Int64")


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        ((MASKED, Y), ("row 6, column 3 is masked", "filled(")),
        ((X, np.ma.masked_equal(Y.numpy(), 2)), ("row ", "is masked")),
        ((pandas.DataFrame({"a": MISSING}), Y), ("row 1, column a is <NA>",)),
        ((RECORDS, Y), ("row 0 is ", "no number")),
        ((X, pandas.Series(pandas.date_range("2026-01-01", periods=60))), ("row 0", "no number")),
        ((X, np.array(["1.5"] * 60, object)), ("row 0 is '1.5', no number",)),
        ((np.array([2**63 + 5] * 60, np.uint64), Y), (f"{2**63 + 5} is larger than the largest integer",)),
        ((X, np.array(3.0)), ("it is a single value",)),
        ((Column(MASKED), Y), ("row 6, column 3 is masked",)),
        ((X, Column(Y.numpy(), 2)), ("2 of its values are missing",)),
        ((Table({"a": Column(np.zeros(60), 1), "b": Column(np.zeros(60))}), Y), ("1 of its values are missing",)),
        (pandas.DataFrame({"a": [1.0] * 9, "label": [1] * 9}), ("columns, and no samples", "table[[…]]")),
        ((DATED, Y), ("row 0, column b is datetime.datetime(2026, 1, 1", "no number")),
        ((masked_positive(X), Y), ("a masked tensor",)),
        ((X.to_sparse(), Y), ("a sparse_coo tensor", "dense")),
        ((X, Y, Y), ("3 arrays", "several targets")),
        (TensorDataset(X, Y, Y), ("3 arrays", "several targets")),
        (TensorDataset(X), ("1 arrays",)),
        (((X, Y), (X[:0], Y[:0])), ("there are 0 inputs and 0 targets", "held-out ones are needed")),
        (
            (pair for pair in zip(X, Y, strict=True)),
            ("read once only", "__iter__ of a torch.utils.data.IterableDataset"),
        ),
        (Subset(TensorDataset(X, Y, Y), range(9)), ("3 arrays",)),
        (Plain([(torch.zeros(2), 1, 2)] * 9), ("sample 0 is tuple of 3",)),
        (Plain([(MASKED[6], 1)] * 9), ("sample", "mask")),
        (Plain([(masked_positive(X[0]), 1)] * 9), ("sample", "mask")),
        (DataLoader(TENSORS[0], shuffle=True), ("pass loader.dataset",)),
        ((DataLoader(TENSORS[0]), DataLoader(TENSORS[1])), ("pass loader.dataset",)),
        ([DataLoader(TENSORS[0]), DataLoader(TENSORS[1])], ("pass loader.dataset",)),
        (DataLoader(TENSORS[0], sampler=WeightedRandomSampler([1] * 60, 60)), ("what its sampler did",)),
        (DataLoader(TENSORS[0], batch_sampler=BatchSampler(SequentialSampler(range(60)), 7, True)), ("dataset",)),
        (DataLoader(TENSORS[0], collate_fn=list), ("what its collate_fn did",)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) and isinstance(value[0], str) else "",
)
def test_data_that_would_be_used_in_another_way_than_meant_is_refused_in_words(data, texts):
    with pytest.raises(ConfigError) as refused:
        loaded(data)
    assert all(text in f"{refused.value.why} {refused.value.remedy}" for text in texts), refused.value


def test_arrays_without_masked_values_and_large_types_are_numbers():
    wanted = in_order(loaded(((X, Y), (X, Y)))[0])
    unmasked, large = np.ma.masked_equal(X.numpy(), -999.0), np.array(Y.numpy(), np.uint64)
    for pair in ((unmasked, large), (X.numpy().astype(np.longdouble), Y.numpy().astype(np.uint16))):
        found = in_order(loaded((pair, (X, Y)))[0])
        assert found[0].equal(wanted[0])
        assert found[1].equal(wanted[1])
    for group in ((Group(part=Group(x=X)), Y), Group(part=Group(x=X), labels=Y)):
        assert in_order(loaded((group, ({"part": {"x": X}}, Y)))[0])[0]["part"]["x"].equal(wanted[0])


class Made(Rows):
    def __init__(self):
        super().__init__(30)


class NeedsCount(Rows):
    pass


def test_a_class_of_data_is_called_like_a_function():
    assert len(loaded(Made)[0]) == 24
    assert [len(samples) for samples in loaded((Made, Made))] == [30, 30]
    with pytest.raises(ConfigError, match="count"):
        loaded(NeedsCount)


# ---------------------------------------------------------------------------------------------------------------------
# Generators of random numbers


def test_a_sample_draws_the_same_numbers_wherever_it_is_read(caplog):
    first, second = Fetch(Noisy(9)), Fetch(Subset(Noisy(20), [8, 3]))
    whole, _ = first(Job([*range(9)], [*range(100, 109)]))
    part, _ = second(Job([0, 1], [108, 103]))
    assert part.equal(whole[[8, 3]])
    other, _ = second(Job([0, 1], [208, 203]))
    assert not (other == part).any(), "another epoch"
    assert not (whole.diff(dim=0) == 1).any(), "samples draw different numbers"
    loaded((Noisy(9), Rows(9, noise=0)))
    assert not caplog.messages


class Opens(Noisy):
    """It makes what cannot be sent for its first sample, as a file of HDF5: workers get it as it was before that."""

    lock: Any = None
    file = Closed()

    def __getitem__(self, index: int) -> Any:
        self.lock = self.lock or threading.Lock()
        return super().__getitem__(index)


def test_generators_of_a_data_set_do_not_repeat_in_workers_and_a_resume_is_bitwise():
    data, opened = (Noisy(48), Noisy(12)), (Opens(48), Opens(12))
    words = [*CPU, "steps=4", "save_every=2", "eval_every=0"]
    network = lambda: torch.nn.Linear(5, 3)  # noqa: E731
    whole = runner.train(words, model=network, data=data)
    workers = runner.train([*words, "data.workers=2"], model=network, data=opened)
    other = weights_at(workers.directory, 4)
    with pytest.raises(ConfigError) as refused:
        runner.train([*words, "data.workers=2"], model=network, data=opened)
    assert (refused.value.key, "first __getitem__" in refused.value.remedy) == ("data.workers", True)
    assert largest_difference(weights_at(whole.directory, 4), other) == 0
    runner.train([f"resume={whole.directory}/checkpoints/step_00000002"], model=network, data=(Noisy(48), Noisy(12)))
    assert largest_difference(weights_at(whole.directory, 4), other) == 0


def test_samples_that_change_each_time_are_said(caplog):
    loaded((Counts([(torch.zeros(5), 0)] * 9), Rows(9, noise=0)))
    [said] = caplog.messages
    assert said.startswith("data: sample 0 of Counts is another each time")


def test_held_out_samples_that_are_augmented_are_said(caplog):
    for data in (Rows(40), (Rows(40), Rows(9)), (Rows(40), Noisy(9))):
        loaded(data)
        [said] = caplog.messages
        assert "held-out samples of" in said
        caplog.clear()


# ---------------------------------------------------------------------------------------------------------------------
# Arrays and errors


class Mapped(Dataset):
    def __init__(self, x: np.ndarray, y: np.ndarray):
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def test_arrays_that_are_mapped_to_files_or_read_only_are_read_without_a_warning(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    mapped, targets = np.load(tmp_path / "x.npy", mmap_mode="r"), Y.numpy().copy()
    targets.flags.writeable = False
    for data in ((mapped, targets), Mapped(mapped, targets)):
        inputs, found = in_order(loaded((data, data))[0])
        assert inputs.equal(X)
        assert found.equal(Y)


class Ends(Rows):
    def __init__(self, error: type[Exception]):
        super().__init__(30)
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise self.error("the end")
        return super().__getitem__(index)


@pytest.mark.parametrize("error", [IndexError, StopIteration])
def test_an_error_that_ends_loops_in_python_does_not_end_the_samples(error):
    train, _ = loaded((Ends(error), Rows(9)))
    with pytest.raises(DataError, match=r"sample 7 of Ends"):
        in_order(train)


class FailsAtOnce(Rows):
    def __getitem__(self, index):
        raise KeyError("no sample")


class StreamFails(IterableDataset):
    def __iter__(self):
        raise KeyError("no sample")


def collate_fails(samples):
    raise KeyError("no batch")


@pytest.mark.parametrize(
    ("given", "why", "remedy"),
    [
        ({"data": (FailsAtOnce(9), FailsAtOnce(9))}, "sample 0 of FailsAtOnce: KeyError: 'no sample' (", "__getitem__"),
        (
            {"data": (StreamFails(), StreamFails())},
            "the beginning of StreamFails: KeyError: 'no sample' (",
            "its __iter__",
        ),
        (
            {"data": (Rows(9), Rows(9)), "collate": collate_fails},
            "collate: KeyError: 'no batch' (",
            "correct collate (",
        ),
    ],
)
def test_samples_that_cannot_be_read_at_first_are_refused_with_one_remedy(given, why, remedy):
    with using(passed(**given)), pytest.raises(ConfigError) as refused:
        UserData().load()
    assert refused.value.why.startswith(why)
    assert remedy in refused.value.remedy
    assert "correct" not in refused.value.why


def test_columns_of_held_out_tables_are_matched_by_name():
    def held_out_inputs(held_out: Any) -> list[list[float]]:
        table = pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
        with using(passed(data=((table, np.zeros(2)), (held_out, np.ones(1))))):
            return UserData().load()[1].inputs.tolist()

    other = pandas.DataFrame({"b": [6.0], "a": [5.0]})
    assert held_out_inputs(other) == [[5.0, 6.0]]
    assert held_out_inputs(Table({"b": Column(np.array([6.0])), "a": Column(np.array([5.0]))})) == [[5.0, 6.0]]
    with pytest.raises(ConfigError, match="'c', 'a'"):
        held_out_inputs(other.rename(columns={"b": "c"}))
