"""The key and the value of an override, which is typed on the command line as `KEY=VALUE`."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

_QUOTED = re.compile(r"""(['"])([\w.+-]+)\1""")


def override_key(override: str) -> str:
    """Return the key or the config group of an override, without its prefix (`+`, `++` or `~`).

    The package of a config group is kept: `optimizer@other=sgd` has the key `optimizer@other`.
    """
    return override.lstrip("+~").partition("=")[0]


def canonical_override(override: str) -> str:
    """Return an override without `+` and without needless quotes: `++seed='1'` is `seed=1`. `~seed` is not changed."""
    return _QUOTED.sub(r"\2", override.lstrip("+"))


def hydra_quoted(value: str) -> str:
    """Return a text in quotes for Hydra's grammar."""
    # Hydra takes backslashes for escapes only if a quote follows them.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + "\\'" * bool(found[2]), value) + "'"


def text_override(key: str, value: object) -> str:
    """Return `KEY=VALUE` for a text, such as a path, as it is typed in a shell: in all quotes that it needs."""
    text = str(value)
    word = f"{key}={text if re.fullmatch(r'[A-Za-z_./][A-Za-z0-9_./+-]*', text) else hydra_quoted(text)}"
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)


def typed_path(path: Path) -> str:
    """Return the relative path of `path` as it is typed in a shell, with `./` if its first character has a meaning."""
    relative = os.path.relpath(path)
    return shlex.quote(relative if relative[0].isalnum() or relative[0] in "./_" else f"./{relative}")


def as_typed(value: object) -> str:
    """Return the text of a config value as it is typed in an override: `null`, `true`, `0.1`, `[16,32]`."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{as_typed(inner)}' for key, inner in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
