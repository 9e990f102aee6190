"""Batches of users in forms of their own: objects, packed, nested and sparse tensors, texts; and losses of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset, IterableDataset

COUNT, HELD_OUT = 48, 18


class Sequences(Dataset):
    """Sequences of several lengths, with a class, some symbols and a name each."""

    def __init__(self, count: int):
        draw = torch.Generator().manual_seed(count)
        self.inputs = [torch.randn(int(n), 5, generator=draw) for n in torch.randint(6, 9, (count,), generator=draw)]
        self.symbols = [
            torch.randint(1, 4, (int(n),), generator=draw) for n in torch.randint(1, 4, (count,), generator=draw)
        ]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = self.inputs[index]
        return {"x": x, "class": int(x.mean() > 0), "symbols": self.symbols[index], "name": f"sample {index}"}


class Graphs:
    """A batch of graphs, as libraries make them: it is no mapping, and keeps other things beside its tensors."""

    def __init__(self, samples: list[dict[str, Any]]):
        lengths = torch.tensor([len(each["x"]) for each in samples])
        self.nodes, self.store = torch.cat([each["x"] for each in samples]), {"of": torch.arange(len(samples))}
        self.store["of"] = self.store["of"].repeat_interleave(lengths)
        self.classes, self.num_graphs = classes_of(samples), len(samples)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def classes_of(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([each["class"] for each in samples])


def graphs(samples: list[dict[str, Any]]) -> Graphs:
    return Graphs(samples)


def packed(samples: list[dict[str, Any]]) -> tuple[PackedSequence, torch.Tensor]:
    return pack_sequence([each["x"] for each in samples], enforce_sorted=False), classes_of(samples)


def nested(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.nested.nested_tensor([each["x"] for each in samples], layout=torch.jagged), classes_of(samples)


def sparse(samples: list[dict[str, Any]]) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Nodes, and a sparse matrix that adds up those of each sample."""
    batch = Graphs(samples)
    places = torch.stack([batch.store["of"], torch.arange(len(batch.nodes))])
    matrix = torch.sparse_coo_tensor(places, torch.ones(len(batch.nodes)), (len(samples), len(batch.nodes)))
    return (batch.nodes, matrix.coalesce()), classes_of(samples)


def pairs(samples: list[dict[str, Any]]) -> tuple[Pair, torch.Tensor]:
    means = torch.stack([each["x"].mean(0) for each in samples])
    return Pair(means, means.square()), classes_of(samples)


def mappings(samples: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return pairs(samples)[0]._asdict(), classes_of(samples)


def symbols(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Inputs of one length, and all symbols one after another, as `CTCLoss` takes them."""
    lengths = torch.tensor([len(each["symbols"]) for each in samples])
    inputs = torch.stack([each["x"][:6] for each in samples])
    return inputs, (torch.cat([each["symbols"] for each in samples]), lengths)


class Network(nn.Module):
    """It sums a function of the rows of each sample, in any of the forms above."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, x: Any, matrix: torch.Tensor | None = None) -> torch.Tensor:
        if matrix is not None:
            return self.head(torch.sparse.mm(matrix, torch.tanh(self.inner(x))))
        if isinstance(x, Graphs):
            hidden = torch.tanh(self.inner(x.nodes))
            return self.head(hidden.new_zeros(x.num_graphs, 8).index_add(0, x.store["of"], hidden))
        if isinstance(x, PackedSequence):
            x = nn.utils.rnn.unpack_sequence(x)
        return self.head(torch.stack([torch.tanh(self.inner(each)).sum(0) for each in x]))


class OfOne(nn.Module):
    """Its one argument is a named tuple, or a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, both: Any) -> torch.Tensor:
        first, second = both if isinstance(both, Pair) else (both["first"], both["second"])
        return self.layer(first + second)


def recognizer() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4), nn.LogSoftmax(2))


def ctc(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
    lengths = torch.full((len(outputs),), outputs.shape[1])
    return nn.functional.ctc_loss(outputs.transpose(0, 1), targets[0], lengths, targets[1])


def summed(outputs: torch.Tensor, targets: Any) -> tuple[torch.Tensor, np.integer]:
    """The mean over the symbols, which are of another number than the samples."""
    total = (outputs.logsumexp(2).sum(1) - outputs[:, 0, 1]).sum() + (outputs[:, 0] * outputs[:, 1]).sum()
    return total, np.int64(len(targets[0]))


def of_graphs(model: nn.Module, batch: Graphs) -> dict[str, Any]:
    outputs = model(batch)
    loss = cross_entropy(outputs, batch.classes).view(1)  # of which torch calls backward, too
    right = (outputs.argmax(1) == batch.classes).float().mean().item()
    return {"loss": loss, "accuracy": right, "half": np.float32(0.5)}


def of_stacked(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Samples that are stacked, with texts among them."""
    assert all(isinstance(each, str) for each in batch["name"])
    return cross_entropy(model(batch["x"]), batch["class"])


class Stacked(Sequences):
    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {"x": sample["x"][None].mean(1), "class": sample["class"], "name": sample["name"]}


def data() -> tuple[Dataset, Dataset]:
    return Sequences(COUNT), Sequences(HELD_OUT)


def stacked() -> tuple[Dataset, Dataset]:
    return Stacked(COUNT), Stacked(HELD_OUT)


CASES: dict[str, dict[str, Any]] = {
    "graphs": {"model": Network, "collate": graphs, "training_step": of_graphs},
    "packed": {"model": Network, "collate": packed},
    "nested": {"model": Network, "collate": nested},
    "sparse": {"model": Network, "collate": sparse},
    "named_tuple": {"model": OfOne, "collate": pairs},
    "mapping": {"model": OfOne, "collate": mappings},
    "ctc": {"model": recognizer, "collate": symbols, "loss": ctc},
    "symbols": {"model": recognizer, "collate": symbols, "loss": summed},
    "texts": {"model": Network, "data": stacked, "training_step": of_stacked},
}

SECONDS = 1.7e9
"""A time of which float32 does not know the minute."""


class Times(nn.Module):
    """It subtracts an offset from times, in float64, before it computes in the precision of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        return self.layer(((times - SECONDS) / 100).to(self.layer.weight.dtype))


def times() -> tuple[torch.Tensor, torch.Tensor]:
    values = 100 * torch.rand(48, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return values + SECONDS, (values[:, 0] > 50).long()


def tenths() -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers that float32 would round."""
    values = torch.rand(48, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return values + 0.1, (values[:, 0] > 0.5).long()


class Stream(IterableDataset):
    """Samples in an order of their own."""

    def __init__(self, samples: Any):
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return zip(*self.samples, strict=True)


class OfComplex(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1, dtype=torch.complex64)


def waves() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(48, 3, generator=torch.Generator().manual_seed(0), dtype=torch.complex64)
    return inputs, (inputs * (1 + 2j)).sum(1, keepdim=True)


class Distance(nn.Module):
    """A loss whose buffer stays real, whatever the weights of the network are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(1))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.weight * (outputs - targets).abs().square()).mean()


NUMBERS: dict[str, dict[str, Any]] = {
    "times": {"model": Times, "samples": times, "loss": cross_entropy},
    "tenths": {"model": partial(nn.Linear, 3, 2), "samples": tenths, "loss": cross_entropy},
    "waves": {"model": OfComplex, "samples": waves, "loss": Distance()},
}
"""Networks for numbers that are no float32, with functions that make their samples."""
