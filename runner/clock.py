"""Where the host's time goes: one clock a process, switched between named sections."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable


class Section:
    """A context in which the clock's time counts for `name`; on leaving, for what it counted for before."""

    def __init__(self, clock: Clock, name: str):
        self._clock, self._name, self._outer = clock, name, []

    def __enter__(self) -> None:
        self._outer.append(self._clock.switch(self._name))

    def __exit__(self, *_: object) -> None:
        self._clock.switch(self._outer.pop())


class Clock:
    """Exclusive times by section, which add up to the time since `reset`: at any moment exactly one section runs.

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
        """Count from now on for `name`; returns what was counted for until now."""
        if self.synchronize is not None:
            self.synchronize()
        now = time.perf_counter()
        self._seconds[self._current] += now - self._since
        before, self._current, self._since = self._current, name, now
        return before

    def section(self, name: str) -> Section:
        """`with clock.section("data"): …`"""
        self.calls[name] += 1
        section = self._sections.get(name)
        if section is None:
            section = self._sections[name] = Section(self, name)
        return section

    def spent(self, name: str) -> float:
        """Seconds counted for `name` so far; a section still open counts up to its last switch."""
        return self._seconds[name]

    def seconds(self) -> dict[str, float]:
        """Seconds by section up to now."""
        self.switch(self._current)
        return dict(self._seconds)


clock = Clock()
