"""A clock for modules that use `time.perf_counter`."""

from types import SimpleNamespace


class FakeClock(SimpleNamespace):
    """A fake clock, which moves only when a test sets `now`."""

    now = 1000.0

    def perf_counter(self) -> float:
        return self.now
