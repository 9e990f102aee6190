"""Reading tables for regression: CSV files, and arrays in `.npz` and `.pt` files. No code in them is run."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import reprlib
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from runner.config.errors import ConfigError, check, did_you_mean
from runner.storage.files import check_readable, read_regular
from runner.storage.safe_torch_load import load_tensors

log = logging.getLogger(__name__)

SUFFIXES = (".csv", ".npz", ".pt")

_MAX_BYTES = 4 << 30
"""The maximum number of bytes of a file, of its content after decompression, and of its arrays in float32."""
_MAX_RATIO = 100
"""The maximum size of a file's content after decompression, as a multiple of the size of the file."""
_NAMELESS = re.compile(r"|Unnamed: \d+")
"""A pattern for the names of columns that have none: pandas calls such a column `Unnamed: 0`."""
_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*", re.ASCII)
"""A pattern for numbers: `float` alone takes 2020_01, nan and digits of other scripts for numbers."""
_CSV = "the first line names the columns, all other cells are numbers; data.delimiter sets what is between them"
_ARRAYS = "write it with numpy.savez(FILE, inputs=…, targets=…), or torch.save({'inputs': …, 'targets': …}, FILE)"


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


def read_csv(path: Path, inputs: Sequence[str], targets: Sequence[str], delimiter: str) -> Table:
    """Read columns of numbers from a CSV file whose first line has the names of the columns.

    Columns without a name, such as the row numbers that pandas writes, are left out, and this is logged. No `inputs`
    are all named columns that are not targets; no `targets`, the last one. Raises `ConfigError` with the line and the
    column.
    """
    import numpy
    import pandas  # takes half a second

    try:
        # Of text alone, without blank lines left out, so that errors can name the line and show the cell.
        options = {"dtype": str, "na_filter": False, "skipinitialspace": True, "skip_blank_lines": False}
        frame = pandas.read_csv(io.BytesIO(_content(path)), sep=delimiter, encoding="utf-8-sig", **options)
    except (ValueError, pandas.errors.ParserError) as error:  # ValueError: no text, or no columns
        why = f"it is not a CSV file: {' '.join(str(error).split()).removeprefix('Error tokenizing data. C error: ')}"
        raise ConfigError("file", str(path), why, _CSV) from None
    if not isinstance(frame.index, pandas.RangeIndex):
        raise ConfigError("file", str(path), "its rows have more cells than its first line has names", _CSV)
    frame.columns = names = [str(name).strip() for name in frame.columns]
    frame = frame[(frame != "").any(axis=1)]  # the index stays that of the lines
    named = [name for name in names if not _NAMELESS.fullmatch(name)]
    check(len(set(named)) > 1, "file", str(path), f"its first line has the columns {reprlib.repr(names)}", _CSV)
    if not (inputs or targets) and all(map(_NUMBER.fullmatch, named)):
        why = f"its first line has numbers, not the names of columns: {','.join(named)[:80]}"
        remedy = f"add a line with names; if these are the names, choose columns by them: data.targets=[{named[-1]}]"
        raise ConfigError("file", str(path), why, remedy)
    if len(named) < len(names) and not (inputs and targets):
        left_out = f"left out {len(names) - len(named)} of {len(names)} columns, which have no name"
        log.info("%s: %s (row numbers, if pandas wrote it); name them to use them", path, left_out)
    chosen = {"targets": list(targets) or named[-1:]}
    taken = set(chosen["targets"])
    chosen["inputs"] = list(inputs) or [name for name in named if name not in taken]
    for key in chosen:
        _check_columns(key, chosen[key], set(names))
    both = sorted(set(chosen["inputs"]) & taken)
    check(not both, "inputs", list(inputs), f"{', '.join(both)} is to be predicted", "leave it out of data.inputs")
    check(len(frame) > 0, "file", str(path), "it has no line but the first", _CSV)

    table = numpy.empty((len(frame), len(chosen["inputs"]) + len(chosen["targets"])))
    for place, name in enumerate((*chosen["inputs"], *chosen["targets"])):
        cells = frame[name].to_numpy(object)
        good = numpy.fromiter((_NUMBER.fullmatch(cell) is not None for cell in cells), bool, len(cells))
        table[:, place] = numpy.where(good, cells, "nan").astype(float)
        good = numpy.abs(table[:, place]) <= numpy.finfo(numpy.float32).max
        if not good.all():
            wrong = int(good.argmin())
            why = f"line {frame.index[wrong] + 2}, column {name}: {cells[wrong]!r} is not a finite number in float32"
            remedy = "replace it or leave the line out, or choose columns: data.inputs=[…] data.targets=[…]"
            raise ConfigError("file", str(path), why, remedy)
    values, count = torch.from_numpy(table), len(chosen["inputs"])
    return Table(values[:, :count].contiguous(), values[:, count:].contiguous(), chosen["targets"], chosen["inputs"])


