"""Load torch when it is first used, not when it is imported: help and config errors need not wait for it."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Lazy(ModuleType):
    """A module that runs its code in place when an attribute is first missed.

    The standard library's `LazyLoader` does not do here: before Python 3.12 a second `import` statement, which asks for
    `__spec__`, already loads the module.
    """

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec is not None and spec.loader is not None
        self.__class__ = ModuleType
        self.__path__ = spec.submodule_search_locations or []
        spec.loader.exec_module(self)
        return getattr(self, name)


def import_lazily(*names: str) -> None:
    """Make `import name` free for the packages `names`, until one of their attributes is needed."""
    for name in names:
        spec = importlib.util.find_spec(name) if name not in sys.modules else None
        if spec is not None:
            module = _Lazy(name)
            module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, name
            # `inspect` asks every loaded module for its file, while torch is still being loaded. The path stays missing:
            # whoever imports a submodule asks for it, and must find the package loaded.
            module.__file__ = spec.origin
            sys.modules[name] = module
