"""A pool without processes: the test decides how each job of a sweep ends."""

from __future__ import annotations

from collections.abc import Callable

from runner.sweep.engines.base import Ended, Job, Pool, Started


class FakePool(Pool):
    """A pool whose jobs end in the order in which they were started, one job in each call of `wait`.

    Args:
        codes: maps the number of a job to the exit codes of its attempts, in order. Further attempts, and jobs that are
            not in `codes`, end with 0. A job that was asked to stop always ends with 75.
        slots: number of jobs that can run at once.

    Attributes:
        surviving_jobs: the jobs of an earlier command that are still running.
        unstoppable_jobs: jobs that cannot be stopped, and do not end.
    """

    def __init__(self, codes: dict[int, list[int | None]], slots: int = 2):
        self.codes, self.slots = codes, slots
        self.running: list[int] = []
        self.started: list[int] = []
        self.stopped: set[int] = set()
        self.surviving_jobs: set[int] = set()
        self.unstoppable_jobs: set[int] = set()
        self.on_wait: Callable[[], None] = lambda: None

    def submit(self, job: Job) -> Started | None:
        if len(self.running) == self.slots:
            return None
        assert job.number not in self.running
        with job.console.open("a") as console:
            console.write(f"it is job {job.number}\nthe last words of job {job.number}\n")
        self.running.append(job.number)
        self.started.append(job.number)
        self.stopped.discard(job.number)
        return Started("a slot", 0)

    def wait(self, seconds: float) -> list[Ended]:
        self.on_wait()
        ending = [number for number in self.running if number not in self.unstoppable_jobs]
        if not ending:
            return []
        number = ending[0]
        self.running.remove(number)
        return [Ended(number, 75 if number in self.stopped else (self.codes.get(number) or [0]).pop(0))]

    def adopt(self, job: Job, started: Started) -> bool:
        if job.number in self.surviving_jobs:
            self.running.append(job.number)
        return job.number in self.surviving_jobs

    def stop(self, numbers: list[int]) -> list[int]:
        self.stopped |= set(numbers) - self.unstoppable_jobs
        self.running = [number for number in self.running if number not in self.unstoppable_jobs]
        return sorted(self.unstoppable_jobs & set(numbers))

    def kill(self) -> None: ...
