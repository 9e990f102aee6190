"""Text and token ids for language models, in files of any size."""

from __future__ import annotations

import codecs
import fnmatch
import hashlib
import logging
import os
import re
import sysconfig
import tempfile
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch

from runner.config.errors import ConfigError, check
from runner.config.limits import PositiveInt, Range
from runner.data.base import Data, Samples
from runner.data.token_files import Segment, TokenFiles, TokenSamples, wrong_ids
from runner.data.vocabulary import Numbers, Tokenizer, Vocabulary
from runner.seeds import derive
from runner.storage.files import check_readable, walk
from runner.system.secrets import printable

log = logging.getLogger(__name__)

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages"}  # folders of the standard library
_TESTED = 1 << 13  # bytes at the beginning of a file in which a null byte says that it is no text
_PIECE = 1 << 24  # bytes that are tokenized at once
_LAST_LINE_END = re.compile(r".*\S\n(?=\S)", re.DOTALL)  # next to other white space, both may be one token
_SHARD_DTYPES = {20240520: "<u2", 20240801: "<u4"}  # by the first number of llm.c's .bin files, of GPT-2 and Llama 3
_SHARD_HEADER = 1024  # bytes: 256 numbers, int32


@dataclass
class TokenData(Data):
    """The base class of text and of token ids: contexts of consecutive tokens, of which a part is held out."""

    file: str | None = None
    tokenizer: str | None = None
    context: Annotated[int, Range(least=1, most=1 << 20)] = 256
    holdout: Annotated[float, Range(above=0, most=0.9)] = 0.01

    may_change_on_resume = ("file",)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What the ids mean; raises `ConfigError` if the file of the tokenizer cannot be used."""
        return Vocabulary() if self.tokenizer is None else Tokenizer(self.tokenizer)

    def load(self) -> tuple[Samples, Samples]:
        splits = self.splits({})
        return splits["train"](), splits["val"]()

    def splits(self, saved: Mapping[str, Any]) -> dict[str, Callable[[], Samples]]:
        self.check_vocabulary(saved)
        documents = self.documents()
        train, held_out = self.divided(documents)
        content = cache(partial(_fingerprint, documents, self.vocabulary.identity))
        parts = {"all": documents, "train": train, "val": held_out}
        return {name: partial(self._samples, name, chosen, content) for name, chosen in parts.items()}

    def check_vocabulary(self, saved: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if the model with the signature `saved` was trained with other tokens."""
        trained = saved.get("text", {})
        for key, here in (("tokenizer", self.vocabulary.identity), ("vocabulary", self.vocabulary.size)):
            why = f"the model was trained with another {key}"
            check(not trained or trained[key] == here, "tokenizer", self.tokenizer, why, f"use the same {key}")

    @abstractmethod
    def documents(self) -> list[Segment]:
        """Return the documents, or files with the ids of several; raises `ConfigError` if there is none."""

    @abstractmethod
    def divided(self, documents: list[Segment]) -> tuple[list[Segment], list[Segment]]:
        """Return the documents to train on, and those that are held out."""

    @abstractmethod
    def tokens(self, documents: list[Segment]) -> TokenFiles:
        """Return the ids of `documents`."""

    def _samples(self, name: str, documents: list[Segment], content: Callable[[], str]) -> Samples:
        tokens = self.tokens(documents)
        samples = TokenSamples(tokens, self.context, self.vocabulary, content, self.num_bytes(documents))
        least = self.context + 1 if name == "train" else 2  # what is evaluated may be shorter than a context
        what = {"val": "held-out text", "train": "training text"}.get(name, "text")
        why = f"the {what} has {len(tokens):,} tokens, and at least {least:,} are needed, a context and one more"
        check(len(tokens) >= least, "context", self.context, why, "use a smaller data.context, or more text")
        return samples

    def num_bytes(self, documents: list[Segment]) -> int | None:
        """Return the number of bytes of the text of `documents`, if it is known."""
        return None


