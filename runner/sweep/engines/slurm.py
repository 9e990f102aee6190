"""`sweep=slurm`: runs jobs on a SLURM cluster. The package submitit submits the jobs as job arrays.

Each job has a handle, which is chosen and written to `sweep.json` before the job is submitted. The handle consists of a
random token and the index of the job in its array. The name of the array in SLURM ends with the same token. A later
command can therefore find the jobs of a killed scheduler, even if the scheduler was killed while it submitted them.

When a job ends, it writes its exit code to a file. If a job has not written this file, and squeue says that it has
ended or no longer knows it, the job is lost.
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
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from shlex import quote
from typing import Any

from runner.config.errors import ConfigError, check, check_range
from runner.storage.files import read_regular
from runner.sweep.engines.base import ClusterEngine, Ended, Job, Pool, Resources
from runner.sweep.engines.child import KILL, STOP, SlurmTask, task
from runner.sweep.engines.slurm_programs import FINAL_STATES, SlurmError, answer, cancel, queue
from runner.sweep.ledger import SETTLED, SLURM
from runner.system.exit_codes import STOPPED
from runner.system.import_path import is_installed, python_path

log = logging.getLogger(__name__)

ENDS = "ends"
"""The folder, in that of submitit, for the exit codes of the jobs."""

_PROGRAMS = ("sbatch", "srun", "squeue", "scancel")
_SLOT = re.compile(r"slurm (?P<handle>[0-9a-f]{8}_[0-9]{1,5})")
_RESERVED = (
    *("array", "error", "input", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "signal"),
    *("no-requeue", "wrap"),
)
"""Options of sbatch that users cannot set, because the engine sets them itself or would not work with them."""

_SUBMIT_AGAIN_SECONDS, _MAX_SUBMITS = 15.0, 4
_ASK_SECONDS = 30.0
"""Time between two calls of squeue."""

_ASK_AGAIN_SECONDS = 5.0
"""Time between two calls of squeue while jobs are being stopped, or while a job seems to be lost."""

_MAX_LOOKS = 3
"""A job is lost if this many calls of squeue in a row say so: its file may be seen a moment later."""

_MAX_REQUEUES = 10_000


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
            is_option = re.fullmatch("[a-z][a-z-]*", name) is not None and isinstance(value, str | int | float)
            why = "it is no option of sbatch with a text, a number or true, or the engine sets it itself"
            check(is_option and name not in _RESERVED, where, value, why, "for example {nice: 100}")
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
        folder = path / SLURM
        for link in filter(Path.is_symlink, (folder, folder / ENDS, *folder.glob("*_log.*"))):
            why = f"{link} is a symbolic link, through which files elsewhere would be written"
            raise ConfigError("resume", "auto", why, "resume=never starts another sweep")
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
        SlurmError: if squeue, which lists the jobs of an earlier command, fails.
    """

    def __init__(self, options: Slurm, path: Path):
        self._options, self._folder = options, (path / SLURM).absolute()
        place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]
        self._name = f"{re.sub('[^A-Za-z0-9.-]', '-', path.parent.name)[:40]}-{place}"
        self._earlier = queue(self._name)
        self._asked = time.monotonic()
        self._batches: list[_Batch] = []
        self._handles: dict[int, str] = {}
        self._ids: dict[str, str] = {}
        self._ended: list[Ended] = []
        self._stopped: set[int] = set()
        self._looks: dict[int, int] = {}
        self._is_working = False
        """Whether SLURM has accepted jobs of this sweep, so that its options are not the reason if it rejects some."""

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
        """Take over the job of an earlier command, if there is one that waits, runs or has a result.

        If its config has changed, stop it instead: the new job waits for its end, by the lock of the console file.
        """
        match = _SLOT.fullmatch(job.earlier)
        if match is None or match["handle"] in self._handles.values():
            return False
        handle = match["handle"]
        job_id, state = self._earlier.get(handle, ("", "unknown"))
        is_active = bool(job_id) and state not in FINAL_STATES
        if job.is_changed:
            _stop([job_id] if is_active else [])
            return False
        if not is_active and self._code(handle) not in SETTLED:
            return False
        self._handles[job.number] = handle
        self._is_working = True
        if is_active:
            self._ids[handle] = job_id
        return True

    def wait(self, seconds: float) -> list[Ended]:
        for batch in [batch for batch in self._batches if batch.due <= time.monotonic()]:
            self._submit_batch(batch)
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

    def _submit_batch(self, batch: _Batch) -> None:
        """Submit a batch as one job array. If SLURM rejects it, it is due again later, but only a few times."""
        try:
            ids = self._sbatch(batch)
        except SlurmError as error:
            with suppress(SlurmError):  # it may have been accepted although sbatch failed
                answer("scancel", f"--name={self._name}-{batch.token}")
            if not self._is_working:
                self._batches.clear()
                self._handles.clear()
                remedy = "correct the option of the sweep that SLURM names, or try again"
                raise ConfigError("sweep", "slurm", str(error), remedy) from None
            batch.num_failures += 1
            batch.due = time.monotonic() + _SUBMIT_AGAIN_SECONDS
            if batch.num_failures == _MAX_SUBMITS:
                self._give_up(batch, str(error))
            else:
                log.warning("%s; trying again in %.0f s", error, _SUBMIT_AGAIN_SECONDS)
            return
        self._batches.remove(batch)
        self._is_working = True
        self._ids |= {batch.handle(index): job_id for index, job_id in enumerate(ids)}

    def _give_up(self, batch: _Batch, why: str) -> None:
        """Give up a batch that has not been submitted, and report all of its jobs as ended for the reason `why`."""
        self._batches.remove(batch)
        for job in batch.jobs:
            self._end(job.number, STOPPED if job.number in self._stopped else None, why)

    def _sbatch(self, batch: _Batch) -> list[str]:
        """Submit a batch, and return the SLURM job IDs of its jobs, in the order of the jobs."""
        import submitit
        from submitit.helpers import clean_env

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
        executor: submitit.SlurmExecutor = submitit.SlurmExecutor(self._folder, max_num_timeout=_MAX_REQUEUES)
        executor.update_parameters(
            **{key: value for key, value in chosen.items() if value is not None},
            job_name=f"{self._name}-{batch.token}",
            time=options.timeout_min,
            signal_delay_s=options.signal_seconds,
            nodes=1,
            ntasks_per_node=1,
            cpus_per_task=resources.cores,
            array_parallelism=options.slots,
            stderr_to_stdout=True,
            setup=[*(f"export {name}={quote(text)}" for name, text in python_path().items()), *options.setup],
            additional_parameters={"requeue": True, **options.additional},
        )
        inside_a_job = "SLURM_JOB_ID" in os.environ
        try:
            with clean_env() if inside_a_job else nullcontext(), redirect_stderr(StringIO()):
                return [job.job_id for job in executor.submit_array(tasks)]
        except Exception as error:  # submitit has several kinds, and the operating system its own
            why = " ".join(str(error).split()) or type(error).__name__
            raise SlurmError(f"sbatch has not accepted the jobs: {why}") from None

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

    def _find_ended(self) -> None:
        names = set(os.listdir(self._folder / ENDS)) if self._handles and (self._folder / ENDS).is_dir() else set()
        for number, handle in list(self._handles.items()):
            if handle in names and (code := self._code(handle)) is not None:
                self._end(number, code)
        is_urgent = self._looks or self._stopped & self._handles.keys()
        if self._ids and time.monotonic() >= self._asked + (_ASK_AGAIN_SECONDS if is_urgent else _ASK_SECONDS):
            self._find_lost()
            self._signal_stopped()

    def _find_lost(self) -> None:
        """Find jobs that have ended but wrote no exit code, for example because their node failed."""
        self._asked = time.monotonic()
        try:
            listed = queue(self._name)
        except SlurmError as error:
            log.warning("%s; trying again", error)
            return
        for number, handle in list(self._handles.items()):
            _, state = listed.get(handle, ("", ""))
            if handle not in self._ids or (state and state not in FINAL_STATES):
                self._looks.pop(number, None)
                continue
            self._looks[number] = self._looks.get(number, 0) + 1
            if number in self._stopped or (state == "CANCELLED" and self._looks[number] == _MAX_LOOKS):
                self._end(number, STOPPED)
            elif self._looks[number] == _MAX_LOOKS:
                self._end(number, None, f"SLURM says {state}" if state else "SLURM no longer knows the job")


def _stop(ids: list[str]) -> None:
    """Cancel the jobs with these SLURM job IDs that are waiting, and let those that are running save and exit."""
    cancel(ids, "--state=PENDING")
    cancel(ids, f"--signal={STOP.name[3:]}")
