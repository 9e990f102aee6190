"""The user's cache directory, whose files may be deleted at any time."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(name: str) -> Path:
    """Return the path of this project's directory `name` in the user's cache; it may not exist yet.

    https://specifications.freedesktop.org/basedir-spec/latest/
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(given) if os.path.isabs(given) else Path("~/.cache").expanduser()
    return root / "runner" / name
