"""`sweep=ray`: runs jobs on the machines of a Ray cluster, or with Ray on this machine. Only Ray Core is used.

Each job has an actor, which reserves the CPU cores and GPUs that the job needs, and runs the job's command as a child
process.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from runner.config.errors import ConfigError, check
from runner.config.limits import Range
from runner.sweeps.engines.base import ClusterEngine, Ended, Job, Pool
from runner.sweeps.engines.cluster_task import RayTask, import_ray, task
from runner.system.console import STOPPED
from runner.system.cpu import usable_core_numbers
from runner.system.import_path import is_installed, python_path

_OBJECT_STORE_BYTES = 100 * 2**20
"""The memory for Ray's object store when Ray is started on this machine; it is small, as jobs exchange no objects."""

_ACTOR = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 4}
"""Options of an actor. One thread of the actor waits for the command, while other threads can stop or kill it."""

_REMEDY = "name a cluster that is running; sweep.address=null starts Ray on this machine"
_SECONDS_TO_CONNECT = 10.0
_SECONDS_TO_KILL = 5.0


@dataclass
class Ray(ClusterEngine):
    """The engine that runs jobs with Ray; see conf/sweep/ray.yaml for the options."""

    slots: Annotated[int, Range(least=1, most=10_000)] | Literal["auto"] = "auto"
    address: str | None = None

    @contextmanager
    def connect(self, num_jobs: int, path: Path) -> Iterator[Pool]:
        remedy = "pip install ray, or sweep=local"
        check(is_installed("ray"), "sweep", "ray", "the package ray is not installed", remedy)
        self._check_reachable()
        ray = import_ray()
        is_ours = not ray.is_initialized()
        if is_ours:
            self._init()
        try:
            with RayPool(self) as pool:
                yield pool
        finally:
            if is_ours:
                with _handlers_kept():
                    ray.shutdown()

    def _init(self) -> None:
        """Start Ray on this machine, or connect to the cluster at `address`."""
        ray = import_ray()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report to its makers over the network
        here = {
            "address": "local",
            "num_cpus": len(usable_core_numbers()),
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }
        options: dict[str, Any] = here if self.address is None else {"address": self.address}
        try:
            with _handlers_kept():
                ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray documents none, and raises several kinds
            why = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError("sweep.address", self.address, f"Ray cannot be used: {why}", _REMEDY) from None

    def _check_reachable(self) -> None:
        """Raise a `ConfigError` if `address` cannot be reached: Ray would try for minutes, then end this process."""
        if self.address is None or self.address == "auto":
            return
        try:
            place = urlsplit(f"//{self.address.removeprefix('ray://')}")
            socket.create_connection((place.hostname, place.port or 0), _SECONDS_TO_CONNECT).close()
        except (OSError, ValueError) as error:
            why = f"it cannot be reached ({getattr(error, 'strerror', None) or error})"
            raise ConfigError("sweep.address", self.address, why, _REMEDY) from None


class _Running(NamedTuple):
    actor: Any
    end: Any
    ready: Any
    cores: int
    gpus: int


class RayPool(Pool):
    def __init__(self, options: Ray):
        self._ray, self._options = import_ray(), options
        self._actor: Any = self._ray.remote(RayTask)
        self._running: dict[int, _Running] = {}
        self._ended: list[Ended] = []

    def submit(self, job: Job) -> str | None:
        cores, gpus, threads = self._options.resources(job.demand)
        self._check_possible(job.number, cores, gpus)
        if not self._has_room(cores, gpus):
            return None
        variables = python_path() | {"OMP_NUM_THREADS": str(threads)}
        what = task(job.arguments, job.console, variables)
        actor = self._actor.options(num_cpus=cores, num_gpus=gpus, **_ACTOR).remote(what, dict(os.environ))
        self._running[job.number] = _Running(actor, actor.start.remote(), actor.ready.remote(), cores, gpus)
        devices = [f"{gpus} GPU{'s' * (gpus > 1)}"] * bool(gpus)
        return "Ray, " + ", ".join([f"{cores} core{'s' * (cores > 1)}", *devices])

    def _check_possible(self, number: int, cores: int, gpus: int) -> None:
        """Raise a `ConfigError` if no machine is large enough for job `number`: Ray would wait for one forever."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        has = [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in nodes]
        why = f"job {number} needs {cores} cores and {gpus} GPUs on one machine, and the largest has %d and %d"
        possible = any(each[0] >= cores and each[1] >= gpus for each in has)
        remedy = "use fewer processes, or fewer sweep.threads or device.threads"
        check(possible, "sweep", "ray", why % max(has, default=(0, 0)), remedy)

    def _has_room(self, cores: int, gpus: int) -> bool:
        if isinstance(self._options.slots, int):
            return len(self._running) < self._options.slots
        has = self._ray.cluster_resources()
        used = sum(job.cores for job in self._running.values()), sum(job.gpus for job in self._running.values())
        return not self._running or (used[0] + cores <= has.get("CPU", 0) and used[1] + gpus <= has.get("GPU", 0))

    def wait(self, seconds: float) -> list[Ended]:
        numbers = {job.end: number for number, job in self._running.items()}
        pause = 0 if self._ended else seconds
        if not numbers:
            time.sleep(pause)
        elif self._ray.wait(list(numbers), timeout=pause)[0]:
            for end in self._ray.wait(list(numbers), num_returns=len(numbers), timeout=0)[0]:
                self._end(numbers[end])
        ended, self._ended = self._ended, []
        return ended

    def _end(self, number: int) -> None:
        job = self._running.pop(number)
        try:
            self._ended.append(Ended(number, self._ray.get(job.end)))
        except self._ray.exceptions.RayError as error:  # the actor, or its machine, is gone
            self._ended.append(Ended(number, None, textwrap.shorten(str(error), 300, placeholder="…")))
        self._ray.kill(job.actor)  # it keeps its cores otherwise, until Python forgets it

    def stop(self, numbers: list[int]) -> None:
        for number in numbers:
            job = self._running[number]
            if self._ray.wait([job.ready], timeout=0)[0]:
                job.actor.stop.remote()
            else:  # it waits for cores
                self._ray.kill(job.actor)
                del self._running[number]
                self._ended.append(Ended(number, STOPPED))

    def kill(self) -> None:
        jobs = list(self._running.values())
        begun = [job.actor.kill.remote() for job in jobs if self._ray.wait([job.ready], timeout=0)[0]]
        if begun:
            self._ray.wait(begun, num_returns=len(begun), timeout=_SECONDS_TO_KILL)
        for job in jobs:
            self._ray.kill(job.actor)  # a command that still runs is killed by the kernel
        self._running.clear()


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore the signal handlers at the end of the context, because Ray installs its own handlers."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(ValueError):  # outside of the main thread, Ray installs none
                signal.signal(number, handler)
