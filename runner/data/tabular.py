"""Tables for regression: CSV files, arrays in `.npz` and `.pt` files, and a known function. No code in them is run."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import math
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch

from runner.config.errors import ConfigError, check, did_you_mean, see_comments, shortened
from runner.config.limits import Range
from runner.data.base import Data, RegressionSamples, Samples
from runner.data.memory import ArraySamples
from runner.seeds import derive
from runner.storage.files import check_readable, read_regular
from runner.storage.safe_torch_load import load_tensors
from runner.storage.signature import check_same_names

log = logging.getLogger(__name__)

_MAX_BYTES = 4 << 30
"""The maximum number of bytes of a file, and of its content after decompression."""
_MAX_RATIO = 100
"""The maximum size of a file's content after decompression, as a multiple of the size of the file."""
_NAMELESS = re.compile(r"|Unnamed: \d+")
"""A pattern for the names of columns that have none: pandas calls such a column `Unnamed: 0`."""
_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*", re.ASCII)
"""A pattern for numbers: `float` alone takes 2020_01, nan and digits of other scripts for numbers."""
_SEPARATOR = re.compile(rb"(?:\xef\xbb\xbf)?\"?sep=([\x01-\x7f])\"?\r?\n")
"""A pattern for the line that Excel writes and reads before the names of the columns."""
_CSV = "the first line names the columns, all other cells are numbers; "
_CSV += "data.delimiter='\";\"' sets what is between them, and a .tsv file has tabs"
_ARRAYS = "write it with numpy.savez(FILE, inputs=…, targets=…), or torch.save({'inputs': …, 'targets': …}, FILE)"

Scale = tuple[torch.Tensor, torch.Tensor]
"""The mean and the standard deviation of each value of a row, float64 of the shape of a row."""


@dataclass
class Tabular(Data):
    """A table with a row per sample; the options are explained in `conf/data/tabular.yaml`.

    Inputs and targets are standardized by the training samples; the mean absolute error is in the units of the file.
    """

    may_change_on_resume = ("file",)
    file: str | None = None
    inputs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    delimiter: str = ","
    holdout: Annotated[float, Range(above=0, most=0.9)] = 0.2
    standardize: bool = True
    num_samples: Annotated[int, Range(least=2, most=10_000_000)] = 2000

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            raise ConfigError("delimiter", self.delimiter, "it must be one character", see_comments(self))
        suffix = Path(self.file or "").suffix.lower()
        if self.file is not None and suffix not in (".csv", ".tsv", ".npz", ".pt"):
            raise ConfigError("file", self.file, "the file name must end in .csv, .tsv, .npz, .pt", see_comments(self))
        for key in ("inputs", "targets"):
            if getattr(self, key) and suffix not in (".csv", ".tsv"):
                why = "only the columns of a CSV file have names"
                raise ConfigError(key, list(getattr(self, key)), why, see_comments(self))

    def load(self) -> tuple[Samples, Samples]:
        splits = self.splits({})
        return splits["train"](), splits["val"]()

    def splits(self, saved: Mapping[str, Any]) -> dict[str, Callable[[], Samples]]:
        table = friedman(self.num_samples) if self.file is None else self._read(Path(self.file).expanduser(), saved)
        shape, trained = list(table.inputs.shape[1:]), list(saved.get("inputs", table.inputs.shape[1:]))
        why = f"an input has the shape {shape}, and the model was trained on {trained}"
        check(shape == trained, "file", self.file, why, "use data with the same inputs")
        check_same_names(saved, {"targets": table.target_names}, "file")

        count = len(table.inputs)
        held_out = max(1, round(self.holdout * count))
        # Independent of the run's seed, so that runs with different seeds are evaluated on the same samples.
        order = torch.randperm(count, generator=torch.Generator().manual_seed(derive(0, "tabular")))
        train, val = order[held_out:].sort().values, order[:held_out].sort().values
        if len(train) == 0 and "scale" not in saved:
            key = "num_samples" if self.file is None else "file"
            why = f"{held_out} of {count} samples would be held out, which leaves none to train on"
            raise ConfigError(key, getattr(self, key), why, "use more samples, or a smaller data.holdout")
        pairs = {"inputs": table.inputs[train], "targets": table.targets[train]}
        scaled = self.standardize and "scale" not in saved
        scales = [_scale(part, scaled, saved.get("scale", {}).get(key)) for key, part in pairs.items()]
        constant = (pairs["targets"] == pairs["targets"][:1]).all(0).tolist()
        equal = [name for name, is_constant in zip(table.target_names, constant, strict=True) if is_constant]
        for name in [] if saved else equal:
            log.warning("data.targets: %s is the same in all training samples: there is nothing to learn", name)
        content = "" if self.file is None else table.fingerprint()
        rows = {"all": torch.arange(count), "train": train, "val": val}
        return {name: partial(TableSamples, table, chosen, *scales, content) for name, chosen in rows.items()}

    def _read(self, path: Path, saved: Mapping[str, Any]) -> Table:
        """Return the table in a file, with the columns in `saved`, the signature of a checkpoint, in their order."""
        check_readable("file", path)
        why = f"there is no such file in {path.parent.absolute()}"
        remedy = "data.file=PATH, or data.file=null for samples of a known function"
        check(path.is_file(), "file", self.file, why, remedy)
        if path.suffix.lower() not in (".csv", ".tsv"):
            return read_arrays(path)
        inputs, targets = saved.get("columns", self.inputs), saved.get("targets", self.targets)
        check_same_names({"columns": sorted(inputs)}, {"columns": sorted(self.inputs or inputs)}, "inputs")
        try:
            return read_csv(path, inputs, targets, "\t" if path.suffix.lower() == ".tsv" else self.delimiter)
        except ConfigError as error:
            if error.key not in ("inputs", "targets") or not saved:
                raise
            why = f"the model was trained with the columns {', '.join([*inputs, *targets])}: {error.got} is missing"
            raise ConfigError("file", self.file, why, "use a file that has these columns, in any order") from None


