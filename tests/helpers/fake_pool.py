"""A pool without processes: the test decides how each job of a sweep ends."""

from collections.abc import Callable, Sequence
from pathlib import Path

from runner.sweeps.engines.base import Ended, Job, Pool


class FakePool(Pool):
    """A pool whose jobs end in the order in which they were started, one job in each call of `wait`.

    `codes` has the exit codes of the attempts of a job, by its number, which write no result; all others end with 0 and
    the result that they are done. A job that was asked to stop ends with 75.
    """

    def __init__(self, codes: dict[int, list[int | None]], slots: int = 2, stack: int = 1):
        self.codes, self.slots, self.stack = codes, slots, stack
        self.running: list[int] = []
        self.directories: dict[int, Path] = {}
        self.started: list[int | tuple[int, ...]] = []
        self.stopped: set[int] = set()
        self.earlier: list[tuple[str, bool]] = []
        self.on_wait: Callable[[], None] = lambda: None

    def submit(self, job: Job) -> str | None:
        if len(self.running) == self.slots:
            return None
        assert job.number not in self.running
        with job.console.open("a") as console:
            console.write(f"it is job {job.number}\nthe last words of job {job.number}\n")
        self.running.append(job.number)
        self.directories[job.number] = job.directory
        self.started.append(job.number)
        self.earlier.append((job.earlier, job.is_changed))
        self.stopped.discard(job.number)
        return "a slot"

    def stack_size(self, count: int) -> int:
        return min(self.stack, count)

    def submit_stack(self, jobs: Sequence[Job]) -> str | None:
        """Start all jobs, if there is a slot, and note their numbers together."""
        if len(self.running) >= self.slots:
            return None
        before, self.slots = self.slots, len(self.running) + len(jobs)
        for job in jobs:
            self.submit(job)
        self.slots = before
        self.started[-len(jobs) :] = [tuple(job.number for job in jobs)]
        return "a slot"

    def wait(self, seconds: float) -> list[Ended]:
        self.on_wait()
        if not self.running:
            return []
        number = self.running.pop(0)
        if number in self.stopped:
            return [Ended(number, 75)]
        if codes := self.codes.get(number):
            return [Ended(number, codes.pop(0))]
        directory = self.directories[number]
        directory.mkdir(exist_ok=True)
        (directory / "result.json").write_text('{"status": "done", "steps": 1}')
        return [Ended(number, 0)]

    def stop(self, numbers: list[int]) -> None:
        self.stopped |= set(numbers)

    def kill(self) -> None: ...
