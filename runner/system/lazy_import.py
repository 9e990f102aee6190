"""Lazy import of torch: it is loaded at its first use, so that `--help` and config errors appear 1 to 2 s earlier.

The command calls `import_lazily("torch", "torchvision")` before anything else. Modules then import torch at their top;
modules with a class or a decorator of torch, and other slow packages, are imported in the functions that use them.

https://github.com/pytorch/pytorch/issues/97106 is about the slow import of torch. Python 3.15 has a statement for this
(PEP 810). `importlib.util.LazyLoader` loads the package too early before Python 3.12, as `import` reads `__spec__`.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from runner.system.signals import signals_postponed


class _Lazy(ModuleType):
    """A module object that loads its package only when an attribute is read that the object itself does not have."""

    def __getattr__(self, name: str) -> Any:
        _load(self)
        return getattr(self, name)


_when_loaded: dict[str, Callable[[], None]] = {}
_freezes = True


@contextmanager
def nothing_frozen() -> Iterator[None]:
    """A context for what is freed at its end: a package that is loaded in it freezes no objects."""
    global _freezes
    _freezes = False
    try:
        yield
    finally:
        _freezes = True


def _load(package: _Lazy) -> None:
    spec = package.__spec__
    assert spec is not None
    assert spec.loader is not None
    package.__class__ = ModuleType  # pyright: ignore[reportAttributeAccessIssue]
    package.__path__ = spec.submodule_search_locations or []
    was_enabled = gc.isenabled()
    gc.disable()  # the collector would examine a million new objects repeatedly, a fifth of the time of importing torch
    try:
        with signals_postponed():
            spec.loader.exec_module(package)
    finally:
        if was_enabled:
            gc.enable()
    _when_loaded.pop(spec.name)()


class _Submodules(MetaPathFinder, Loader):
    """A finder that loads a lazy package when one of its submodules is imported.

    Loading the package usually imports that submodule, too, which the import system would load a second time.
    """

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        package = sys.modules.get(name.rpartition(".")[0])
        if not isinstance(package, _Lazy):
            return None
        _load(package)
        module = sys.modules.get(name)
        if module is None:
            return PathFinder.find_spec(name, package.__path__)
        # Until `exec_module`, the module has another spec: with its own, the import system would load it again.
        self._spec, spec = module.__spec__, ModuleSpec(name, self, is_package=hasattr(module, "__path__"))
        vars(module)["__spec__"] = spec  # `torch._dynamo.config` refuses to set attributes
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self._spec


def import_lazily(*names: str) -> None:
    """Defer loading each package until one of its attributes or submodules is used, unless it is loaded or missing."""
    for name in names:
        # Full collections then take 0.1 s less, and forked children keep sharing the memory of these objects.
        defer(name, {}, when_loaded=lambda: gc.freeze() if _freezes else None)


def defer(
    name: str, stand_ins: Mapping[str, Callable[..., Any]], when_loaded: Callable[[], None] = lambda: None
) -> None:
    """Defer loading the package `name`, as `import_lazily` does; the parent of a subpackage is loaded at once.

    Until it is loaded, the `stand_ins` are called instead of its functions; then, `when_loaded` is called.
    """
    spec = importlib.util.find_spec(name) if name not in sys.modules else None
    if spec is None:
        return
    if not any(isinstance(finder, _Submodules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Submodules())
    module = _Lazy(name)
    module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, name
    module.__file__ = spec.origin  # `inspect` reads it from every module, even while torch is being loaded
    module.__path__ = []
    vars(module).update(stand_ins)  # loading the package defines the real ones
    _when_loaded[name] = when_loaded
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


def undo_defer(name: str) -> None:
    """Undo `defer`, unless the package has been loaded."""
    if isinstance(sys.modules.get(name), _Lazy):
        del sys.modules[name]
        parent, _, last = name.rpartition(".")
        if parent:
            delattr(sys.modules[parent], last)
        _when_loaded.pop(name)()
    if not _when_loaded:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Submodules)]
