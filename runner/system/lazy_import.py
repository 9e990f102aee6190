"""Load torch when it is first used, not when it is imported: help and config errors need not wait for it."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Lazy(ModuleType):
    """A package that runs its code in place when an attribute is first missed.

    The standard library's `LazyLoader` does not do here: before Python 3.12 a second `import` statement, which asks for
    `__spec__`, already loads the module.
    """

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        self.__class__ = ModuleType  # pyright: ignore[reportAttributeAccessIssue]
        self.__path__ = spec.submodule_search_locations or []
        spec.loader.exec_module(self)
        return getattr(self, name)


class _Submodules(MetaPathFinder, Loader):
    """Loads a lazy package when a submodule of it is imported.

    The package's own code has imported most of its submodules then: those are handed out as they are, where the import
    statement that asked would otherwise load them a second time.
    """

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        package = sys.modules.get(name.partition(".")[0])
        if not isinstance(package, _Lazy) or package.__name__ == name:
            return None
        _ = package.__version__  # missing still, which loads the package
        module = sys.modules.get(name)
        if module is None:
            return PathFinder.find_spec(name, package.__path__)
        # The import system goes by the spec of a module that has appeared meanwhile, and loads by it again.
        self._spec = module.__spec__
        module.__spec__ = ModuleSpec(name, self, is_package=hasattr(module, "__path__"))
        return module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def import_lazily(*names: str) -> None:
    """Make `import name` free for the packages `names`, until an attribute or a submodule of them is needed."""
    if not any(isinstance(finder, _Submodules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Submodules())
    for name in names:
        spec = importlib.util.find_spec(name) if name not in sys.modules else None
        if spec is not None:
            module = _Lazy(name)
            module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, name
            module.__file__ = spec.origin  # `inspect` asks every module for it, also while torch is being loaded
            module.__path__ = []
            sys.modules[name] = module
