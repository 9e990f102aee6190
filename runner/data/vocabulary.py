"""What token ids mean: bytes, the tokens of a tokenizer's file, or nothing but numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runner.config.errors import ABSENT, ConfigError, check
from runner.storage.files import check_readable
from runner.system.import_path import is_installed

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""The tokens that end a text in common vocabularies, in the order in which they are looked for."""


class Vocabulary:
    """Bytes, and a token at the end of each document.

    Attributes:
        size: the number of ids.
        end: the id at the end of each document; None if there is none.
        identity: a hash of the tokenizer; empty if there is no file of one.
    """

    size: int = 257
    end: int | None = 256
    identity: str = ""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; raises `ConfigError` if the ids have no text."""
        try:
            return [*text.encode("utf-8", "surrogateescape")]  # as they were typed, if they are no UTF-8
        except UnicodeEncodeError as error:
            raise ConfigError("--prompt", text, f"it is no text: {error.reason}", "type other characters") from None

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without ends of documents; bytes that are no UTF-8 become U+FFFD."""
        return bytes(each for each in ids if each != self.end).decode("utf-8", "replace")

    def decode_after(self, ids: list[int], new: list[int]) -> str:
        """Return the text of `new`, which follows `ids`; many tokenizers drop the space at the beginning of a text."""
        before, whole = self.decode(ids), self.decode([*ids, *new])
        return whole.removeprefix(before) if whole.startswith(before) else self.decode(new)


class Numbers(Vocabulary):
    """Ids of which only the number is known."""

    def __init__(self, size: int):
        self.size, self.end = size, None

    def encode(self, text: str) -> list[int]:
        why = "the run was trained on ids without a tokenizer"
        raise ConfigError("--prompt", ABSENT, why, "name the file with data.tokenizer=FILE in training")

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(str, ids))


class Tokenizer(Vocabulary):
    """The tokens of a `tokenizer.json`, as the package tokenizers saves it."""

    def __init__(self, file: str):
        check(is_installed("tokenizers"), "tokenizer", file, "tokenizers is not installed", "pip install tokenizers")
        import tokenizers  # pyright: ignore[reportMissingImports]

        path = Path(file).expanduser()
        check_readable("tokenizer", path)
        check(path.is_file(), "tokenizer", file, "there is no such file", "data.tokenizer=PATH/tokenizer.json")
        content = path.read_bytes()
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # of no type of its own
            remedy = "name a tokenizer.json of the package tokenizers"
            raise ConfigError("tokenizer", file, f"it is no tokenizer: {error}", remedy) from None
        self._tokenizer.no_truncation()  # which a tokenizer.json may have for another model
        self._tokenizer.no_padding()
        self.size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)  # not all ids need to have a token
        ends = (self._tokenizer.token_to_id(each) for each in _ENDS)
        self.end = next((each for each in ends if each is not None), None)
        self.identity = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([*ids])
