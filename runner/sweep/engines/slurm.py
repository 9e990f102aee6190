"""`sweep=slurm`: runs jobs on a SLURM cluster. The package submitit submits the jobs as job arrays.

Each job has a handle, which is chosen and written to `sweep.json` before the job is submitted. The handle consists of a
random token and the index of the job in its array. The name of the array in SLURM ends with the same token. A later
command can therefore find the jobs of a killed scheduler, even if the scheduler was killed while it submitted them.

squeue lists the jobs that are waiting or running. When a job ends, it writes its exit code to a file. If a job is no
longer listed and has not written this file, sacct is asked how the job ended.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from runner.config.errors import ConfigError, check, check_range
from runner.storage.files import UnsafeFileError, check_no_link, read_regular
from runner.sweep.engines.base import Ended, Job, Pool
from runner.sweep.engines.child import task
from runner.sweep.engines.cluster import ClusterEngine, Resources
from runner.sweep.engines.slurm_programs import SlurmError, cancel, final_states, queue, submit_array
from runner.sweep.engines.slurm_task import KILL, STOP, SlurmTask
from runner.sweep.ledger import SETTLED
from runner.system.exit_codes import STOPPED
from runner.system.import_path import is_installed, python_path

log = logging.getLogger(__name__)

_PROGRAMS = ("sbatch", "srun", "squeue", "scancel")

FOLDER, ENDS = "slurm", "ends"
"""The folder in a sweep's directory for the files of submitit, and its subfolder for the exit codes of the jobs."""

_SLOT = re.compile(r"slurm (?P<handle>[0-9a-f]{8}_[0-9]{1,5})")
_RESERVED = (
    *("array", "error", "input", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "signal"),
    *("no-requeue", "wrap"),
)
"""Options of sbatch that users cannot set, because the engine sets them itself or would not work with them."""

_SUBMIT_AGAIN_SECONDS = (5.0, 15.0, 45.0)
_ASK_SECONDS = (2.0, 60.0)
"""The shortest and the longest time between two calls of squeue; the time grows while no job starts or ends."""

_ASK_AGAIN_SECONDS = 5.0
"""Time between two calls of squeue while jobs are being stopped, or while a job is missing from squeue's list."""

_MAX_LOOKS = 4
"""A job counts as lost if it is missing from this many squeue lists in a row, and sacct does not know it."""


@dataclass
class Slurm(ClusterEngine):
    """The engine that runs jobs on a SLURM cluster; see conf/sweep/slurm.yaml for the options."""

    slots: int = 100
    threads: int = 4
    mem_gb: float | None = None
    timeout_min: int = 240
    signal_seconds: int = 120
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    setup: list[str] = field(default_factory=list)
    additional: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "slots", least=1, most=1000)
        check_range(self, "mem_gb", above=0, most=1e6)
        check_range(self, "timeout_min", least=5, most=10**6)
        check_range(self, "signal_seconds", least=1, most=self.timeout_min * 30)
        texts = {key: getattr(self, key) for key in ("partition", "account", "qos", "constraint")}
        for key, value in self.additional.items():
            name, where = str(key).replace("_", "-"), f"additional.{key}"
            known = re.fullmatch("[a-z][a-z-]*", name) is not None
            check(known, where, value, "it is not the name of an option of sbatch", "for example {nice: 100}")
            check(name not in _RESERVED, where, value, "the engine sets this option itself", "leave it out")
            simple = isinstance(value, str | int | float)
            check(simple, where, value, "it is neither a text nor a number nor true", "for example {nice: 100}")
            texts[where] = str(value)
        for key, value in texts.items():
            one_line = value is None or value.isprintable()
            check(one_line, key, value, "it has line breaks or control characters", "write it in one line")

    @contextmanager
    def connect(self, num_jobs: int, path: Path) -> Iterator[Pool]:
        remedy = "pip install submitit, or sweep=local"
        check(is_installed("submitit"), "sweep", "slurm", "the package submitit is not installed", remedy)
        absent = [program for program in _PROGRAMS if shutil.which(program) is None]
        why = f"there is no {' and no '.join(absent)} on PATH"
        check(not absent, "sweep", "slurm", why, "start the sweep on a login node of the cluster, or sweep=local")
        try:
            check_no_link(path / FOLDER)
            check_no_link(path / FOLDER / ENDS)
        except UnsafeFileError as error:
            why = f"{error.filename}: {error.strerror}"
            raise ConfigError("resume", "auto", why, "resume=never starts another sweep") from None
        for file in (path / FOLDER).glob("*_log.*"):
            why = f"{file} is a symbolic link, and SLURM would append what a job prints to its target"
            check(not file.is_symlink(), "resume", "auto", why, "resume=never starts another sweep")
        import submitit  # noqa: F401

        logging.getLogger("submitit").setLevel(logging.CRITICAL)  # what matters is reported here
        try:
            pool = SlurmPool(self, path)
        except SlurmError as error:
            raise ConfigError("sweep", "slurm", str(error), "try again, or sweep=local") from None
        try:
            yield pool
        finally:
            pool.kill()


