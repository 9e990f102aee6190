"""Delay the writing of each checkpoint until training waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runner.storage import checkpoint_writing


class DeferredWriting:
    """Stands for the thread that writes a checkpoint: it writes when `join` is called."""

    def __init__(self, write: Callable[[], None]):
        self.join, self.error = write, None

    def is_alive(self) -> bool:
        return True


def delay_checkpoint_writes(*_: Any) -> None:
    checkpoint_writing.Writing = DeferredWriting  # type: ignore[misc]


def restore_checkpoint_writes(*_: Any) -> None:
    checkpoint_writing.Writing = _original  # type: ignore[misc]


_original = checkpoint_writing.Writing
