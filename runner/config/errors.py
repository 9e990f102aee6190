"""Config errors: the key, the value, why it is invalid, and what to type instead; and where user code raises others."""

from __future__ import annotations

import difflib
import enum
import os
import re
import sysconfig
import textwrap
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.config.options import option_file
from runner.system.secrets import printable, redacted

WIDTH = 200
"""The maximum length of a line of a message, in characters."""


class ConfigError(Exception):
    """Raised when a run cannot be started with its config.

    Args:
        key: the config key, such as `optimizer.lr`; in a component, its field, to which `build` adds the group.
        got: the value of the key; `ABSENT` if the message should show no value.
        why: why the value is invalid.
        remedy: what to type instead.
    """

    def __init__(self, key: str, got: object, why: str, remedy: str):
        super().__init__(key, got, why, remedy)
        self.key, self.got, self.why, self.remedy = key, got, why, remedy

    def __str__(self) -> str:
        key, got = (shortened(redacted(text)) for text in (self.key, "null" if self.got is None else repr(self.got)))
        key, got = key.replace("\n", "\\n"), "" if self.got is ABSENT else f" got {got}:"
        return printable(f"{key}:{got} {self.why}\n  {self.remedy}")


def wrapped(message: str) -> str:
    """Return `message` in at most ten lines of `WIDTH` characters, without control characters or secrets."""
    # A path is not broken; a word that no line can hold, such as a value in a message of Hydra, is shortened.
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    text = re.sub(rf"[^\s/]{{{WIDTH - 1},}}", lambda word: shortened(word[0]), printable(redacted(message)))
    lines = [part for line in text.splitlines() for part in wrapper.wrap(line) or [line]]
    return "\n".join(lines if len(lines) <= 10 else [*lines[:7], "  …", *lines[-2:]])


class _Absent(enum.Enum):  # an enum member stays a singleton when it is pickled and sent to another process
    ABSENT = enum.auto()


ABSENT = _Absent.ABSENT
"""The value of `got` in a `ConfigError` whose message should show no value."""


def check(ok: bool, key: str, got: object, why: str, remedy: str) -> None:
    """Raise `ConfigError(key, got, why, remedy)` unless `ok` is true."""
    if not ok:
        raise ConfigError(key, got, why, remedy)


def did_you_mean(word: str, known: Iterable[str], before: str = "") -> str:
    """Return a hint with the names in `known` that are similar to `word`, or all of them, each after `before`."""
    spelled = {name.lower(): before + name for name in sorted(known)}
    near = difflib.get_close_matches(word.lower(), spelled, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(spelled[name] for name in near)}?"
    return f"choose from: {', '.join(spelled.values())}" if spelled else "it has none"


@contextmanager
def errors_under(key: str) -> Iterator[None]:
    """Add the prefix `key` to the key of a `ConfigError` raised inside the context: `lr` becomes `optimizer.lr`.

    An empty key becomes `key`.
    """
    try:
        yield
    except ConfigError as error:
        inner = error.key if error.key != key else ""
        raise ConfigError(f"{key}.{inner}".rstrip("."), error.got, error.why, error.remedy) from None


def see_comments(component: object, key: str = "") -> str:
    """Return a remedy that refers to the comments in the option file of `component`, an object or a class, on `key`."""
    cls = component if isinstance(component, type) else type(component)
    return f"see the comments in {option_file(cls, key)}"


def shortened(text: str, most: int = 80) -> str:
    """Return `text` or, if it has more than `most` characters, its beginning and its end with `…` in between."""
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}…{text[-(most // 2) :]}"


_ROOT = Path(__file__).parents[2]
_FOLDERS = (_ROOT / "runner", *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib")))
_LIBRARIES = ("<frozen", "<string", "<eval", *(f"{path}{os.sep}" for path in _FOLDERS))
"""The beginnings of the paths of source files of this project, of Python and of installed packages."""


def described(error: BaseException) -> str:
    """Return the type and message of an error, and the line of user code: `ValueError: negative (mine.py:12)`."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = [(file, line) for file, line in frames if not file.startswith(_LIBRARIES)]
    lines = [each for each in lines if not {"site-packages", "dist-packages"} & {*Path(each[0]).parts}]
    if isinstance(error, SyntaxError) and error.filename:
        lines = [(error.filename, error.lineno)]
    where = f" ({shown(lines[-1][0])}:{lines[-1][1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


def shown(file: str) -> str:
    """Return the path of a file, relative to the working directory if it is below it."""
    path = Path(os.path.abspath(file)) if not file.startswith("<") else Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
