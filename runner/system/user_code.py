"""The user's own code in tracebacks: what belongs neither to this project nor to Python or an installed package."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_INSTALLED = ("site-packages", "dist-packages")


def last_user_frame(error: BaseException) -> str:
    """Return the last frame of the user's code in the traceback of `error`, as Python prints it; empty if none."""
    libraries = (Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    others = [_ROOT / "runner", _ROOT / "models", *libraries]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        installed = any(name in path.parts for name in _INSTALLED) or frame.filename.startswith("<")
        if not installed and not any(path.is_relative_to(other) for other in others):
            return "".join(traceback.format_list([frame]))
    return ""
