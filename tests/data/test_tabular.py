"""Tests of `data=tabular`: reading and standardizing tables, and errors that name the line and the column."""

import itertools
import logging
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers.checkpoint_edits import Call

from runner.batching import Plan
from runner.config.errors import ConfigError
from runner.data import tabular
from runner.data.memory import ArraySamples
from runner.data.tabular import TableSamples, Tabular, friedman, read_csv

CPU = torch.device("cpu")
HOUSES = "area,rooms,age,price\n" + "".join(f"{50 + i},{i % 5},{7 * i % 31},{1000 * i + 17}\n" for i in range(50))


def loaded(**options: Any) -> Any:
    return Tabular(**options).load()


def whole(samples: TableSamples) -> tuple[torch.Tensor, torch.Tensor]:
    [batch] = samples.in_order(10_000, (0, 1), CPU)
    return batch


def rows(*parts: TableSamples) -> torch.Tensor:
    """Return the inputs, flattened, and the targets of all samples, sorted."""
    pairs = [torch.cat((inputs.flatten(1), targets), 1) for inputs, targets in map(whole, parts)]
    return torch.tensor(sorted(torch.cat(pairs).tolist()))


def refusal(**options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        Tabular(**options).load()
    return refused.value


def written(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def houses(tmp_path) -> str:
    return written(tmp_path / "houses.csv", HOUSES)


def test_columns_are_chosen_by_name_and_by_default_the_last_is_the_target(houses):
    train, held_out = loaded(file=houses, standardize=False)
    assert (len(train), len(held_out), train.shape, train.target_names) == (40, 10, (3,), ["price"])
    wanted = [[float(cell) for cell in line.split(",")] for line in HOUSES.splitlines()[1:]]
    assert rows(train, held_out).tolist() == sorted(wanted)
    chosen, _ = loaded(file=houses, inputs=("age", "area"), targets=("price", "rooms"), standardize=False)
    area, rooms, age, price = torch.cat(whole(train), 1).T
    assert torch.equal(whole(chosen)[0], torch.stack((age, area), 1))
    assert torch.equal(whole(chosen)[1], torch.stack((price, rooms), 1))


def test_other_delimiters_byte_order_marks_blank_lines_and_spaces_are_read(tmp_path):
    file = written(tmp_path / "a.csv", "\ufeffx; y\n1; 2\n\n3;\t4\n5;6\n")
    assert rows(*loaded(file=file, delimiter=";", standardize=False)).tolist() == [[1, 2], [3, 4], [5, 6]]
    file = written(tmp_path / "a.tsv", "x\ty\n1\t2\n3\t4\n5\t6\n")
    assert rows(*loaded(file=file, standardize=False)).tolist() == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
@pytest.mark.parametrize("shape", [(30,), (30, 2)])
def test_arrays_are_read_in_any_shape(tmp_path, suffix, shape):
    arrays = {"inputs": numpy.random.rand(30, 4, 3), "targets": numpy.arange(numpy.prod(shape)).reshape(shape)}
    path = tmp_path / f"a{suffix}"
    if suffix == ".npz":
        numpy.savez(path, **arrays)
    else:
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    train, held_out = loaded(file=str(path), standardize=False)
    assert (train.shape, len(train), len(train.target_names)) == ((4, 3), 24, shape[1] if len(shape) == 2 else 1)
    wanted = numpy.concatenate([array.reshape(30, -1) for array in arrays.values()], 1)
    assert rows(train, held_out).tolist() == sorted(torch.from_numpy(wanted).float().tolist())


def test_inputs_and_targets_are_standardized_by_the_training_samples_alone(houses):
    raw_train, raw_held_out = (whole(samples) for samples in loaded(file=houses, standardize=False))
    train, held_out = loaded(file=houses)
    for part in range(2):
        mean, std = raw_train[part].mean(0), raw_train[part].std(0, correction=0)
        torch.testing.assert_close(whole(train)[part], (raw_train[part] - mean) / std)
        torch.testing.assert_close(whole(held_out)[part], (raw_held_out[part] - mean) / std)
        scale = train.standardization()[("inputs", "targets")[part]]
        torch.testing.assert_close(torch.tensor(list(scale.values())), torch.stack((mean, std)))
    assert held_out.standardization() == train.standardization()


def test_targets_that_are_all_the_same_are_said(tmp_path, caplog):
    lines = "".join(f"{i},0.1,{i},7\n" for i in range(9))
    loaded(file=written(tmp_path / "a.csv", f"x,constant,y,z\n{lines}"), targets=("y", "z"))
    assert [message.partition(" is the same")[0] for message in caplog.messages] == ["data.targets: z"]


def test_a_large_offset_costs_no_precision(tmp_path):
    def standardized(offset: int) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
        times = offset + numpy.round(numpy.arange(0, 1800, 1.8), 1)
        rows = "".join(f"{t:.1f},1700000000.1,{t:.1f}\n" for t in times)
        train, _ = loaded(file=written(tmp_path / f"{offset}.csv", f"time,constant,target\n{rows}"))
        return *whole(train), train.target_std

    (inputs, targets, std), (wanted, _, wanted_std) = standardized(1_700_000_000), standardized(0)
    torch.testing.assert_close(inputs, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(targets[:, 0], wanted[:, 0], rtol=0, atol=1e-6)
    assert std == pytest.approx(wanted_std)
    assert inputs[:, 1].abs().max() < 1e-6


def test_friedman_returns_the_published_function_plus_noise_and_the_same_samples_are_held_out():
    x, y, names, _ = friedman(200_000)
    assert (x.shape, y.shape, names) == ((200_000, 10), (200_000, 1), ["y"])
    wanted = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    noise = y[:, 0] - wanted
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01
    assert abs(float(y.var()) - 24.8) < 0.3
    first, again = loaded(num_samples=100), loaded(num_samples=100)
    assert torch.equal(whole(first[1])[0], whole(again[1])[0])
    assert len(torch.cat([whole(samples)[0] for samples in first]).unique(dim=0)) == 100, "each sample once"


@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
def test_batches_of_any_tensors_are_rows_in_the_order_of_the_stream(kind):
    inputs = torch.arange(7 * 3 * 2).reshape(7, 3, 2).to(kind)
    samples = ArraySamples(inputs, torch.arange(7))
    batches = list(itertools.islice(samples.batches(Plan(4, accumulation=2).stream(0), 0, CPU), 7))  # two epochs
    assert all(torch.equal(batch.inputs, inputs[batch.targets]) and batch.inputs.dtype == kind for batch in batches)
    seen = [target for batch in batches for target in batch.targets.tolist()]
    assert sorted(seen[:7]) == sorted(seen[7:]) == list(range(7))
    assert seen[:7] != seen[7:]
    shards = [batch for index in range(3) for batch in samples.in_order(2, (index, 3), CPU)]
    assert torch.equal(torch.cat([batch.inputs for batch in shards]), inputs)
    with pytest.raises(ValueError, match="different lengths: 6, 7"):
        ArraySamples(inputs, torch.arange(6))


@pytest.mark.cases(
    ("x,y\n1,2\n3,\n", "line 3, column y: '' is not a finite number"),
    ("x,y\n-1e39,2\n3,4\n", "line 2, column x: '-1e39' is not a finite number in float32"),
    ("x,y\n1,2\n\n3,4,5\n", "it is not a CSV file: Expected 2 fields in line 4, saw 3"),
    ('x,y\n"1,2\n', "it is not a CSV file: EOF inside string"),
    ("x\n1\n", "its first line has the columns ['x']"),
    ("x, x,y\n1,2,3\n", "its first line has the name 'x' more than once"),
    ("", "it is not a CSV file: No columns to parse from file"),
    ("x,y\n", "its first line has the columns ['x', 'y'], and 0 lines of cells follow"),
    ("x,y\n1,2\n", "1 of 1 samples would be held out"),
    ("x,y\n1,2\n3,4\n\0", "line 4 has a zero byte"),
)
def test_an_invalid_csv_file_is_refused_by_line_and_column(text, why, tmp_path):
    refused = refusal(file=written(tmp_path / "a.csv", text))
    assert refused.key == "file"
    assert why in refused.why


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_the_encoding_of_a_file_is_refused_by_what_to_do(tmp_path, encoding):
    (tmp_path / "A.CSV").write_bytes("größe,y\n1,2\n3,4\n".encode(encoding))
    assert "UTF-8" in refusal(file=str(tmp_path / "A.CSV")).remedy


def test_a_cell_is_a_number_if_it_is_one_to_every_reader_of_csv_files(tmp_path):
    cells = ["7", "+7", "007", " 7 ", "7.", "70e-1", ".7E1", '"7"', "7\t"]
    file = written(tmp_path / "a.csv", "x,y\n" + "".join(f"{cell},1\n" for cell in cells))
    assert whole(loaded(file=file, standardize=False)[0])[0].tolist() == [[7.0]] * 7
    others = (
        *("2020_01", "\uff11\uff12", "\u0663", '"1,234"', "1 234", "5%", "1e", "1\xa0"),
        *("NA", "nan", "TRUE", "0x1F", "inf"),
    )
    for cell in others:
        file, text = written(tmp_path / "a.csv", f"x,y\n1,2\n{cell},4\n"), cell.strip('"')
        refused = refusal(file=file)
        assert f"line 3, column x: {text!r} is not a finite number" in refused.why
        assert ("decimal point" in refused.remedy) is ("," in cell)


def test_a_first_line_of_numbers_is_refused_unless_columns_are_chosen_by_them(tmp_path):
    file = written(tmp_path / "a.csv", "0.5,2019,2020\n" + "1,2,3\n" * 5)
    refused = refusal(file=file)
    assert "0.5,2019,2020" in refused.why
    assert "data.targets=[2020]" in refused.remedy
    train, _ = loaded(file=file, targets=("2019",), standardize=False)
    assert whole(train)[0].tolist() == [[1.0, 3.0]] * 4


@pytest.mark.parametrize("header", [",x,y", "x,,y", "x,y,", "Unnamed: 0,x,y", " ,x,y"])
def test_columns_without_names_are_left_out_and_this_is_said(tmp_path, header, caplog):
    """pandas writes the row numbers into such a column, which tell the target if the rows are sorted by it."""
    caplog.set_level(logging.INFO)
    cells = [{"x": "1", "y": "2"}.get(name.strip(), "a") for name in header.split(",")]
    file = written(tmp_path / "a.csv", f"{header}\n" + f"{','.join(cells)}\n" * 5)
    assert rows(*loaded(file=file, standardize=False)).tolist() == [[1, 2]] * 5
    assert "left out 1 of 3 columns, which have no name" in caplog.text


def test_an_absent_file_and_invalid_column_names_are_refused(houses):
    assert "there is no such file in /" in refusal(file="~/absent.npz").why
    refused = refusal(file=houses, targets=("prise",))
    assert (refused.key, refused.got) == ("targets", "prise")
    assert "price" in refused.remedy
    every = ("area", "rooms", "age", "price")
    for chosen in ({"inputs": ("area", "price")}, {"inputs": ("area", "area")}, {"targets": every}):
        assert refusal(file=houses, **chosen).key == "inputs"


def test_files_without_valid_arrays_are_refused_and_run_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ones = torch.ones(4, 2)
    contents: dict[str, Any] = {
        "code.pt": {"inputs": Call(os.mkdir, "ran"), "targets": ones},
        "list.pt": [ones, ones],
        "names.pt": {"x": ones, "y": ones},
        "lengths.pt": {"inputs": ones, "targets": ones[:3]},
        "flat.pt": {"inputs": ones[:, 0], "targets": ones},
        "complex.pt": {"inputs": ones.to(torch.complex64), "targets": ones},
        "nan.pt": {"inputs": ones / 0, "targets": ones},
    }
    for name, content in contents.items():
        torch.save(content, name)
    numpy.savez("code.npz", inputs=numpy.array([Call(os.mkdir, "ran")], dtype=object), targets=numpy.ones(1))
    Path("broken.npz").write_bytes(b"no archive")
    for name in (*contents, "code.npz", "broken.npz"):
        assert refusal(file=name).key == "file", name
    assert not Path("ran").exists()


def test_a_decompression_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    zeros, targets = numpy.zeros((1000, 1000), numpy.int8), numpy.arange(1000)
    numpy.savez_compressed(tmp_path / "zeros.npz", inputs=zeros, targets=targets)
    with zipfile.ZipFile(tmp_path / "other.npz", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("inputs.npy", b"")
    with monkeypatch.context() as patch:
        patch.setattr(numpy, "load", None)
        refused = refusal(file=str(tmp_path / "zeros.npz"))
        assert re.search(r"it has 1,00\d,\d{3} bytes after decompression, more than \d{3},\d00$", refused.why)
        assert "it is compressed by another method" in refusal(file=str(tmp_path / "other.npz")).why
    numpy.savez(tmp_path / "zeros.npz", inputs=zeros, targets=targets)
    assert len(loaded(file=str(tmp_path / "zeros.npz"))[0]) == 800
    monkeypatch.setattr(tabular, "_MAX_BYTES", 2_000_000)
    why = "its numbers take 4,004,000 bytes in float32, more than 2,000,000"
    assert why in refusal(file=str(tmp_path / "zeros.npz")).why


def test_the_line_that_excel_writes_says_what_is_between_the_cells(tmp_path, caplog):
    caplog.set_level("INFO")
    for number, (first, between) in enumerate(
        {"sep=;": ";", '"sep=|"': "|", "\ufeffsep=;": ";", "sep=\t": "\t"}.items()
    ):
        text = "\r\n".join([first, *(between.join(row) for row in (["a", "y"], *(["1.5", str(i)] for i in range(9))))])
        path = written(tmp_path / f"{number}.csv", text)
        assert rows(*loaded(file=path, standardize=False)).tolist() == [[1.5, i] for i in range(9)]
    assert caplog.text.count("as its first line says") == 4
    path = written(tmp_path / "wrong.csv", "sep=;\na;y\n1;2\n3;x\n")
    assert "line 4, column y" in refusal(file=path).why


def test_lines_are_counted_where_cells_have_several(tmp_path):
    text = '"area\nin m2",note,"price, \r\n EUR"\n1,"a\nb",2\n3,c,x\n'
    path = written(tmp_path / "a.csv", text)
    chosen = {"inputs": ("area in m2",), "targets": ("price, EUR",)}
    assert "line 6, column price, EUR: 'x'" in refusal(file=path, **chosen).why
    path = written(tmp_path / "b.csv", text.replace("x", "5"))
    assert rows(*loaded(file=path, standardize=False, **chosen)).tolist() == [[1, 2], [3, 5]]


def test_numbers_have_every_digit_whatever_ends_the_lines(tmp_path):
    for number, end in enumerate(("\n", "\r\n", "\r")):
        cells = "000000000010084566,0.00564728024629623", "-.5e-3,9007199254740993"
        path = tmp_path / f"{number}.csv"
        path.write_bytes(end.join(("a,y", *cells, "")).encode())
        table = read_csv(path, (), (), ",")
        assert torch.cat((table.inputs, table.targets), 1).tolist() == [
            [10084566, 0.00564728024629623],
            [-0.0005, 2**53],
        ]
