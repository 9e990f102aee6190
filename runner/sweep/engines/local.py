"""`sweep=local`: runs jobs on this machine, as many at once as the GPUs and CPU cores allow.

Each job is a process that is forked from a server. The server has already imported torch, so that a job starts in a
fraction of a second. The server itself runs no jobs, so that no job inherits state from another job. A job starts only
on CPU cores and GPUs that no other running job of the sweep is known to use. The cores and GPUs of jobs that have been
taken over from an earlier command are known only on Linux.
"""

from __future__ import annotations

import fcntl
import logging
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from runner.config.errors import check, check_range
from runner.sweep.console import is_open_in, is_running
from runner.sweep.engines.base import Demand, Ended, Engine, Job, Pool, Started
from runner.system.cpu import usable_core_numbers
from runner.system.exit_codes import STOPPED
from runner.system.forkserver import METHOD, become_command, start_server
from runner.system.gpu import busy_gpus, visible_gpus

log = logging.getLogger(__name__)

PRELOADED = (
    *("torch", "torch.utils.flop_counter", "PIL.ImageDraw"),
    *("runner.api.run_job", "runner.commands.train", "runner.tracking.event_file", "runner.tracking.hparams", "psutil"),
)
"""Modules that the server imports once for all jobs, including some that a run imports only when it needs them."""

_SERVER_DIED = 255
"""The exit code that multiprocessing reports for all children of a fork server that has died, also if they run on."""

_RECHECK_GPUS = 5.0
"""Seconds to wait before checking again whether other users still occupy the GPUs."""


@dataclass
class Local(Engine):
    """The engine that runs jobs on this machine.

    Args:
        slots: the maximum number of jobs that run at once; `auto`: as many as the GPUs and CPU cores allow.
        threads: the number of CPU threads of each process of a job; `auto`: the cores are divided among the jobs that
            run at once. The option `device.threads` of a job takes precedence.
    """

    slots: int | str = "auto"
    threads: int | str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("slots", "threads"):
            value = getattr(self, key)
            known = value == "auto" or isinstance(value, int)
            check(known, key, value, "it is neither auto nor a whole number", f"sweep.{key}=2")
            if isinstance(value, int):
                check_range(self, key, least=1, most=1024)

    def prepare(self, overrides: Sequence[str] = (), config_dir: str | None = None) -> None:
        start_server(*PRELOADED)

    @contextmanager
    def connect(self, num_jobs: int, path: Path) -> Iterator[Pool]:
        self.prepare()
        pool = LocalPool(self.slots, self.threads, num_jobs)
        try:
            yield pool
        finally:
            pool.kill()


class _Running(NamedTuple):
    process: BaseProcess
    console: Path
    cores: list[int]
    gpus: list[str]


class _Adopted(NamedTuple):
    """A job that an earlier command started; `cores` and `gpus` are empty on systems without /proc."""

    console: Path
    pid: int
    cores: set[int]
    gpus: list[str]