class Table(NamedTuple):
    """Inputs [n, …] and targets [n, num_targets]: numbers that are finite in float32, in the precision of the file."""

    inputs: torch.Tensor
    targets: torch.Tensor
    target_names: list[str]
    input_names: Sequence[str] = ()

    def fingerprint(self) -> str:
        """Return the SHA-256 of the names and the numbers, as hexadecimal digits."""
        digest = hashlib.sha256(json.dumps([list(self.input_names), self.target_names]).encode())
        for values in (self.inputs, self.targets):
            digest.update(f"{list(values.shape)} {values.dtype}".encode())
            digest.update(values.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


class TableSamples(ArraySamples, RegressionSamples):
    """The `rows`, int64 [n], of a table, standardized in float64, in which 1.7e9 + 1 differs from 1.7e9."""

    def __init__(self, table: Table, rows: torch.Tensor, input_scale: Scale, target_scale: Scale, content: str = ""):
        pairs = ((table.inputs, input_scale), (table.targets, target_scale))
        numbers = (((values[rows].double() - mean) / std).float() for values, (mean, std) in pairs)
        super().__init__(*numbers, content=content)
        self.input_names, self.target_names = table.input_names, table.target_names
        self.target_mean, self.target_std = (values.tolist() for values in target_scale)
        self._input_scale = input_scale

    def standardization(self) -> dict[str, dict[str, list[float]]]:
        mean, std = (values.flatten().tolist() for values in self._input_scale)
        return super().standardization() | {"inputs": {"mean": mean, "std": std}}


def _scale(values: torch.Tensor, standardize: bool, saved: Mapping[str, list[float]] | None) -> Scale:
    """Return the saved mean and standard deviation, or those over samples; (0, 1) if nothing is to be standardized."""
    double = values.double()
    if saved is not None:
        mean, std = (torch.tensor(saved[key], dtype=double.dtype).view(double.shape[1:]) for key in ("mean", "std"))
        return mean, std
    mean, std = double.mean(0), double.std(0, correction=0)
    if not standardize:
        return torch.zeros_like(mean), torch.ones_like(std)
    # A constant is recognized exactly: the rounding error of its mean would be its standard deviation.
    is_constant = (double == double[:1]).all(0) | (std == 0)
    return mean, torch.where(is_constant, torch.ones_like(std), std)


def friedman(count: int) -> Table:
    """Return `count` samples of y = 10 sin(π x₁ x₂) + 20 (x₃ − 1/2)² + 10 x₄ + 5 x₅ + ε, with ε ~ N(0, 1).

    The inputs are x₁ to x₁₀, uniform in [0, 1]. The variance of y is about 24.8, so that R² is at most 0.96.
    Friedman (1991), section 4.3.
    """
    generator = torch.Generator().manual_seed(derive(0, "friedman"))
    x = torch.rand(count, 10, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, generator=generator, dtype=torch.float64)
    y = 10 * (math.pi * x[:, 0] * x[:, 1]).sin() + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4] + noise
    return Table(x.float(), y[:, None].float(), ["y"])


# ---------------------------------------------------------------------------------------------------------------------
# Files