@dataclass
class Text(TokenData):
    """Files of text, each of which is a document; see `conf/data/text.yaml`. Bytes are tokens if no tokenizer is named.

    A share of the documents is held out, and of a few large ones the end of one.
    """

    glob: str = "*"

    def divided(self, documents: list[Segment]) -> tuple[list[Segment], list[Segment]]:
        return _drawn(documents, self.holdout)

    def tokens(self, documents: list[Segment]) -> TokenFiles:
        if isinstance(self.vocabulary, Tokenizer):
            return tokenized(documents, self.vocabulary)
        return TokenFiles(documents, self.vocabulary.end, is_inserted=True)

    def num_bytes(self, documents: list[Segment]) -> int:
        return sum(each.length for each in documents)

    def documents(self) -> list[Segment]:
        path = Path(sysconfig.get_path("stdlib") if self.file is None else self.file).expanduser()
        paths = _files(path, "*.py" if self.file is None else self.glob)
        why, is_chosen = "data.file is a single file", self.glob != "*"
        check(not (is_chosen and path.is_file()), "glob", self.glob, why, "leave it out")
        why, remedy = f"no file in {path} has a name that it matches", "leave it out, or name another pattern"
        check(bool(paths) or not is_chosen, "glob", self.glob, why, remedy)
        if self.file is None:  # most of them are small, and not every installation has them
            paths = [each for each in paths if not _LEFT_OUT & {*Path(each).parts}]
        sizes = [(each, os.path.getsize(each)) for each in paths]
        documents = [Segment(each, 0, size) for each, size in sizes if size]
        binary = {each.file for each in documents if b"\0" in each.read(0, min(_TESTED, each.length)).tobytes()}
        why = f"it is no text: there is a null byte in its first {_TESTED:,}"
        remedy = "name a file of text; UTF-16 has to be converted to UTF-8"
        check(len(paths) > 1 or not binary, "file", str(path), why, remedy)
        if binary:
            name = printable(str(next(each.file for each in documents if each.file in binary)))
            log.warning("data.file: %d of %d files are no text and left out, such as %s", len(binary), len(paths), name)
        documents = [each for each in documents if each.file not in binary]
        remedy = "name a file, or a folder with files, that has some"
        check(bool(documents), "file", str(path), "there is no text in it", remedy)
        return documents


