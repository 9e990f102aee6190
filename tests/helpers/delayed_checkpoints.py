"""Delay the writing of each checkpoint until training waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runner.storage import checkpoint_writing


class DeferredWriting:
    """Stands for the thread that writes checkpoints, and for the future of one: it writes when `result` is called."""

    def __init__(self, *_: Any) -> None:
        self.result: Callable[[], None]

    def submit(self, write: Callable[..., None], *arguments: Any) -> DeferredWriting:
        self.result = lambda: write(*arguments)
        return self

    def done(self) -> bool:
        return False


def delay_checkpoint_writes(*_: Any) -> None:
    checkpoint_writing.ThreadPoolExecutor = DeferredWriting  # type: ignore[misc]


def restore_checkpoint_writes(*_: Any) -> None:
    checkpoint_writing.ThreadPoolExecutor = _original  # type: ignore[misc]


_original = checkpoint_writing.ThreadPoolExecutor
