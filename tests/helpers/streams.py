"""Streams of users, and what is trained on them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from helpers.compose import compose_config
from helpers.strange_networks import CPU, PLAIN, chain, numbers, trained_with
from runner.config import user_code
from runner.seeds import derive

COUNT = 40
"""The number of samples of a stream, fewer than the four steps of a run take."""


class Rows(IterableDataset):
    """Samples in order; its training set ends before a run of four steps does."""

    def __init__(self, count: int = COUNT) -> None:
        self.inputs, self.targets = (each[:count] for each in numbers())

    def __iter__(self) -> Iterator[Any]:
        yield from zip(self.inputs, self.targets, strict=True)


class Noisy(Rows):
    """Draws from all generators, in an order that depends on what it has drawn; `own` is another one that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.default_rng()

    def __iter__(self) -> Iterator[Any]:
        rows = list(range(COUNT))
        random.shuffle(rows)
        for row in rows:
            factor = random.random() + np.random.rand() + self.own.random() + torch.rand(())
            yield self.inputs[row] * factor, self.targets[row]


class Stateful(Rows):
    """Goes on where it was, by the convention of `StatefulDataLoader`, and counts what it yields."""

    num_read = 0

    def __init__(self, count: int = COUNT) -> None:
        super().__init__(count)
        self.at = self.start = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.start = self.start, 0
        while self.at < len(self.targets):
            self.at += 1
            Stateful.num_read += 1
            yield self.inputs[self.at - 1] * (1 + random.random()), self.targets[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


class Late(Stateful):
    """A mistake of a user: what is saved is the place before the last sample."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": max(0, self.at - 1)}


class Unsaved(Stateful):
    """Its state has an object that no checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": np.int64(self.at)}


class Fussy(Stateful):
    """Takes no state of its own."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["position"]


class Shuffled(Stateful):
    """Loses what is in its buffer when it goes on, as that of a library does: later samples are others."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 10:
                random.shuffle(buffer)
                yield from buffer[5:]
                buffer = buffer[:5]
        yield from buffer


class Turns(IterableDataset):
    """Inputs and targets in one buffer, which it fills anew for each sample."""

    def __init__(self) -> None:
        self.rows = Rows()

    def __iter__(self) -> Iterator[Any]:
        memory = torch.empty(6)
        for inputs, target in self.rows:
            yield memory.copy_(inputs), target


KINDS = {kind.__name__: kind for kind in (Rows, Noisy, Stateful, Late, Unsaved, Fussy, Shuffled, Turns)}


def network() -> torch.nn.Module:
    return chain(torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh())


def given(kind: str) -> dict[str, Any]:
    return {"model": network, "data": (KINDS[kind](), Rows(43))}


def trained(kind: str, words: list[str], directory: Path) -> Any:
    """Train on a stream of this kind; as `trained_with`."""
    parts = given(kind)
    config = compose_config(*user_code.passed(**parts).added_to([*CPU, *PLAIN, "workload.eval_batch_size=5", *words]))
    return trained_with(parts, config, directory)


def samples(kind: str, count: int, seed: int = 0) -> list[Any]:
    """Return the first samples of a stream, each pass with the random numbers of its seed, as a plain loop reads it."""
    stream, found, passes = KINDS[kind](), list[Any](), 0
    while len(found) < count:
        own = derive(seed, "stream", passes)
        torch.manual_seed(own)
        random.seed(own)
        np.random.seed(own & 0xFFFFFFFF)
        if isinstance(stream, Noisy):
            stream.own = np.random.default_rng(derive(own, "generator", 0))
        found += [(inputs.clone(), target) for inputs, target in stream]
        passes += 1
    return found[:count]


def plain_weights(kind: str, num_steps: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """Train in plain PyTorch, in float64, on the samples of a stream in order, 12 in a batch."""
    inputs, targets = map(torch.stack, zip(*samples(kind, 12 * num_steps, seed), strict=True))
    torch.manual_seed(derive(seed, "weights"))
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in torch.arange(12 * num_steps).split(12):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[rows].double()), targets[rows]).backward()
        optimizer.step()
    return model.state_dict()