class LocalPool(Pool):
    """The jobs that run on this machine.

    Args:
        slots: the maximum number of jobs that run at once, or `auto`.
        threads: the number of CPU threads of each process of a job, or `auto`.
        num_jobs: the number of jobs in the sweep.
    """

    def __init__(self, slots: int | str, threads: int | str, num_jobs: int):
        self._cores = usable_core_numbers()
        self._num_cores = len(self._cores)
        self._gpus: list[str] | None = None
        self._num_gpus = 0
        self._slots = slots if isinstance(slots, int) else max(1, num_jobs)
        at_once = max(1, min(num_jobs, self._slots, self._num_cores))
        self._threads = threads if isinstance(threads, int) else max(1, self._num_cores // at_once)
        self._running: dict[int, _Running] = {}
        self._orphans: set[int] = set()
        """Running jobs whose fork server was killed, so that their exit code will not be known."""
        self._asked_to_stop: set[int] = set()
        self._adopted: dict[int, _Adopted] = {}
        self._checked_gpus = -_RECHECK_GPUS

    def has_room(self) -> bool:
        return len(self._running) + len(self._adopted) < self._slots and bool(self._free_cores())

    def submit(self, job: Job) -> Started | None:
        demand = job.demand
        if self._gpus is None:  # only now, because it imports torch, which is not needed if all jobs are refused
            self._gpus = visible_gpus()
            self._num_gpus = len(self._gpus)
        why = f"{self._num_gpus} GPUs are visible, and job {job.number} needs {demand.gpus}"
        check(demand.gpus <= self._num_gpus, "sweep", "local", why, "use fewer processes, or device=cpu")
        num_cores, free = self._cores_for(demand), self._free_cores()
        if not self.has_room() or num_cores > len(free):
            return None
        held = {gpu for adopted in self._adopted.values() for gpu in adopted.gpus}
        gpus = self._free_gpus([gpu for gpu in self._gpus if gpu not in held], demand.gpus)
        if gpus is None:
            return None
        cores = free[:num_cores]
        self._cores = [core for core in self._cores if core not in cores]
        self._gpus = [gpu for gpu in self._gpus if gpu not in gpus]
        threads = demand.threads or max(1, num_cores // demand.processes)
        own = {"OMP_NUM_THREADS": str(threads)} | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if self._num_gpus else {})
        arguments = (job.arguments, str(job.console), cores, threads, {**os.environ, **own})
        context: Any = get_context(METHOD)
        process = context.Process(target=_run_command, args=arguments, name=f"job {job.number}")
        process.start()
        self._running[job.number] = _Running(process, job.console, cores, gpus)
        return Started(f"GPU {','.join(gpus)}" if gpus else f"core {_ranges(cores)}", process.pid)

    def adopt(self, job: Job, started: Started) -> bool:
        if not is_running(job.console):
            return False
        cores, gpus = set[int](), list[str]()
        if is_open_in(started.pid, job.console):  # anybody may have written the ledger
            with suppress(ProcessLookupError):
                cores = os.sched_getaffinity(started.pid)
                gpus = started.slot.removeprefix("GPU ").split(",")
        self._adopted[job.number] = _Adopted(job.console, started.pid, cores, gpus)
        return True

    def _free_cores(self) -> list[int]:
        """Return the cores that neither a job of this command nor an adopted job uses."""
        held = {core for job in self._adopted.values() for core in job.cores}
        return [core for core in self._cores if core not in held]

    def _cores_for(self, demand: Demand) -> int:
        """Return the number of CPU cores for a job. A job that asks for more cores than there are gets all of them."""
        if demand.gpus:
            return min(len(self._free_cores()), max(1, self._num_cores * demand.gpus // self._num_gpus))
        return min(self._num_cores, demand.processes * (demand.threads or self._threads))

    def _free_gpus(self, idle: list[str], count: int) -> list[str] | None:
        """Return `count` of the `idle` GPUs that no other user uses; None if there are not enough.

        If other users occupy too many GPUs, calls in the next few seconds return None without checking again.

        Args:
            idle: the GPUs that no job of this sweep uses.
            count: the number of GPUs that a job needs.
        """
        if not count:
            return []
        if len(idle) < count or time.monotonic() < self._checked_gpus + _RECHECK_GPUS:
            return None
        busy = busy_gpus(idle)
        free = [gpu for gpu in idle if gpu not in busy]
        if len(free) < count:
            self._checked_gpus = time.monotonic()
            log.warning("waiting for a GPU: others use %s", ", ".join(f"GPU {gpu}" for gpu in sorted(busy)))
            return None
        return free[:count]

    def wait(self, seconds: float) -> list[Ended]:
        ended = [Ended(number, None) for number, job in self._adopted.items() if not is_running(job.console)]
        for each in ended:
            del self._adopted[each.number]
        ended += [
            self._ended(number, None) for number in [*self._orphans] if not is_running(self._running[number].console)
        ]
        sentinels = {job.process.sentinel: n for n, job in self._running.items() if n not in self._orphans}
        if not sentinels:
            time.sleep(0 if ended else seconds)
            return ended
        for sentinel in wait(list(sentinels), seconds):
            number = sentinels[sentinel]  # type: ignore[index]
            job = self._running[number]
            job.process.join()
            code = job.process.exitcode
            if code == _SERVER_DIED and is_running(job.console):
                self._orphans.add(number)
            else:
                ended.append(self._ended(number, None if code == _SERVER_DIED else code))
        return ended

    def _ended(self, number: int, code: int | None) -> Ended:
        """Give the cores and GPUs of job `number` back; `code` is None if its fork server died before it."""
        job = self._running.pop(number)
        self._orphans.discard(number)
        self._cores = sorted([*self._cores, *job.cores])
        self._gpus = sorted([*(self._gpus or []), *job.gpus])
        job.process.close()
        if code == -signal.SIGTERM and number in self._asked_to_stop:  # before it had a handler for the signal
            code = STOPPED
        self._asked_to_stop.discard(number)
        return Ended(number, code, "" if code is not None else "the server that started it was killed")

    def stop(self, numbers: list[int]) -> list[int]:
        unreached = []
        for number in numbers:
            if number in self._running:
                self._asked_to_stop.add(number)
                _signal(self._running[number].process, signal.SIGTERM)
            elif number in self._adopted:
                job = self._adopted[number]
                if is_open_in(job.pid, job.console):  # anybody may have written the ledger
                    with suppress(ProcessLookupError):
                        os.kill(job.pid, signal.SIGTERM)
                else:
                    del self._adopted[number]
                    unreached.append(number)
        return unreached

    def kill(self) -> None:
        for job in self._running.values():
            _signal(job.process, signal.SIGKILL)
        for job in self._running.values():
            job.process.join()
        self._running.clear()


def _signal(process: BaseProcess, number: signal.Signals) -> None:
    """Send the signal `number` to a job's process. If it is SIGKILL, kill the job's whole process group."""
    assert process.pid is not None
    with suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            with suppress(ProcessLookupError):  # it has not yet begun a process group of its own
                os.killpg(process.pid, signal.SIGKILL)
        os.kill(process.pid, number)


def _ranges(cores: list[int]) -> str:
    """Return sorted core numbers as text with ranges, for example `0-3,6`."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)


def _run_command(
    arguments: list[str], console: str, cores: list[int], threads: int, environment: dict[str, str]
) -> None:
    """Run `python -m runner` with `arguments` in this forked process, and exit with the exit code of the command.

    Args:
        arguments: the arguments of the command.
        console: the path of the file to which everything that the command prints is appended. This process locks the
            file until it ends, so that other schedulers can see that the job is running.
        cores: the numbers of the CPU cores that the process may use.
        threads: the number of CPU threads of the process.
        environment: all environment variables of the command; they replace those of this process.
    """
    file = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    fcntl.flock(file, fcntl.LOCK_EX)  # until this process ends: another scheduler sees that the job is running
    for stream in (1, 2):
        os.dup2(file, stream)
    become_command()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(threads)
    sys.argv[1:] = arguments
    code = 1
    try:
        runpy.run_module("runner", run_name="__main__", alter_sys=True)  # as `python -m runner` does
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # an interpreter that has imported torch takes a second to exit