def read_csv(path: Path, inputs: Sequence[str], targets: Sequence[str], delimiter: str) -> Table:
    """Read columns of numbers from a CSV file whose first line has the names of the columns.

    Columns without a name, such as the row numbers that pandas writes, are left out, and this is logged. No `inputs`
    are all named columns that are not targets; no `targets`, the last one. Raises `ConfigError` with the line and the
    column.
    """
    sheet = _sheet(path, delimiter)
    names = [*sheet.frame.columns]
    named = [name for name in names if not _NAMELESS.fullmatch(name)]
    if len(named) < 2 or len(sheet.frame) == 0:
        raise sheet.refuse(f"its first line has the columns {names}, and {len(sheet.frame)} lines of cells follow")
    if not (inputs or targets) and all(map(_NUMBER.fullmatch, named)):
        why = f"its first line has numbers, not the names of columns: {shortened(','.join(named))}"
        choose = f"add a line with names; if these are the names, choose columns by them: 'data.targets=[{named[-1]}]'"
        raise sheet.refuse(why, choose)
    if len(named) < len(names) and not (inputs and targets):
        left_out = f"left out {len(names) - len(named)} of {len(names)} columns, which have no name"
        log.info("%s: %s (row numbers, if pandas wrote it); name them to use them", path, left_out)

    targets = list(targets) or named[-1:]
    inputs = list(inputs) or [name for name in named if name not in targets]
    for key, asked in (("targets", targets), ("inputs", inputs)):
        if unknown := [name for name in asked if name not in names]:
            raise ConfigError(key, unknown[0], "there is no such column;", did_you_mean(unknown[0], names))
    if len({*inputs, *targets}) < len(inputs) + len(targets) or not inputs:
        why = "each column is an input or a target, once, and there are some of both"
        raise ConfigError("inputs", inputs, why, f"choose others than the targets {', '.join(targets)}")
    values, count = sheet.numbers([*inputs, *targets]), len(inputs)
    return Table(values[:, :count].contiguous(), values[:, count:].contiguous(), targets, inputs)


def read_inputs(path: Path, columns: Sequence[str], delimiter: str) -> tuple[torch.Tensor, list[int]]:
    """Return the numbers in `columns` of a CSV file, float64 [n, num_columns], and the line at which each row begins.

    Other columns are not read. Raises `ConfigError` as `read_csv` does.
    """
    sheet = _sheet(path, "\t" if path.suffix.lower() == ".tsv" else delimiter)
    missing = [name for name in columns if name not in sheet.frame.columns]
    why = f"it lacks the columns {', '.join(missing)}, and the model was trained on {', '.join(columns)}"
    remedy = f"use a file that has these columns, in any order: it has {', '.join(sheet.frame.columns)}"
    check(not missing, "file", str(path), why, remedy)
    numbers, lines = sheet.numbers(columns), sheet.lines()
    return numbers, [lines[record] for record in sheet.frame.index]


class _Sheet(NamedTuple):
    """The cells of a CSV file below its first line, as text; `lines()` are the lines at which its records begin."""

    path: Path
    frame: Any
    lines: Callable[[], Sequence[int]]

    def refuse(self, why: str, remedy: str = _CSV) -> ConfigError:
        return ConfigError("file", str(self.path), why, remedy)

    def numbers(self, columns: Sequence[str]) -> torch.Tensor:
        import numpy

        chosen = self.frame[[*columns]]
        spelled = chosen.map(lambda cell: _NUMBER.fullmatch(cell) is not None)
        table = chosen.where(spelled, "nan").to_numpy(object).astype(float, order="C")
        wrong = numpy.argwhere(~(numpy.abs(table) <= numpy.finfo(numpy.float32).max))
        if len(wrong):
            row, column = wrong[0]
            where = f"line {self.lines()[chosen.index[row]]}, column {chosen.columns[column]}"
            cell, remedy = chosen.iloc[row, column], "write numbers with a decimal point, and without commas: 1234.5"
            if "," not in cell:
                remedy = "replace it, leave the line out, or choose data.inputs and data.targets"
            raise self.refuse(f"{where}: {cell!r} is not a finite number in float32", remedy)
        return torch.from_numpy(table)


