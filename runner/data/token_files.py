"""Token ids in files, which are read where they are needed: the memory of a run does not grow with its data."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from runner.batching import MicroBatch, SampleOrder
from runner.data.base import IGNORED, Batch, DataError, Samples, shard_bounds
from runner.data.image_files import to_device
from runner.data.vocabulary import Vocabulary
from runner.system.accelerator import has_streams

_HASHED = 1 << 16
"""The bytes at the beginning, and at the end, of a segment that a fingerprint covers."""


class Segment(NamedTuple):
    """Consecutive token ids in a file.

    Args:
        file: the path of the file, or its descriptor.
        first: the byte at which they begin.
        length: their number.
        dtype: the NumPy dtype of an id.
    """

    file: str | int
    first: int
    length: int
    dtype: str = "u1"

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids at positions [start, stop); raises `DataError` if they cannot be read."""
        size = np.dtype(self.dtype).itemsize
        try:
            file = os.open(self.file, os.O_RDONLY) if isinstance(self.file, str) else self.file
            try:
                content = os.pread(file, (stop - start) * size, self.first + start * size)
            finally:
                if isinstance(self.file, str):
                    os.close(file)
        except OSError as error:
            raise DataError(self.file, f"it cannot be read: {error.strerror}", "restore it") from error
        if len(content) != (stop - start) * size:
            raise DataError(self.file, "it has become shorter since the run began", "restore it")
        return np.frombuffer(content, self.dtype)

    def part(self, start: int, stop: int) -> Segment:
        """Return the ids at positions [start, stop) as a segment."""
        size = np.dtype(self.dtype).itemsize
        return self._replace(first=self.first + start * size, length=stop - start)


class TokenFiles:
    """The token ids of `segments`, one after another.

    Args:
        segments: where they are.
        end: the id at the end of each document; None if there is none.
        is_inserted: whether the files lack it, and it follows each segment.
    """

    def __init__(self, segments: Iterable[Segment], end: int | None = None, is_inserted: bool = False):
        self.segments, self.end = [each for each in segments if each.length], end
        self._inserted = end if is_inserted else None
        lengths = (each.length + (self._inserted is not None) for each in self.segments)
        self._starts = [0, *itertools.accumulate(lengths)]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids at positions [start, stop), int64 [stop − start]."""
        ids = np.empty(stop - start, np.int64)
        number, position = bisect.bisect_right(self._starts, start) - 1, start
        while position < stop:
            segment, offset = self.segments[number], position - self._starts[number]
            length = min(segment.length - offset, stop - position)
            if length > 0:
                ids[position - start : position - start + length] = segment.read(offset, offset + length)
            position += length
            if position < stop and self._inserted is not None:
                ids[position - start] = self._inserted
                position += 1
            number += 1
        return ids

    def place(self, position: int) -> str:
        """Return the file, and the number in it, of the token at `position` in words."""
        number = bisect.bisect_right(self._starts, position) - 1
        return f"{self.segments[number].file}, token {position - self._starts[number]:,}"

    def fingerprint(self) -> str:
        """Return a SHA-256 of the lengths, the beginnings and the ends of the segments."""
        digest = hashlib.sha256()
        for each in self.segments:
            most = max(1, _HASHED // np.dtype(each.dtype).itemsize)
            digest.update(f"{each.length} {each.dtype} ".encode())
            digest.update(each.read(0, min(most, each.length)).tobytes())
            digest.update(each.read(max(most, each.length - most), max(most, each.length)).tobytes())
        return digest.hexdigest()


class TokenSamples(Samples):
    """Contexts of consecutive tokens: inputs, int64 [n, context], and as targets the token that follows each.

    The targets that begin a document are `IGNORED`, and so are those after the end of the last context, whose inputs
    there are 0.

    Args:
        tokens: the ids.
        context: the number of tokens of an input.
        vocabulary: what the ids mean.
        content: returns the fingerprint of the whole data set.
        num_bytes: the number of bytes of the text; None if it is not known.
    """

    has_tokens = True

    def __init__(
        self,
        tokens: TokenFiles,
        context: int,
        vocabulary: Vocabulary,
        content: Callable[[], str],
        num_bytes: int | None = None,
    ):
        self.tokens, self.vocabulary, self.num_bytes = tokens, vocabulary, num_bytes
        self.shape, self._content = (context,), content

    def __len__(self) -> int:
        return -(-max(0, len(self.tokens) - 1) // self.shape[0])

    @property
    def example(self) -> Batch:
        return Batch(*torch.zeros(2, 1, *self.shape, dtype=torch.int64))

    def batches(self, micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Batch]:
        order = SampleOrder(len(self), seed)
        return self._on(device, (order.indices(micro.start, micro.stop).tolist() for micro in micros))

    def in_order(self, batch_size: int, shard: tuple[int, int], device: torch.device) -> Iterator[Batch]:
        start, stop = shard_bounds(len(self), shard)
        return self._on(device, (range(i, min(i + batch_size, stop)) for i in range(start, stop, batch_size)))

    def fingerprint(self) -> str:
        return self._content()

    def _on(self, device: torch.device, indices: Iterable[Iterable[int]]) -> Iterator[Batch]:
        return to_device((self._batch(each) for each in indices), device, has_streams(device))

    def _batch(self, indices: Iterable[int]) -> Batch:
        [context] = self.shape
        starts = [index * context for index in indices]
        inputs, targets = np.zeros((len(starts), context), np.int64), np.full((len(starts), context), IGNORED)
        for row, start in enumerate(starts):
            ids = self.tokens.read(start, min(start + context + 1, len(self.tokens)))
            if reason := wrong_ids(ids, self.vocabulary):
                first = int(((ids < 0) | (ids >= self.vocabulary.size)).argmax())
                remedy = "use the tokenizer with which the files were written"
                raise DataError(self.tokens.place(start + first), reason, remedy)
            inputs[row, : len(ids) - 1], targets[row, : len(ids) - 1] = ids[:-1], ids[1:]
        if self.tokens.end is not None:
            targets[inputs == self.tokens.end] = IGNORED
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))


def wrong_ids(ids: np.ndarray, vocabulary: Vocabulary) -> str:
    """Return in words which of `ids` is none of the `vocabulary`; empty if all are."""
    for each in (ids.min(initial=0), ids.max(initial=0)):
        if not 0 <= each < vocabulary.size:
            return f"there is the token id {each}, and the vocabulary has the ids from 0 to {vocabulary.size - 1:,}"
    return ""
