"""Python's garbage collector, and imports: it would look for garbage many times among a million objects, all in use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_postponed() -> Iterator[None]:
    """A context for slow imports, in which no garbage is collected: importing torch takes a fifth less time.

    What exists at its end is not examined later, either: a full collection takes a tenth of a second less, and children
    that are forked do not copy the memory of these objects, which a collection writes to.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
