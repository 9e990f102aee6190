"""Tables for regression, from a file or from a known function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from runner.config.errors import ConfigError, check, check_range
from runner.data.arrays import ArraySamples
from runner.data.base import Data, RegressionSamples, Samples
from runner.data.table_files import SUFFIXES, Table, existing, read_arrays, read_csv
from runner.seeds import derive
from runner.storage.signature import check_same_names

_ROWS = 65_536
"""The number of rows that are converted to float64 at a time."""


@dataclass
class Tabular(Data):
    """A table with a row per sample; the options are explained in `conf/data/tabular.yaml`.

    Inputs and targets are standardized by the training samples; the mean absolute error is in the units of the file.
    """

    may_change_on_resume: ClassVar[tuple[str, ...]] = ("file",)
    file: str | None = None
    inputs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    delimiter: str = ","
    holdout: float = 0.2
    standardize: bool = True
    num_samples: int = 2000

    def __post_init__(self) -> None:
        check_range(self, "holdout", above=0, most=0.9)
        check_range(self, "num_samples", least=2, most=10_000_000)
        remedy = "\"data.delimiter=';'\", for example"
        valid = len(self.delimiter) == 1 and self.delimiter not in '"\r\n'
        check(valid, "delimiter", self.delimiter, "it must be one character", remedy)
        why = f"the file name must end in {', '.join(SUFFIXES)}"
        known = self.file is None or Path(self.file).suffix in SUFFIXES
        check(known, "file", self.file, why, "data.file=PATH of a CSV file, or of arrays")
        if self.file is None or Path(self.file).suffix != ".csv":
            for key in ("inputs", "targets"):
                why = "only the columns of a CSV file have names"
                check(not getattr(self, key), key, list(getattr(self, key)), why, f"data.{key}=[], or a .csv file")

    def load(self) -> tuple[Samples, Samples]:
        splits = self.splits({})
        return splits["train"](), splits["val"]()

    def splits(self, saved: Mapping[str, Any]) -> dict[str, Callable[[], Samples]]:
        table = self._table(saved)
        count = len(table.inputs)
        held_out = max(1, round(self.holdout * count))
        # Independent of the run's seed, so that runs with different seeds are evaluated on the same samples.
        order = torch.randperm(count, generator=torch.Generator().manual_seed(derive(0, "tabular")))
        rows = {
            "all": torch.arange(count),
            "train": order[held_out:].sort().values,
            "val": order[:held_out].sort().values,
        }
        if "scale" in saved:
            scales = [_saved_scale(saved["scale"].get(key), getattr(table, key)) for key in ("inputs", "targets")]
        else:
            key = "num_samples" if self.file is None else "file"
            why = f"{held_out} of {count} samples would be held out, which leaves none to train on"
            check(held_out < count, key, getattr(self, key), why, "use more samples, or a smaller data.holdout")
            scales = [_scale(tensor[rows["train"]], self.standardize) for tensor in (table.inputs, table.targets)]
        content = "" if self.file is None else table.fingerprint()
        return {name: partial(TableSamples, table, chosen, *scales, content) for name, chosen in rows.items()}

    def _table(self, saved: Mapping[str, Any]) -> Table:
        """Return the table, with the columns in `saved`, the signature of a checkpoint, in their order."""
        if self.file is None:
            table = friedman(self.num_samples)
        elif Path(self.file).suffix == ".csv":
            table = self._columns(existing(self.file), saved)
        else:
            table = read_arrays(existing(self.file))
        shape, trained = list(table.inputs.shape[1:]), list(saved.get("inputs", table.inputs.shape[1:]))
        why = f"an input has the shape {shape}, and the model was trained on {trained}"
        check(shape == trained, "file", self.file, why, "use data with the same inputs")
        check_same_names(saved, {"targets": table.target_names}, "file")
        return table

    def _columns(self, path: Path, saved: Mapping[str, Any]) -> Table:
        inputs, targets = saved.get("columns", self.inputs), saved.get("targets", self.targets)
        check_same_names({"columns": sorted(inputs)}, {"columns": sorted(self.inputs or inputs)}, "inputs")
        try:
            return read_csv(path, inputs, targets, self.delimiter)
        except ConfigError as error:
            if error.key not in ("inputs", "targets") or not saved:
                raise
            why = f"the model was trained with the columns {', '.join([*inputs, *targets])}: {error.got} is missing"
            raise ConfigError("file", self.file, why, "use a file that has these columns, in any order") from None


class TableSamples(ArraySamples, RegressionSamples):
    """The `rows`, int64 [n], of a table, standardized by (mean, standard deviation), float64 of the shape of a row."""

    def __init__(
        self,
        table: Table,
        rows: torch.Tensor,
        input_scale: tuple[torch.Tensor, torch.Tensor],
        target_scale: tuple[torch.Tensor, torch.Tensor],
        content: str = "",
    ):
        super().__init__(
            _standardized(table.inputs, rows, *input_scale), _standardized(table.targets, rows, *target_scale)
        )
        self.input_names, self.target_names = table.input_names, table.target_names
        self.target_mean, self.target_std = (values.tolist() for values in target_scale)
        self._input_scale, self._content = input_scale, content

    def fingerprint(self) -> str:
        return self._content

    def standardization(self) -> dict[str, dict[str, list[float]]]:
        mean, std = (values.flatten().tolist() for values in self._input_scale)
        return super().standardization() | {"inputs": {"mean": mean, "std": std}}


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


def _standardized(values: torch.Tensor, rows: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Return some rows in float32. They are standardized in float64, in which 1.7e9 + 1 differs from 1.7e9."""
    result = torch.empty(len(rows), *values.shape[1:])
    for part, chosen in zip(result.split(_ROWS), rows.split(_ROWS), strict=True):
        part.copy_((values[chosen].double() - mean) / std)
    return result


def _saved_scale(scale: Mapping[str, list[float]] | None, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = values.shape[1:]
    if scale is None:
        return torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
    mean, std = (torch.tensor(scale[key], dtype=torch.float64).view(shape) for key in ("mean", "std"))
    return mean, std


def _scale(values: torch.Tensor, standardize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the standard deviation over samples, float64; (0, 1) if nothing is to be standardized."""
    double = values.double()
    mean, std = double.mean(0), double.std(0, correction=0)
    if not standardize:
        return torch.zeros_like(mean), torch.ones_like(std)
    # A constant is recognized exactly: the rounding error of its mean would be its standard deviation.
    is_constant = (double == double[:1]).all(0) | (std == 0)
    return mean, torch.where(is_constant, torch.ones_like(std), std)
