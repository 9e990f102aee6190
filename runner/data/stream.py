"""Streams of the user: data sets whose samples have an order, but neither an index nor a known number.

Sample i of a run is the i-th that the stream yields, whatever the mode: each process reads all of it, and keeps its
rows. A stream that ends begins anew. To resume, it is read again up to the same sample, or takes back its own state.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from runner.batching import MicroBatch
from runner.config.errors import check, described
from runner.data.base import DataError
from runner.data.fetch import HASHED, BatchMaker, UserSamples, seed_generators, sha256
from runner.data.generators import generators_of, set_states, states_of
from runner.data.image_files import to_device
from runner.data.workers import Workers, call_shared
from runner.seeds import OwnGenerators, derive, random_states, seeded, set_random_states
from runner.storage.checkpoint import reread
from runner.storage.value_checks import COUNT, check_like
from runner.system.trees import Tree, leaves_of, map_leaves

log = logging.getLogger(__name__)

_SLICE = 1000
"""The number of samples that are skipped before the progress is looked at, or a worker answers."""
_SECONDS = 30.0
"""The time between two lines that say how far a stream is read."""


class Mark(NamedTuple):
    """A place in a stream from which it can be read on: plain values and tensors, for checkpoints.

    Args:
        seed: that from which the stream draws random numbers.
        passes: the number of times that the stream has ended.
        position: the number of samples before this place, in all passes.
        state: the `state_dict` of the data set.
        random: the states of the global generators, as the stream sees them.
    """

    seed: int
    passes: int
    position: int
    state: Any
    random: dict[str, torch.Tensor]


class StreamJob(NamedTuple):
    """Samples [start, stop) to read, in one pass if it `ends` with the stream; `mark` may be a place before them."""

    start: int
    stop: int
    seed: int
    mark: Mark | None = None
    ends: bool = False


class Loaded(NamedTuple):
    """A batch, or None if there are no samples; the place after it; and the length of the first pass, once known."""

    batch: tuple[Tree, Tree] | None
    mark: Mark | None
    length: int


class Reader(BatchMaker):
    """Reads a stream in order, and again from its beginning, or from a mark, for a job that is before its position.

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
        self._seed = self._passes = self._position = self._length = 0
        self._random, self._generators, self._held = OwnGenerators(), list[Any](), list[Any]()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_iterator": None, "_stream": None, "tried": [], "_generators": [], "_held": []}

    def __call__(self, job: StreamJob) -> Loaded:
        begin = job.mark if job.mark and self.has_state and job.mark.seed == job.seed else None
        begin = begin if begin and begin.position <= job.start else None
        is_before = self._iterator is not None and self._seed == job.seed and self._position <= job.start
        if not is_before or (begin and begin.position > self._position):
            self.close()
            self._stream = self._new_stream()
            self._seed, self._generators = job.seed, generators_of(self._stream)
            self._held = states_of(self._generators)
        samples = []
        with self._drawing():
            if self._iterator is None:
                self._begin(begin)
            while self._position < job.stop:
                is_wanted, found = self._position >= job.start, self._next(job.ends)
                if found is None:
                    break
                if is_wanted:
                    samples.append(map_leaves(_own, found[0]))  # a stream may write its next sample in the same memory
            mark = self._mark() if samples and self.has_state else None
        if not samples:
            return Loaded(None, None, self._length)
        numbers = range(job.start, job.start + len(samples))
        with seeded(0):
            batch = self._batch(samples, numbers, derive(job.seed, "collate", job.start), self._generators)
        return Loaded(batch, mark, self._length)

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
        """Read the first samples again: return whether they are the same, and find out if the stream's state helps."""
        before, (_, second, third) = self.tried, self.tried
        if self.has_state:
            self.why_not = self._why_not(second.mark, third.batch)
            self.has_state = not self.why_not
        return sha256(self.some()) == sha256([each.batch for each in before if each.batch])

    def _why_not(self, mark: Mark | None, wanted: Tree | None) -> str:
        """Return in words why a stream that is at `mark` cannot go on with the batch `wanted`; empty if it can."""
        if mark is None or wanted is None:
            return "it is short"
        try:
            mark = mark._replace(state=reread(mark.state))
        except Exception as error:
            return f"a checkpoint does not hold what its state_dict returns ({described(error)})"
        found = self(StreamJob(HASHED // 2, HASHED, 0, mark, ends=True)).batch
        self.close()
        is_same = sha256(found) == sha256(wanted)
        return self.why_not or "it does not go on there after load_state_dict(state_dict())" * (not is_same)

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

    def _begin(self, mark: Mark | None) -> None:
        self._length = 0
        if mark:
            try:
                self._stream.load_state_dict(copy.deepcopy(mark.state))
            except Exception as error:
                self.has_state, self.why_not = False, f"its load_state_dict raises {described(error)}"
                mark, self._stream = None, self._new_stream()
        self._passes, self._position = (mark.passes, mark.position) if mark else (0, 0)
        self._begin_pass()
        if mark:
            set_random_states(mark.random, [])

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
                self._length = self._length or self._position
                self._passes += 1
                self._begin_pass()
            except Exception as error:
                failed = self._error(f"sample {self._position} of {self.name}", error)
                self.close()
                raise failed from error
            else:
                self._position += 1
                return (sample,)
        if ends:
            return None
        why = f"it yields no samples in pass {self._passes + 1}, after {self._position} in the ones before"
        raise DataError(self.name, why, "let __iter__ begin anew each time that it is called, or take fewer steps")

    def _error(self, what: str, error: Exception) -> DataError:
        return DataError(what, described(error), "correct its __iter__; log.txt has the traceback")

    def _mark(self) -> Mark | None:
        state = self._state()
        random = random_states([])
        return Mark(self._seed, self._passes, self._position, state, random) if self.has_state else None

    def _state(self) -> Any:
        if self.has_state:
            try:
                return copy.deepcopy(self._stream.state_dict())  # which the next sample may change
            except Exception as error:
                self.has_state, self.why_not = False, f"its state_dict raises {described(error)}"
        return None


def _own(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


class StreamSamples(UserSamples):
    """The samples of a stream, which `reader` reads here or, as function `number` of `workers`, in one process.

    An evaluation reads them to their end, or `most` of them.
    """

    def __init__(self, reader: Reader, number: int, workers: Workers, content: str, most: int | None):
        first = reader.tried[0].batch
        assert first is not None
        super().__init__(workers, content, reader, first)
        self._load: Callable[[Any], Loaded] = partial(call_shared, number) if workers.count else reader
        self._reader, self._most = reader, most
        self._mark: Mark | None = None  # after the last batch
        self._saved: Mark | None = None  # in the last checkpoint
        self._is_resumed = False

    def check_draws(self, held_out: bool) -> None:
        """Say it in a line if the first samples are others when they are read again, or if a resume has to skip."""
        reader = self._reader
        if not reader.try_again():
            text = (
                "data: the first samples of %s are others each time that it is read, with the same seeds: so are those "
            )
            text += (
                "of a resume; draw from random, numpy.random, torch, or a generator in it, and begin anew in __iter__"
            )
            log.warning(text, reader.name)
        elif reader.why_not and not held_out and callable(getattr(reader.dataset, "state_dict", None)):
            log.info("data: a resume will skip samples of %s, as %s", reader.name, reader.why_not)

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    @property
    def length(self) -> None:
        return None

    def batches(self, micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Any]:
        marks: deque[Mark | None] = deque()

        def load() -> Generator[Tree]:
            is_said = False
            for batch, mark, length in self._workers.map(self._load, self._jobs(micros, seed)):
                if length and not is_said:
                    log.info("data: the stream ended after %d samples, and begins anew", length)
                    is_said = True
                if batch is not None:
                    marks.append(mark)
                    yield batch

        for tensors in to_device(load(), device):  # which may read a batch ahead, whose mark is not that of the next
            self._mark = marks.popleft()
            yield self.form(*tensors)

    def _jobs(self, micros: Iterable[MicroBatch], seed: int) -> Iterator[StreamJob]:
        """Yield a job for each of `micros`, and before it some without samples, while many are skipped."""
        mark, position, last = self._saved, 0, time.monotonic()
        for micro in micros:
            if mark and (mark.seed != seed or mark.position > micro.start or not self._reader.has_state):
                mark = None
            position = max(position, mark.position if mark else 0)
            if self._is_resumed:
                self._is_resumed = False
                why = self._reader.why_not or "the checkpoint has no state of it that can be used"
                if mark:
                    log.info("data: the stream goes on after sample %d, by its load_state_dict", mark.position)
                else:
                    log.info("data: %d samples of the stream are skipped, as %s", micro.start, why)
            for each in range(position + _SLICE, micro.start, _SLICE):
                if time.monotonic() > last + _SECONDS:
                    last = time.monotonic()
                    log.info("data: %d of %d samples of the stream are skipped", each - _SLICE, micro.start)
                yield StreamJob(each, each, seed, mark)
            yield StreamJob(micro.start, micro.stop, seed, mark)
            position, mark = micro.stop, None

    def in_order(self, batch_size: int, shard: tuple[int, int], device: torch.device) -> Iterator[Any]:
        (index, count), most = shard, self._most or sys.maxsize
        starts = range(index * batch_size, most, count * batch_size)
        jobs = (StreamJob(first, min(first + batch_size, most), 0, ends=True) for first in starts)

        def load() -> Generator[Tree]:
            last, num_samples = time.monotonic(), 0
            with closing(self._workers.map(self._load, jobs)) as found:
                for batch, *_ in found:
                    if batch is None:
                        break
                    yield batch
                    num_samples += batch_size * count
                    if time.monotonic() > last + _SECONDS and not self._most:
                        last = time.monotonic()
                        text = "data: the evaluation has read %d samples of the stream, and goes on to its end; "
                        log.warning(f"{text}data.eval_samples=N ends it after N", num_samples)

        return (self.form(*tensors) for tensors in to_device(load(), device))

    def state(self) -> dict[str, Any]:
        """Return the place after the last batch that was taken; empty if a resume has to skip the samples before."""
        self._saved = mark = self._mark
        try:
            return reread(mark._asdict()) if mark else {}
        except Exception as error:
            self._reader.has_state = False
            self._reader.why_not = f"a checkpoint does not hold what its state_dict returns ({described(error)})"
            log.warning("data: a resume will skip samples of %s, as %s", self._reader.name, self._reader.why_not)
            return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Let `batches` begin at the place that `state` returned; raises `UnexpectedContentError` if it is no place."""
        self._is_resumed, self._saved = True, None
        if state:
            form = {"seed": int, "passes": COUNT, "position": COUNT, "state": object, "random": random_states([])}
            check_like(state, form, "the place in the stream")
            self._saved = Mark(**state)

    def close(self) -> None:
        super().close()
        self._reader.close()
