"""Networks, data sets, losses and hooks of a user; the processes of a run import this file."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import huber_loss
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset


class Net(nn.Module):
    """Not a Sequential; it lists its blocks."""

    def __init__(self, outputs: int = 3):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, outputs)

    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [("first", self.first), ("last", self.last)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


class Rows(Dataset):
    """A map-style data set whose samples are drawn from three generators: an augmentation."""

    def __init__(self, count: int, noise: float = 0.1):
        generator = torch.Generator().manual_seed(count)
        self.x, self.noise = torch.randn(count, 5, generator=generator), noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = torch.rand(()) + random.random() + np.random.rand()
        return self.x[index] + self.noise * drawn.float(), int(self.x[index].sum() > 0)


def tensors(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = Rows(count)
    return rows.x, (rows.x.sum(1) > 0).long() + (rows.x[:, 0] > 1)


TENSORS = (TensorDataset(*tensors(60)), TensorDataset(*tensors(21)))


def smooth(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return huber_loss(outputs, nn.functional.one_hot(targets, 3).to(outputs.dtype), delta=0.5)


class Plain(Dataset):
    def __init__(self, pairs: list[Any]):
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        return self.pairs[index]


def recall(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of all samples, and not the mean of batches."""
    return ((outputs.argmax(1) == 1) & (targets == 1)).sum() / (targets == 1).sum()


def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == targets


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        yield torch.zeros(5), 0


class NoLength(Dataset):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(5), 0


class Dicts(Plain):
    def __getitem__(self, index: int) -> Any:
        return {"x": self.pairs[index]}


class Fails(Rows):
    def __getitem__(self, index: int) -> Any:
        if index == 17:
            raise ValueError("unreadable")  # of a sample
        return super().__getitem__(index)


class FailsForward(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise RuntimeError("in forward")  # of a network
        return super().forward(x)


def failing_hook(state: Any) -> None:
    raise KeyError("in a hook")  # of a hook


def exiting_hook(state: Any) -> None:
    sys.exit(0)  # of an exit


class LosesItsGradient:
    """A loss that does not depend on the weights from its fifth training step on."""

    def __init__(self):
        self.calls = 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += outputs.requires_grad
        return nn.functional.cross_entropy(outputs if self.calls < 5 else outputs.detach(), targets)


def logs_a_vector(state: Any) -> None:
    state.log("a", torch.ones(3))  # no number


class Normalized(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x / 4 - 1, y


class NormalizedSubset(Subset):
    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x / 4 - 1, y

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class ByLists(TensorDataset):
    """A data set whose samples a `DataLoader` takes from `__getitems__`."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self.tensors[0][i] / 4 - 1, self.tensors[1][i]) for i in indices]


class Half(TensorDataset):
    def __len__(self) -> int:
        return super().__len__() // 2


MODULE_RNG = np.random.default_rng(0)


class Shift:
    """A transform with a generator of its own."""

    def __init__(self):
        self.generator = random.Random(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.generator.random()


class Noisy(Dataset):
    """A data set that draws from every kind of generator except the global ones, in many places."""

    shared = np.random.default_rng()

    def __init__(self, count: int):
        self.count, self.transforms, self.torch = count, [Shift(), self.legacy], torch.Generator()
        self.rng, self.old = np.random.default_rng(1), np.random.RandomState(1)
        more = np.random.Generator(np.random.Philox(3))
        self.closure = lambda x: x + more.random()

    def legacy(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.old.rand() + self.shared.random() + MODULE_RNG.random()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        x = torch.full((5,), float(index)) + torch.rand(5, generator=self.torch) + self.rng.random()
        for transform in (*self.transforms, self.closure):
            x = transform(x)
        return x.float(), index % 3


class Counts(Plain):
    """A data set whose samples change each time that they are read."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        x, y = super().__getitem__(index)
        return x + self.reads, y


class ScalesInPlace(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x -= 0.5
        x /= 2
        return super().forward(x)


def changes_inputs() -> nn.Module:
    return nn.Sequential(ScalesInPlace(5, 8), nn.Tanh(), nn.Linear(8, 3))


def changes_targets(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss of classes that are numbered from 1."""
    targets -= 1
    return nn.functional.cross_entropy(outputs, targets)


def counts_ones(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A metric that changes both of its arguments."""
    share = (targets == 1).double().mean()
    outputs.zero_()
    targets.zero_()
    return share


class StepCounter(Net):
    """A network with a state of no tensor, a dict."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]
