"""Delay the writing of each checkpoint until training waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import runner.storage.checkpoint


class DeferredFuture:
    """A future that calls its function when `result` is called."""

    def __init__(self, function: Callable[[], None]):
        self.function = function

    def done(self) -> bool:
        return False

    def result(self) -> None:
        self.function()


def delay_checkpoint_writes(*_: Any) -> None:
    """Delay the checkpoints of this process until `restore_checkpoint_writes` is called."""
    setattr(runner.storage.checkpoint, _IN_THREAD, DeferredFuture)


def restore_checkpoint_writes(*_: Any) -> None:
    setattr(runner.storage.checkpoint, _IN_THREAD, _original)


_IN_THREAD = "_in_thread"
_original = getattr(runner.storage.checkpoint, _IN_THREAD)
