"""Where the host's time goes: one timer per process, which counts for one named section at a time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

PAUSES = ("log", "evaluate", "checkpoint")
"""Sections of the training loop that are no training: throughput and step times leave them out."""


class Section:
    """A context whose time counts for `name`; after it, time counts for the section around it again."""

    def __init__(self, timer: SectionTimer, name: str):
        self._timer, self._name, self._outer = timer, name, []

    def __enter__(self) -> None:
        self._outer.append(self._timer.switch(self._name))

    def __exit__(self, *_: object) -> None:
        self._timer.switch(self._outer.pop())


class SectionTimer:
    """Exclusive times by section, which add up to the time since `reset`: at any moment exactly one section counts.

    A switch costs half a microsecond, so that it may stand in the training loop. On an accelerator a section holds
    the time that the host took to queue the work, unless `synchronize` makes each switch wait for the device.
    """

    def __init__(self) -> None:
        self._sections: dict[str, Section] = {}
        self.reset()

    def reset(self, synchronize: Callable[[], None] | None = None) -> None:
        """Begin again from zero, in the section `other`."""
        self.synchronize = synchronize
        self.calls: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)
        self._current, self._since = "other", time.perf_counter()

    def switch(self, name: str) -> str:
        """Count for the section `name` from now on; returns the section that counted until now."""
        if self.synchronize is not None:
            self.synchronize()
        now = time.perf_counter()
        self._seconds[self._current] += now - self._since
        before, self._current, self._since = self._current, name, now
        return before

    def section(self, name: str) -> Section:
        """`with timer.section("data"): …`"""
        self.calls[name] += 1
        section = self._sections.get(name)
        if section is None:
            section = self._sections[name] = Section(self, name)
        return section

    def spent(self, name: str) -> float:
        """Seconds counted for `name` so far; a section still open counts up to its last switch."""
        return self._seconds[name]

    def paused(self) -> float:
        """Seconds counted so far for sections in which the training pauses (`PAUSES`)."""
        return sum(map(self.spent, PAUSES))

    def seconds(self) -> dict[str, float]:
        """Seconds by section up to now."""
        self.switch(self._current)
        return dict(self._seconds)


timer = SectionTimer()
