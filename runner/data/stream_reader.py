"""Reads a stream of the user in order, again from its beginning, or on from a place that a checkpoint holds."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from runner.config.errors import check, described
from runner.data.base import DataError
from runner.data.fetch import HASHED, BatchMaker, seed_generators, sha256
from runner.data.forms import singles
from runner.data.generators import generators_of, set_states, states_of
from runner.seeds import derive, random_states, set_random_states
from runner.system.generators import OwnGenerators, seeded
from runner.system.trees import Tree, leaves_of, map_leaves

log = logging.getLogger(__name__)

_DISTANCE = 1000
"""The number of samples between two marks."""


class Mark(NamedTuple):
    """A place in a stream from which it can be read on: plain values and tensors, for checkpoints.

    Args:
        seed: that from which the stream draws random numbers.
        passes: the number of times that the stream has ended.
        position: the number of samples before this place, in all passes.
        state: the `state_dict` of the data set.
        random: the states of the global generators, as the stream sees them.
        digest: a hash of the next `HASHED` samples, by which it is known whether the stream goes on there.
    """

    seed: int
    passes: int
    position: int
    state: Any
    random: dict[str, torch.Tensor]
    digest: str = ""


class StreamJob(NamedTuple):
    """Samples [start, stop) to read, in one pass if it `ends` with the stream; or a `mark` after which to begin."""

    start: int
    stop: int
    seed: int
    mark: Mark | None = None
    ends: bool = False


class Loaded(NamedTuple):
    """A batch, or None if there are no samples; a mark that is at least `HASHED` samples before; and news in words."""

    batch: tuple[Tree, Any] | None
    mark: Mark | None
    news: str


class Reader(BatchMaker):
    """Reads a stream in order, and again from its beginning for a job that is before its position.

    It reads copies of the stream, so that each begins as the user has made it, if it can be copied. What it draws from
    the global generators, and from those that it holds, depends on the seed and the pass.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None, is_divided: bool = True):
        super().__init__(dataset, collate, is_divided)
        self.name, self.tried = type(dataset).__name__, list[Loaded]()
        self.has_state = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
        self.why_not = "" if self.has_state else "it has no state_dict and load_state_dict"
        self._stream, self.is_copied = dataset, True
        self._iterator: Iterator[Any] | None = None
        self._seed = self._passes = self._position = 0
        self._random, self._generators, self._held = OwnGenerators(), list[Any](), list[Any]()
        self._mark: Mark | None = None
        self._hashed: Mark | None = None  # the last one whose next samples are known
        self._next_samples, self._news = list[str](), ""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_iterator": None, "_stream": None, "tried": [], "_generators": [], "_held": []}

    def __call__(self, job: StreamJob) -> Loaded:
        if job.mark:
            why_not = self._why_not_from(job.mark)
            return Loaded(None, None if why_not else job.mark, why_not)
        if self._iterator is None or self._seed != job.seed or self._position > job.start:
            self._reset(job.seed)
        samples = []
        with self._drawing():
            if self._iterator is None:
                self._begin_pass()
            while self._position < job.stop:
                is_wanted, found = self._position >= job.start, self._next(job.ends)
                if found is None:
                    break
                if is_wanted:
                    samples.append(map_leaves(_own, found[0]))  # a stream may write its next sample in the same memory
            if self.has_state and not job.ends:
                self._update_mark()
        news, self._news = self._news, ""
        if not samples:
            return Loaded(None, None, news)
        numbers = range(job.start, job.start + len(samples))
        with seeded(0):
            batch = self._batch(samples, numbers, derive(job.seed, "collate", job.start), self._generators)
        return Loaded(batch, self._hashed, news)

    def some(self) -> list[Tree]:
        """Return the first samples, in a few batches, which `tried` has with their marks."""
        tried = [self(StreamJob(*each, seed=0, ends=True)) for each in pairwise((0, 1, HASHED // 2, HASHED))]
        why, remedy = "it yields no samples", "let __iter__ yield samples"
        if self.tried:
            why, remedy = f"{why} when it is read again", "let __iter__ begin anew each time that it is called"
        check(tried[0].batch is not None, "", self.name, why, remedy)
        self.close()
        self.tried = tried
        return [each.batch for each in tried if each.batch]

    def try_again(self) -> bool:
        """Read the first samples again; return whether they are the same."""
        before = [(singles(each.batch[0], self.doubles), *each.batch[1:]) for each in self.tried if each.batch]
        return sha256(self.some()) == sha256(before)

    def close(self) -> None:
        """End the iteration: what it holds, such as a file or a lock, is free for the next one."""
        iterator, self._iterator, self._position = self._iterator, None, 0
        if isinstance(iterator, Generator):
            iterator.close()

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """A context in which all generators have the states of this stream; then, they go on as before."""
        before = states_of(self._generators)
        with self._random.drawing():
            set_states(self._generators, self._held)
            try:
                yield
            finally:
                self._held = states_of(self._generators)
                set_states(self._generators, before)

    def _new_stream(self) -> Any:
        """Return a copy of the stream as it was given, which shares its arrays; itself if it cannot be copied."""
        arrays = (leaf for _, leaf in leaves_of([*vars(self.dataset).values()]))
        shared = {id(each): each for each in arrays if isinstance(each, torch.Tensor | np.ndarray)}
        try:
            return copy.deepcopy(self.dataset, shared)
        except Exception as error:  # of any type: it holds a lock, for example
            if self.is_copied:
                log.debug("%s cannot be copied", self.name, exc_info=error)
            self.is_copied = False
            return self.dataset

    def _reset(self, seed: int) -> None:
        self.close()
        self._stream = self._new_stream()
        self._seed, self._passes, self._generators = seed, 0, generators_of(self._stream)
        self._held = states_of(self._generators)
        self._mark = self._hashed = None
        self._next_samples, self._news = [], ""

    def _why_not_from(self, mark: Mark) -> str:
        """Begin `HASHED` samples after `mark`; return in words why the stream does not go on there, if so."""
        self._reset(mark.seed)
        try:
            self._stream.load_state_dict(copy.deepcopy(mark.state))
            self._passes, self._position, self._mark = mark.passes, mark.position, mark._replace(digest="")
            with self._drawing():
                self._begin_pass()
                set_random_states(mark.random, [])
                for _ in range(HASHED):
                    self._next(False)
        except Exception as error:
            why_not = f"it raises {described(error)} after load_state_dict(state_dict())"
        else:
            is_same = self._hashed is not None and self._hashed.digest == mark.digest
            why_not = "it yields others after load_state_dict(state_dict())" * (not is_same)
        if why_not:
            self.close()
        return why_not

    def _update_mark(self) -> None:
        """Take a mark, if the last one is far away; its next samples are hashed as they are read."""
        if self._mark and (not self._mark.digest or self._position < self._mark.position + _DISTANCE):
            return
        try:
            state = copy.deepcopy(self._stream.state_dict())  # which the next sample may change
        except Exception as error:
            self.has_state, self.why_not = False, f"its state_dict raises {described(error)}"
        else:
            self._mark = Mark(self._seed, self._passes, self._position, state, random_states([]))

    def _follow(self, sample: Any) -> None:
        """Hash one of the samples after the mark."""
        if self._mark is None or self._mark.digest:
            return
        try:
            self._next_samples.append(_digest(sample))
        except Exception as error:  # of a sparse tensor, for example
            self.has_state, self.why_not = False, f"its samples cannot be compared ({described(error)})"
        if len(self._next_samples) == HASHED:
            self._mark = self._hashed = self._mark._replace(digest=_digest(self._next_samples))
            self._next_samples = []

    def _begin_pass(self) -> None:
        seed_generators(derive(self._seed, "stream", self._passes), self._generators)
        try:
            if callable(set_epoch := getattr(self._stream, "set_epoch", None)):
                set_epoch(self._passes)
            self._iterator = iter(self._stream)
        except Exception as error:
            raise self._error(f"the beginning of {self.name}", error) from error

    def _next(self, ends: bool) -> tuple[Any] | None:
        """Return the next sample, which may be that of another pass; None at the end if the job `ends` there."""
        for is_new in (False, True):
            try:
                assert self._iterator is not None
                sample = next(self._iterator)
            except StopIteration:
                if ends or is_new:
                    break
                if not self._passes:
                    self._news = f"the stream ended after {self._position} samples, and begins anew"
                self._passes += 1
                self._begin_pass()
            except Exception as error:
                failed = self._error(f"sample {self._position} of {self.name}", error)
                self.close()
                raise failed from error
            else:
                self._position += 1
                self._follow(sample)
                return (sample,)
        if ends:
            return None
        why = f"it yields no samples in pass {self._passes + 1}, after {self._position} in the ones before"
        raise DataError(self.name, why, "let __iter__ begin anew each time that it is called, or take fewer steps")

    def _error(self, what: str, error: Exception) -> DataError:
        return DataError(what, described(error), "correct its __iter__")


def _digest(sample: Any) -> str:
    digest = hashlib.sha256()
    for name, leaf in leaves_of(sample):
        is_array = isinstance(leaf, np.ndarray)
        value = (leaf.dtype, leaf.shape, leaf.tobytes()) if is_array else leaf
        digest.update(f"{name} {sha256(leaf) if isinstance(leaf, torch.Tensor) else repr(value)} ".encode())
    return digest.hexdigest()


def _own(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
