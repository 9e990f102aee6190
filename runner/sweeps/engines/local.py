"""`sweep=local`: runs jobs on this machine, as many at once as the GPUs and CPU cores allow.

Each job is a process that is forked from a server. The server has already imported torch, so that a job starts in a
fraction of a second. The server itself runs no jobs, so that no job inherits state from another job. A job starts only
on CPU cores and GPUs that no other job of the sweep uses.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess, current_process
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from runner.config import packed_code
from runner.config.errors import check
from runner.config.limits import NumThreads, Range
from runner.storage.files import is_locked
from runner.sweeps.engines.base import Ended, Engine, Job, Pool
from runner.sweeps.engines.stack import AUTO_STACK, STACK, StackFiles, locked_console
from runner.system.console import CRASHED, STOPPED
from runner.system.cpu import usable_core_numbers
from runner.system.forkserver import become_command, show_name, start_server, without_main_module

_SERVER_DIED = 255
"""The exit code that multiprocessing reports for all children of a fork server that has died, also if they go on.

Those that go on hold the locks of their console files.
"""


@dataclass
class Local(Engine):
    """The engine that runs jobs on this machine; see conf/sweep/local.yaml for the options."""

    slots: Annotated[int, Range(least=1, most=1024)] | Literal["auto"] = "auto"
    threads: NumThreads | Literal["auto"] = "auto"

    def prepare(self, *modules: str) -> None:
        start_server("torch", *modules)

    def connect(self, num_jobs: int, path: Path) -> Pool:
        return LocalPool(self.slots, self.threads, num_jobs, self.stack)


class _Running(NamedTuple):
    process: BaseProcess
    console: Path
    cores: list[int]
    gpus: list[str]
    jobs: list[int]  # several if they are computed together
    files: StackFiles | None = None  # of the stack


class LocalPool(Pool):
    """The jobs of a sweep of `num_jobs` that run on this machine."""

    def __init__(self, slots: int | str, threads: int | str, num_jobs: int, stack: int | str = 1):
        self._cores = usable_core_numbers()
        self._num_cores = len(self._cores)
        self._gpus = visible_gpus()
        self._num_gpus = len(self._gpus)
        self._slots = slots if isinstance(slots, int) else max(1, num_jobs)
        at_once = max(1, min(num_jobs, self._slots, self._num_cores))
        self._threads = threads if isinstance(threads, int) else max(1, self._num_cores // at_once)
        self._at_once, self._stack = at_once, stack
        self._running: dict[int, _Running] = {}
        """The process of each running job, by the number of the first job in it."""
        self._asked_to_stop: set[int] = set()

    def has_room(self) -> bool:
        return len(self._running) < self._slots and bool(self._cores)

    def stack_size(self, count: int) -> int:
        free = max(self._at_once, min(self._num_gpus, self._slots)) - len(self._running)
        share = -(-count // max(1, free))
        return min(share, AUTO_STACK if self._stack == "auto" else int(self._stack))

    def submit(self, job: Job) -> str | None:
        return self._started([job], job.arguments, job.console)

    def submit_stack(self, jobs: Sequence[Job]) -> str | None:
        files = StackFiles.beside(jobs[0].console)
        return self._started(jobs, [STACK, str(files.jobs)], files.console, files)

    def _started(
        self, jobs: Sequence[Job], words: list[str], console: Path, files: StackFiles | None = None
    ) -> str | None:
        """Start the command of `words` for jobs of the same demand, unless there is no room for it."""
        job, demand = jobs[0], jobs[0].demand
        why = f"{self._num_gpus} GPUs are visible, and job {job.number} needs {demand.gpus}"
        check(demand.gpus <= self._num_gpus, "sweep", "local", why, "use fewer processes, or device=cpu")
        if demand.gpus:
            num_cores = min(len(self._cores), max(1, self._num_cores * demand.gpus // self._num_gpus))
        else:  # a job that asks for more cores than there are gets all of them
            num_cores = min(self._num_cores, demand.processes * (demand.threads or self._threads))
        if not self.has_room() or num_cores > len(self._cores) or demand.gpus > len(self._gpus):
            return None
        cores, self._cores = self._cores[:num_cores], self._cores[num_cores:]
        gpus, self._gpus = self._gpus[: demand.gpus], self._gpus[demand.gpus :]
        threads = demand.threads or max(1, num_cores // demand.processes)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if self._num_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if files is not None:
            files.write(jobs, is_tried=self._stack == "auto")
        arguments = (words, str(console), cores, threads, environment, packed_code.packed())
        start_server("torch")  # unless it is running: it may have died
        short = re.sub(r"[\w.]+\.(?=\w+=)", "", job.directory.name) or f"job {job.number}"  # 003-lr=0.1,seed=2
        process = get_context("forkserver").Process(target=_run_command, args=arguments, name=short)
        with without_main_module():
            process.start()
        self._running[job.number] = _Running(process, console, cores, gpus, [each.number for each in jobs], files)
        where = f"GPU {','.join(gpus)}" if gpus else f"{num_cores} core{'s' * (num_cores > 1)}"
        return where + f", {len(jobs)} together" * (len(jobs) > 1)

    def wait(self, seconds: float) -> list[Ended]:
        sentinels = [each.process.sentinel for each in self._running.values() if each.process.exitcode is None]
        if sentinels:
            wait(sentinels, seconds)
        else:
            time.sleep(seconds)
        ended = []
        for number, running in list(self._running.items()):
            code = running.process.exitcode
            for each, own in running.files.new_codes(running.jobs) if running.files else ():
                running.jobs.remove(each)
                ended.append(Ended(each, own))
            if code is None or (code == _SERVER_DIED and is_locked(running.console)):
                continue
            del self._running[number]
            self._cores = sorted([*self._cores, *running.cores])
            self._gpus = sorted([*self._gpus, *running.gpus])
            running.process.close()
            if running.files:
                running.files.pass_on(running.jobs)
                running.files.remove()
            for each in running.jobs:
                # SIGTERM: before it had a handler for the signal
                stopped = code == -signal.SIGTERM and each in self._asked_to_stop
                why = "the server that started it was killed" if code == _SERVER_DIED else ""
                ended.append(Ended(each, STOPPED if stopped else None if why else code, why))
        self._asked_to_stop -= {each.number for each in ended}
        return ended

    def stop(self, numbers: list[int]) -> None:
        self._asked_to_stop.update(numbers)
        for running in self._running.values():
            asked = self._asked_to_stop.intersection(running.jobs)
            if asked and len(asked) < len(running.jobs) and running.files:
                running.files.ask_to_stop(asked)
            elif asked.intersection(numbers):
                with suppress(ProcessLookupError):
                    os.kill(running.process.pid or 0, signal.SIGTERM)

    def kill(self) -> None:
        for job in self._running.values():
            assert job.process.pid is not None
            with suppress(ProcessLookupError):  # it may not have begun a process group yet
                os.killpg(job.process.pid, signal.SIGKILL)
            job.process.kill()
        for job in self._running.values():
            job.process.join()
        self._running.clear()


def _run_command(
    arguments: list[str], console: str, cores: list[int], threads: int, environment: dict[str, str], packed: bytes
) -> None:
    """Run `python -m runner` with `arguments` in this forked process, and exit with the exit code of the command.

    This process locks its console file until it ends. If a scheduler was killed, and the next one starts its jobs again
    while they still run, each new process therefore waits until the earlier one has ended, and then goes on from there.
    """
    become_command()
    show_name(current_process().name)
    file = locked_console(console)
    for stream in (1, 2):
        os.dup2(file, stream)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(threads)
    sys.argv[1:] = arguments
    code = CRASHED
    try:
        packed_code.give_packed(packed)
        runpy.run_module("runner", run_name="__main__", alter_sys=True)  # as `python -m runner` does
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else CRASHED
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # an interpreter that has imported torch takes a second to exit


def visible_gpus() -> list[str]:
    """Return the indices or UUIDs of the GPUs that this process may use, in the format of CUDA_VISIBLE_DEVICES."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count() if torch.backends.cuda.is_built() else 0
    if visible is None:
        return [str(index) for index in range(count)]
    return [name.strip() for name in visible.split(",") if name.strip()][:count]
