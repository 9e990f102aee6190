"""A declarative experiment runner: the config selects the components of a single training loop.

From Python, `runner.compose` returns a config, `runner.train` trains it, `runner.verify` compares it with a single
device, `runner.sweep` trains many, and `runner.load` opens a saved run.
"""

from runner.system import __version__

# Not imported from `typing`: `python -m runner` runs this file before the command removes the working directory, where
# there may be a typing.py, from the import path.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from runner.api.composing import Config, compose
    from runner.api.execution import train
    from runner.api.saved import SavedRun, load
    from runner.api.sweeping import sweep
    from runner.api.verification import verify
    from runner.config.errors import ConfigError
    from runner.result import CrashedError, Result

__all__ = [
    "Config",
    "ConfigError",
    "CrashedError",
    "Result",
    "SavedRun",
    "__version__",
    "compose",
    "load",
    "sweep",
    "train",
    "verify",
]

_MODULES = {
    "runner.api.composing": ("Config", "compose"),
    "runner.api.execution": ("train",),
    "runner.api.saved": ("SavedRun", "load"),
    "runner.api.sweeping": ("sweep",),
    "runner.api.verification": ("verify",),
    "runner.config.errors": ("ConfigError",),
    "runner.result": ("CrashedError", "Result"),
}
"""The public names of modules, which are imported when a name is first used: torch takes seconds to import."""


def __getattr__(name: str) -> "Any":
    import importlib

    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(module), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