class _Batch:
    """Jobs that need the same resources, and are submitted together as one job array."""

    def __init__(self, resources: Resources):
        self.resources = resources
        self.token = secrets.token_hex(4)
        self.jobs: list[Job] = []
        self.num_failures = 0
        self.due = 0.0

    def handle(self, index: int) -> str:
        return f"{self.token}_{index}"


class SlurmPool(Pool):
    """The jobs of a sweep that are waiting or running in SLURM.

    Args:
        options: the options of the sweep.
        path: the directory of the sweep.

    Raises:
        SlurmError: if squeue, which lists the jobs of an earlier command, fails several times.
    """

    def __init__(self, options: Slurm, path: Path):
        self._options, self._folder = options, (path / FOLDER).absolute()
        self._is_new = not self._folder.exists()
        place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]
        self._name = f"{re.sub('[^A-Za-z0-9.-]', '-', path.parent.name)[:40]}-{place}"
        self._earlier = queue(self._name, tries=3)
        self._batches: list[_Batch] = []
        self._handles: dict[int, str] = {}
        self._ids: dict[str, str] = {}
        self._ended: list[Ended] = []
        self._stopped: set[int] = set()
        self._looks: dict[int, int] = {}
        self._is_working = False
        """Whether SLURM has accepted jobs of this sweep, so that its options are not the reason if it rejects some."""
        self._changed = self._asked = time.monotonic()

    def submit(self, job: Job) -> str | None:
        if len(self._handles) >= self._options.slots:
            return None
        self._stopped.discard(job.number)
        if self._takes_over(job):
            return job.earlier
        resources = self._options.resources(job.demand)
        batch = next((each for each in self._batches if each.resources == resources and not each.num_failures), None)
        if batch is None:
            batch = _Batch(resources)
            self._batches.append(batch)
        handle = batch.handle(len(batch.jobs))
        batch.jobs.append(job)
        self._handles[job.number] = handle
        return f"slurm {handle}"

    def _takes_over(self, job: Job) -> bool:
        """Take over the job of an earlier command if it waits, runs or has a result. If its config is another one now,
        stop it instead; the new job waits for its end by the lock of the console file.
        """
        match = _SLOT.fullmatch(job.earlier)
        if match is None or match["handle"] in self._handles.values():
            return False
        handle, job_id = match["handle"], self._earlier.get(match["handle"])
        if job.is_changed:
            _stop([job_id] if job_id else [])
            return False
        if job_id is None and self._code(handle) not in SETTLED:
            return False
        self._handles[job.number] = handle
        self._is_working = True
        if job_id is not None:
            self._ids[handle] = job_id
        return True

    def wait(self, seconds: float) -> list[Ended]:
        self._submit_batches()
        self._find_ended()
        if not self._ended and seconds:
            time.sleep(seconds)
            self._find_ended()
        ended, self._ended = self._ended, []
        return ended

    def stop(self, numbers: list[int]) -> None:
        self._stopped |= self._handles.keys() & set(numbers)
        for batch in self._batches.copy():  # a batch is given up only as a whole: handles have its indices
            if self._stopped.issuperset(job.number for job in batch.jobs):
                self._give_up(batch, "")
        self._signal_stopped()
        self._asked = time.monotonic() - _ASK_AGAIN_SECONDS + _ASK_SECONDS[0]  # canceled jobs are soon gone

    def _signal_stopped(self) -> None:
        """Stop the jobs passed to `stop`, again and again: SLURM drops a signal for a job that has no process yet."""
        handles = [self._handles[number] for number in self._stopped & self._handles.keys()]
        _stop([self._ids[handle] for handle in handles if handle in self._ids])

    def kill(self) -> None:
        for batch in self._batches.copy():
            self._give_up(batch, "")
        ids = [self._ids[handle] for handle in self._handles.values() if handle in self._ids]
        cancel(ids, f"--signal={KILL.name[3:]}")
        cancel(ids)
        self._handles.clear()

    def _submit_batches(self) -> None:
        """Submit the batches that are due, each as one job array. One that SLURM rejects is due again later."""
        for batch in [batch for batch in self._batches if batch.due <= time.monotonic()]:
            try:
                ids = self._sbatch(batch)
            except SlurmError as error:
                self._not_submitted(batch, str(error))
                continue
            self._batches.remove(batch)
            self._is_working = True
            self._ids |= {batch.handle(index): job_id for index, job_id in enumerate(ids)}
            self._changed = time.monotonic()

    def _not_submitted(self, batch: _Batch, why: str) -> None:
        cancel([], f"--name={self._name}-{batch.token}")  # it may have been accepted although sbatch failed
        if not self._is_working:
            self._batches.clear()
            self._handles.clear()
            if self._is_new:
                shutil.rmtree(self._folder, ignore_errors=True)
            remedy = "correct the option of the sweep that SLURM names, or try again"
            raise ConfigError("sweep", "slurm", why, remedy)
        if batch.num_failures < len(_SUBMIT_AGAIN_SECONDS):
            seconds = _SUBMIT_AGAIN_SECONDS[batch.num_failures]
            log.warning("%s; trying again in %.0f s", why, seconds)
            batch.num_failures += 1
            batch.due = time.monotonic() + seconds
        else:
            self._give_up(batch, why)

    def _give_up(self, batch: _Batch, why: str) -> None:
        """Give up a batch that has not been submitted, and report all of its jobs as ended for the reason `why`."""
        self._batches.remove(batch)
        for job in batch.jobs:
            self._end(job.number, STOPPED if job.number in self._stopped else None, why)

    def _sbatch(self, batch: _Batch) -> list[str]:
        """Submit a batch, and return the SLURM job IDs of its jobs, in the order of the jobs."""
        (self._folder / ENDS).mkdir(parents=True, exist_ok=True)
        options, resources = self._options, batch.resources
        variables = {"OMP_NUM_THREADS": str(resources.threads)}
        tasks = [
            SlurmTask(task(job.arguments, job.console, variables), str(self._folder / ENDS / batch.handle(index)))
            for index, job in enumerate(batch.jobs)
        ]
        chosen = {key: getattr(options, key) for key in ("partition", "account", "qos", "constraint")}
        chosen["mem"] = f"{round(options.mem_gb * 1024)}M" if options.mem_gb is not None else None
        chosen["gpus_per_node"] = resources.gpus or None
        parameters = {  # with the names that submitit uses
            **{key: value for key, value in chosen.items() if value is not None},
            "job_name": f"{self._name}-{batch.token}",
            "time": options.timeout_min,
            "signal_delay_s": options.signal_seconds,
            "nodes": 1,
            "ntasks_per_node": 1,
            "cpus_per_task": resources.cores,
            "array_parallelism": options.slots,
            "stderr_to_stdout": True,
            "setup": [*(f"export {name}={quote(text)}" for name, text in python_path().items()), *options.setup],
            "additional_parameters": {"requeue": True, **options.additional},
        }
        return submit_array(self._folder, tasks, parameters)

    def _code(self, handle: str) -> int | None:
        """Return the exit code that a job has written to its file; None if there is no file or no valid exit code."""
        with suppress(OSError, ValueError):
            code = int(read_regular(self._folder / ENDS / handle, 10))
            return code if -64 <= code <= 255 else None
        return None

    def _end(self, number: int, code: int | None, reason: str = "") -> None:
        self._ids.pop(self._handles.pop(number), None)
        self._looks.pop(number, None)
        self._ended.append(Ended(number, code, reason))
        self._changed = time.monotonic()

    def _find_ended(self) -> None:
        names = set(os.listdir(self._folder / ENDS)) if self._handles and (self._folder / ENDS).is_dir() else set()
        for number, handle in list(self._handles.items()):
            if handle in names and (code := self._code(handle)) is not None:
                self._end(number, code)
        now = time.monotonic()
        if self._looks or self._stopped & self._handles.keys():
            pause = _ASK_AGAIN_SECONDS
        else:
            pause = min(_ASK_SECONDS[1], max(_ASK_SECONDS[0], (now - self._changed) / 2))
        if self._ids and now >= self._asked + pause:
            self._look_for_lost()
            self._signal_stopped()

    def _look_for_lost(self) -> None:
        """Find jobs that are no longer in SLURM but wrote no exit code, for example because their node failed."""
        try:
            alive = queue(self._name)
        except SlurmError as error:
            log.warning("%s; trying again", error)
            return
        finally:
            self._asked = time.monotonic()
        absent = [number for number, handle in self._handles.items() if handle in self._ids and handle not in alive]
        self._looks = {number: self._looks.get(number, 0) + 1 for number in absent}
        # A job may have ended a moment ago, and its file is not seen yet: it is looked for at least twice.
        lost = [number for number in absent if self._looks[number] > 1 or number in self._stopped]
        states = final_states([self._ids[self._handles[number]] for number in lost if number not in self._stopped])
        for number in lost:
            state = states.get(self._ids[self._handles[number]], "")
            if number in self._stopped or state.startswith("CANCELLED"):
                self._end(number, STOPPED)
            elif state or self._looks[number] >= _MAX_LOOKS:
                self._end(number, None, f"SLURM says {state}" if state else "SLURM no longer knows the job")


def _stop(ids: list[str]) -> None:
    """Cancel the jobs with these SLURM job IDs that are waiting, and signal those that are running to save and exit."""
    cancel(ids, "--state=PENDING")
    cancel(ids, f"--signal={STOP.name[3:]}")