def _sheet(path: Path, delimiter: str) -> _Sheet:
    import pandas  # takes half a second

    sheet = _Sheet(path, None, list)
    try:
        content, begin = read_regular(path.resolve(), _MAX_BYTES), 0
        if (place := content.find(b"\0")) >= 0:  # pandas 2.2 ends there without an error
            line = content.count(b"\n", 0, place) + 1
            why = f"line {line} has a zero byte: it is damaged, or no text in UTF-8"
            raise sheet.refuse(why, "save it again: CSV UTF-8")
        if separator := _SEPARATOR.match(content):
            delimiter, begin = separator[1].decode(), separator.end()
            log.info("%s: cells are separated by %r, as its first line says", path, delimiter)
        # Of text alone, with the first line and blank lines, so that errors can name the line and show the cell.
        options = {"dtype": str, "na_filter": False, "skipinitialspace": True, "skip_blank_lines": False}
        options |= {"sep": delimiter, "encoding": "utf-8-sig", "header": None}
        frame = pandas.read_csv(io.BytesIO(content[begin:]), **options)
    except UnicodeDecodeError as error:
        why = f"it is no text in UTF-8 ({error.reason})"
        raise sheet.refuse(why, "save it in this encoding: CSV UTF-8") from None
    except (OSError, ValueError, pandas.errors.ParserError) as error:  # ValueError: no columns
        why = " ".join(str(error).split()).removeprefix("Error tokenizing data. C error: ")
        raise sheet.refuse(f"it is not a CSV file: {why}") from None
    frame.columns = names = [re.sub(r"\s*[\r\n]+\s*", " ", name.strip()) for name in frame.iloc[0]]
    repeated = [name for name, count in Counter(names).items() if count > 1 and not _NAMELESS.fullmatch(name)]
    if repeated:
        raise sheet.refuse(f"its first line has the name {repeated[0]!r} more than once", "give each its own name")
    lines = partial(_lines, content[begin:], delimiter, 1 + bool(begin), len(frame))
    return _Sheet(path, frame[1:][(frame[1:] != "").any(axis=1)], lines)


def _lines(content: bytes, delimiter: str, first: int, count: int) -> Sequence[int]:
    """Return the line at which each of `count` records begins, the first of them at `first`."""
    if b'"' not in content:
        return range(first, first + count)
    csv.field_size_limit(_MAX_BYTES)
    text = io.StringIO(content.decode("utf-8-sig"), newline="")  # a cell in quotation marks may have several lines
    reader = csv.reader(text, delimiter=delimiter, skipinitialspace=True)
    return [first, *(first + reader.line_num for _ in reader)]


def read_arrays(path: Path) -> Table:
    """Read the arrays `inputs`, [n, …], and `targets`, [n] or [n, num_targets], of a `.npz` or `.pt` file.

    The targets are named `target_0`, `target_1` and so on. Raises `ConfigError` if the file has no such arrays or is
    too large, or if not all values are real numbers that are finite in float32.
    """
    try:
        content = _npz(path) if path.suffix.lower() == ".npz" else load_tensors(path.resolve())
        inputs, targets = content["inputs"], content["targets"]
        targets = targets[:, None] if targets.dim() == 1 else targets
        fits = inputs.dim() >= 2 and targets.dim() == 2 and len(inputs) == len(targets)
        if not fits or 0 in (inputs.numel(), targets.numel()) or inputs.is_complex() or targets.is_complex():
            found = f"inputs are {inputs.dtype} {list(inputs.shape)}, targets {targets.dtype} {list(targets.shape)}"
            raise ValueError(f"{found}, not real numbers [n, …] and [n] or [n, targets]")
        if (num_bytes := 4 * (inputs.numel() + targets.numel())) > _MAX_BYTES:
            raise ValueError(f"its numbers take {num_bytes:,} bytes in float32, more than {_MAX_BYTES:,}")
        if not all(bool(tensor.to(torch.float32).isfinite().all()) for tensor in (inputs, targets)):
            raise ValueError("not all values are finite in float32")
    except Exception as error:  # a damaged file raises anything from EOFError to UnicodeDecodeError
        why = f"it cannot be used: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ConfigError("file", str(path), why, _ARRAYS) from None
    return Table(inputs, targets, [f"target_{i}" for i in range(targets.shape[1])])


def _npz(path: Path) -> dict[str, torch.Tensor]:
    import numpy

    content = read_regular(path.resolve(), _MAX_BYTES)
    # A small archive could fill the memory: zeros are compressed to about a thousandth of their size. An entry is read
    # only up to the size that the archive states, so that false sizes do no harm.
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
    if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
        raise ValueError("it is compressed by another method than that of numpy")
    unpacked, most = sum(entry.file_size for entry in entries), min(_MAX_BYTES, _MAX_RATIO * len(content))
    if unpacked > most:
        raise ValueError(f"it has {unpacked:,} bytes after decompression, more than {most:,}")
    with numpy.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in ("inputs", "targets")}