@dataclass
class Tokens(TokenData):
    """Token ids in `.npy` and `.bin` files; see `conf/data/tokens.yaml`.

    Files with `val` in their names are held out; if there is none, or no other, the end of the last one is.
    """

    vocabulary_size: PositiveInt = 50257
    dtype: Literal["uint8", "uint16", "uint32", "int32"] = "uint16"

    @cached_property
    def vocabulary(self) -> Vocabulary:
        if self.tokenizer is None:
            return Numbers(self.vocabulary_size)
        found = Tokenizer(self.tokenizer)
        why, size = f"the tokenizer has {found.size:,} tokens", self.vocabulary_size
        check(found.size <= size, "vocabulary_size", size, why, f"use at least {found.size}")
        found.size = size  # it may be rounded up
        return found

    def documents(self) -> list[Segment]:
        why, remedy = "there are no token ids without a file", "data.file=PATH of a file or folder"
        check(self.file is not None, "file", None, why, remedy)
        path = Path(str(self.file)).expanduser()
        paths = [each for each in _files(path, "*") if each.endswith((".npy", ".bin"))]
        check(bool(paths), "file", str(path), "there is no .npy or .bin file in it", "name one, or a folder of them")
        shards = [self._shard(each) for each in paths]
        why, remedy = "there are no token ids in it", "name a file, or a folder with files, that has some"
        check(any(each.length for each in shards), "file", str(path), why, remedy)
        kinds = {each.dtype: each.file for each in shards}
        both = " and ".join(f"{np.dtype(dtype)} ({printable(str(file))})" for dtype, file in kinds.items())
        why = f"files have ids of the dtypes {both}"
        check(len(kinds) == 1, "file", str(path), why, "write all of them with one dtype")
        return shards

    def divided(self, documents: list[Segment]) -> tuple[list[Segment], list[Segment]]:
        held_out = ["val" in Path(str(each.file)).name for each in documents]
        if any(held_out) and not all(held_out):
            rest = [each for each, is_held_out in zip(documents, held_out, strict=True) if not is_held_out]
            return rest, [each for each in documents if each not in rest]
        total = sum(each.length for each in documents)
        return _cut(documents, total - max(1, round(self.holdout * total)))

    def tokens(self, documents: list[Segment]) -> TokenFiles:
        return TokenFiles(documents)

    def _shard(self, path: str) -> Segment:
        if path.endswith(".npy"):
            found = _npy(path)
        else:
            size = os.path.getsize(path)
            header = np.fromfile(path, "<i4", 3)
            if len(header) == 3 and header[0] in _SHARD_DTYPES:
                found = Segment(path, _SHARD_HEADER, int(header[2]), _SHARD_DTYPES[int(header[0])])
            else:
                found = Segment(
                    path, 0, size // np.dtype(self.dtype).itemsize, np.dtype(self.dtype).newbyteorder("<").str
                )
            why, remedy = f"it has {size:,} bytes, and no whole number of ids of {self.dtype}", "set data.dtype"
            if found.first:
                why, remedy = f"its header names {found.length:,} ids, and it has {size:,} bytes", "restore the file"
            check(size == found.first + found.length * np.dtype(found.dtype).itemsize, "file", path, why, remedy)
        for start in (0, max(0, found.length - _PIECE // 256)):
            ids = found.read(start, min(found.length, start + _PIECE // 256))
            is_half = not found.first and len(ids) > 1 and not ids[1::2].any() and ids.any()
            reason = "every other id is 0, as in halves of larger numbers" if is_half else ""
            reason = reason or wrong_ids(ids, self.vocabulary)
            check(not reason, "file", path, reason, "set data.vocabulary_size, and data.dtype of .bin files")
        return found


def tokenized(documents: Sequence[Segment], tokenizer: Tokenizer) -> TokenFiles:
    """Return the token ids of texts, which are written to a file without a name: it disappears with the process.

    A text is tokenized in pieces of some 16 MiB, which end between two lines if possible.

    Raises:
        ConfigError: if a text is not UTF-8.
    """
    kind = np.dtype("<u2" if tokenizer.size <= 1 << 16 else "<u4")
    with ExitStack() as stack:
        file, count, ends = stack.enter_context(tempfile.TemporaryFile(buffering=0)), 0, 0
        for document in documents:
            for piece in _pieces(document):
                ids = np.asarray(tokenizer.encode(piece), kind)
                file.write(ids.tobytes())
                count += len(ids)
                ends += np.count_nonzero(ids == tokenizer.end) if tokenizer.end is not None else 0
            if tokenizer.end is not None:
                count += file.write(np.asarray(tokenizer.end, kind).tobytes()) // kind.itemsize
        if ends:
            text = "data.file: the texts have the token that ends a document in them, %d times; a document ends there"
            log.warning(text, ends)
        tokens = TokenFiles([Segment(file.fileno(), 0, count, kind.str)], tokenizer.end)
        weakref.finalize(tokens, stack.pop_all().close)  # open as long as they are
    return tokens


def _pieces(document: Segment) -> Iterator[str]:
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    for start in range(0, document.length, _PIECE):
        stop = min(document.length, start + _PIECE)
        try:
            text = rest + decoder.decode(document.read(start, stop).tobytes(), stop == document.length)
        except UnicodeDecodeError as error:
            why = f"it is not UTF-8: {error.reason} near byte {start + error.start:,}"
            remedy = "convert it, or leave data.tokenizer=null, which trains on bytes of any encoding"
            raise ConfigError("file", str(document.file), why, remedy) from None
        line = _LAST_LINE_END.match(text)
        end = len(text) if stop == document.length else line.end() if line else text.rfind("\n") + 1 or len(text)
        rest = text[end:]
        yield text[:end]


def _files(path: Path, pattern: str) -> list[str]:
    """Return the sorted paths of the files below `path` whose names match, but hidden ones; or `path`, if it is one."""
    check_readable("file", path)
    why = f"there is no such file or folder in {path.parent.absolute()}"
    check(path.exists(), "file", str(path), why, "data.file=PATH")
    if not path.is_dir():
        check(path.is_file(), "file", str(path), "it is no regular file", "name a file, or a folder of them")
        return [str(path)]
    found: list[str] = []
    others: list[str] = []
    for folder, folders, names in walk(path):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        names = [name for name in fnmatch.filter(names, pattern) if not name.startswith(".")]
        paths = [os.path.join(folder, name) for name in names]
        found += filter(os.path.isfile, paths)
        others += [each for each in paths if not os.path.isfile(each)]
        others += [each for each in (os.path.join(folder, name) for name in folders) if os.path.islink(each)]
    if others:
        text = "data.file: %d linked folders, broken links and special files are left out, such as %s"
        log.warning(text, len(others), printable(others[0]))
    return sorted(found)


def _drawn(documents: list[Segment], holdout: float) -> tuple[list[Segment], list[Segment]]:
    """Return the documents to train on and those that are held out, in their order.

    They are drawn at random, independently of the seed of a run, as long as they fit into the share of the bytes. If
    these are less than half of it, as of a few large ones, the end of the shortest other one is held out, too.
    """
    share = wanted = max(1, round(holdout * sum(each.length for each in documents)))
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(derive(0, "text"))).tolist()
    train, held = dict(enumerate(documents)), dict[int, Segment]()
    for number in order:
        if documents[number].length <= share:
            held[number] = train.pop(number)
            share -= documents[number].length
    if share > wanted / 2:
        number = min(train, key=lambda number: documents[number].length)
        position = documents[number].length - share
        # Not inside of a letter, of which all bytes but the first have these bits in UTF-8.
        before = documents[number].read(max(0, position - 3), position + 1).tolist()[::-1]
        position -= next((count for count, byte in enumerate(before) if byte & 0xC0 != 0x80), 0)
        [train[number]], [held[number]] = _cut([documents[number]], position)
    return [*train.values()], [held[number] for number in sorted(held)]


def _cut(segments: Sequence[Segment], position: int) -> tuple[list[Segment], list[Segment]]:
    """Return the tokens before `position` and those from it on."""
    before: list[Segment] = []
    after: list[Segment] = []
    for each in segments:
        size = min(each.length, position)
        before += [each.part(0, size)] if size else []
        after += [each.part(size, each.length)] if size < each.length else []
        position -= size
    return before, after


def _npy(path: str) -> Segment:
    try:
        found = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ConfigError("file", path, f"it is no .npy file: {error}", "write it with numpy.save") from None
    why = f"it has the shape {list(found.shape)} and the dtype {found.dtype}"
    check(found.ndim == 1 and found.dtype.kind in "iu", "file", path, why, "token ids are a list of whole numbers")
    return Segment(path, found.offset, len(found), found.dtype.str)


def _fingerprint(segments: Sequence[Segment], identity: str) -> str:
    return hashlib.sha256(f"{identity} {TokenFiles(segments).fingerprint()}".encode()).hexdigest()