def _check_columns(key: str, chosen: list[str], names: Collection[str]) -> None:
    for name in chosen:
        if name not in names:
            raise ConfigError(key, name, "there is no such column;", did_you_mean(name, names))
    check(len(set(chosen)) == len(chosen), key, chosen, "a column is named twice", "name each once")
    if not chosen:
        raise ConfigError(key, chosen, "no column is left", did_you_mean("", names))


def read_arrays(path: Path) -> Table:
    """Read the arrays `inputs`, [n, …], and `targets`, [n] or [n, num_targets], of a `.npz` or `.pt` file.

    The targets are named `target_0`, `target_1` and so on. Raises `ConfigError` if the file has no such arrays or is
    too large, or if not all values are real numbers that are finite in float32.
    """
    try:
        content = _npz(path) if path.suffix == ".npz" else load_tensors(path.resolve())
    except ConfigError:
        raise
    except Exception as error:  # a damaged file raises anything from EOFError to UnicodeDecodeError
        why = f"it cannot be loaded: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ConfigError("file", str(path), why, _ARRAYS) from None
    has = isinstance(content, dict) and all(isinstance(content.get(k), torch.Tensor) for k in ("inputs", "targets"))
    check(has, "file", str(path), "it does not have the arrays inputs and targets", _ARRAYS)
    inputs, targets = content["inputs"], content["targets"]
    targets = targets[:, None] if targets.dim() == 1 else targets
    shapes = f"inputs are {list(inputs.shape)}, targets {list(targets.shape)}"
    fits = inputs.dim() >= 2 and targets.dim() == 2 and len(inputs) == len(targets) > 0 and targets.shape[1] > 0
    remedy = "inputs are [n, features], or have more dimensions; targets are [n] or [n, targets]"
    check(fits and inputs.numel() > 0, "file", str(path), shapes, remedy)
    real = not (inputs.is_complex() or targets.is_complex())
    check(real, "file", str(path), "its numbers are complex", "write real numbers")
    num_bytes = 4 * (inputs.numel() + targets.numel())
    why = f"its numbers take {num_bytes:,} bytes in float32, more than {_MAX_BYTES:,}"
    check(num_bytes <= _MAX_BYTES, "file", str(path), why, "leave samples out")
    finite = all(bool(tensor.to(torch.float32).isfinite().all()) for tensor in (inputs, targets))
    check(finite, "file", str(path), "not all values are finite in float32", "leave such samples out")
    return Table(inputs, targets, [f"target_{i}" for i in range(targets.shape[1])])


def _npz(path: Path) -> dict[str, torch.Tensor]:
    import numpy

    content = _content(path)
    # A small archive could fill the memory: zeros are compressed to about a thousandth of their size. An entry is read
    # only up to the size that the archive states, so that false sizes do no harm.
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
    usual = all(entry.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries)
    check(usual, "file", str(path), "it is compressed by another method than that of numpy", _ARRAYS)
    unpacked, most = sum(entry.file_size for entry in entries), min(_MAX_BYTES, _MAX_RATIO * len(content))
    why = f"it has {unpacked:,} bytes after decompression, more than {most:,}"
    check(unpacked <= most, "file", str(path), why, "write it with numpy.savez(FILE, inputs=…, targets=…)")
    with numpy.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in ("inputs", "targets") if name in arrays}


def _content(path: Path) -> bytes:
    try:
        return read_regular(path.resolve(), _MAX_BYTES)
    except OSError as error:
        raise ConfigError("file", str(path), f"it cannot be read: {error.strerror}", _ARRAYS) from None


def existing(path: str) -> Path:
    """Return `path` with the home directory in place of `~`; raises `ConfigError` if there is no such file."""
    file = Path(path).expanduser()
    check_readable("file", file)
    why = f"there is no such file in {file.parent.absolute()}"
    check(file.is_file(), "file", path, why, "data.file=PATH, or data.file=null for samples of a known function")
    return file
