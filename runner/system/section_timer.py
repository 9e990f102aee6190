"""A timer for named sections of the training loop; exactly one section is active at any time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PAUSES = ("log", "evaluate", "checkpoint")
"""Sections of the training loop that are not counted in throughput and step times."""


class SectionTimer:
    """A timer for sections of code, without the time of nested sections: all add up to the time since `reset`.

    On an accelerator, it measures how long the host takes to queue work, unless `reset` got a function that waits.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self, synchronize: Callable[[], None] | None = None) -> None:
        """Set all times to zero, and make the section `other` active; `synchronize` is called at each switch."""
        self.synchronize = synchronize
        self.calls: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)
        self._current, self._since = "other", time.perf_counter()

    def switch(self, name: str) -> str:
        """Make the section `name` active, and return the name of the previous section."""
        if self.synchronize is not None:
            self.synchronize()
        now = time.perf_counter()
        self._seconds[self._current] += now - self._since
        before, self._current, self._since = self._current, name, now
        return before

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Within this context, the section `name` is active; entering it adds 1 to `calls[name]`."""
        self.calls[name] += 1
        outer = self.switch(name)
        try:
            yield
        finally:
            self.switch(outer)

    def spent(self, name: str) -> float:
        """Return the seconds spent in the section `name` up to the last switch between sections."""
        return self._seconds[name]

    def paused(self) -> float:
        """Return the total of the seconds spent in the sections `PAUSES`, which do not count as training."""
        return sum(map(self.spent, PAUSES))

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each section up to now, by name."""
        self.switch(self._current)
        return dict(self._seconds)


timer = SectionTimer()
"""The timer of this process."""
