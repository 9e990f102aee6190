"""Streams of the user: data sets whose samples have an order, but neither an index nor a known number.

Sample i of a run is the i-th that the stream yields, whatever the mode: each process reads all of it, and keeps its
rows. A stream that ends begins anew. To resume, it is read again up to the same sample, or takes back its own state.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch

from runner.batching import MicroBatch
from runner.config.errors import described
from runner.data.fetch import HASHED, UserSamples
from runner.data.forms import singles
from runner.data.image_files import to_device
from runner.data.stream_reader import Loaded, Mark, Reader, StreamJob
from runner.data.workers import Workers, call_shared
from runner.seeds import random_states
from runner.storage.checkpoint import reread
from runner.storage.value_checks import COUNT, check_like
from runner.system.trees import Tree

log = logging.getLogger(__name__)

_SLICE = 1000
"""The number of samples that are skipped before the progress is looked at, or a worker answers."""
_SECONDS = 30.0
"""The time between two lines that say how far a stream is read."""


class StreamSamples(UserSamples):
    """The samples of a stream, which `reader` reads here or, as function `number` of `workers`, in one process.

    An evaluation reads them to their end, or `most` of them.
    """

    def __init__(self, reader: Reader, number: int, workers: Workers, content: str, most: int | None):
        assert reader.tried[0].batch is not None
        inputs, *rest = reader.tried[0].batch  # which was read before the `doubles` were known
        super().__init__(workers, content, reader, (singles(inputs, reader.doubles), *rest))
        self._load: Callable[[Any], Loaded] = partial(call_shared, number) if workers.count else reader
        self._reader, self._most = reader, most
        self._mark: Mark | None = None  # before the last batch that was taken
        self._saved: Mark | None = None  # in the last checkpoint
        self._is_resumed = False

    def check_draws(self, held_out: bool) -> None:
        """Say it in a line if the first samples are others when they are read again."""
        if not self._reader.try_again():
            text = "data: the first samples of %s are others each time that it is read, with the same seeds: so are "
            text += "those of a resume; draw from random, numpy.random, torch, or a generator in it, and begin anew"
            log.warning(text, self._reader.name)

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    @property
    def length(self) -> None:
        return None

    def batches(self, micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Any]:
        marks: deque[Mark | None] = deque()

        def load() -> Generator[Tree]:
            rest = iter(micros)
            for first in rest:
                jobs = self._jobs(itertools.chain([first], rest), self._begin(first.start, seed), seed)
                for batch, mark, news in self._workers.map(self._load, jobs):
                    if news:
                        log.info("data: %s", news)
                    if batch is not None:
                        marks.append(mark)
                        yield batch

        for tensors in to_device(load(), device):  # which may read a batch ahead, whose mark is not that of the next
            self._mark = marks.popleft()
            yield self.form(*tensors)

    def _begin(self, start: int, seed: int) -> int:
        """Begin at the place in the last checkpoint, if it helps to read on from `start`; return the position."""
        mark, reader = self._saved, self._reader
        position, why = 0, reader.why_not or "the checkpoint has no place in it"
        if mark and reader.has_state and mark.seed == seed and mark.position + HASHED <= start:
            [tried] = self._workers.map(self._load, [StreamJob(0, 0, seed, mark)])
            position, why = mark.position + HASHED if tried.mark else 0, tried.news
        if self._is_resumed and position:
            log.info("data: the stream goes on after sample %d, by its load_state_dict", position)
        elif self._is_resumed:
            log.info("data: %d samples of the stream are skipped, as %s", start, why)
        self._is_resumed = False
        return position

    def _jobs(self, micros: Iterable[MicroBatch], position: int, seed: int) -> Iterator[StreamJob]:
        """Yield a job for each of `micros`, and before it some without samples, while many are skipped."""
        last = time.monotonic()
        for micro in micros:
            for each in range(position + _SLICE, micro.start, _SLICE):
                if time.monotonic() > last + _SECONDS:
                    last = time.monotonic()
                    log.info("data: %d of %d samples of the stream are skipped", each - _SLICE, micro.start)
                yield StreamJob(each, each, seed)
            yield StreamJob(micro.start, micro.stop, seed)
            position = micro.stop

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
        """Return a place at or before the next batch to take; empty if a resume has to skip all samples before it."""
        self._saved = mark = self._mark
        try:
            return reread(mark._asdict()) if mark else {}
        except Exception as error:
            if not self._reader.why_not:
                self._reader.why_not = f"a checkpoint does not hold what its state_dict returns ({described(error)})"
                log.warning("data: a resume will skip samples of %s, as %s", self._reader.name, self._reader.why_not)
            return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Let `batches` begin at the place that `state` returned; raises `UnexpectedContentError` if it is no place."""
        self._is_resumed, self._saved = True, None
        if state:
            form = {"seed": int, "passes": COUNT, "position": COUNT, "state": object, "random": random_states([])}
            form["digest"] = str
            check_like(state, form, "the place in the stream")
            self._saved = Mark(**state)

    def close(self) -> None:
        super().close()
        self._reader.close()
