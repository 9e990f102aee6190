"""`sweep=slurm`: runs jobs on a SLURM cluster. The package submitit submits each of them with sbatch.

A job writes its exit code to a file when it ends. If it has not written this file, and squeue says that it has ended or
no longer knows it, the job is lost.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from shlex import quote
from typing import Any

from runner.config.errors import ConfigError, check, check_range
from runner.storage.files import read_regular
from runner.sweep.engines.base import ClusterEngine, Ended, Job, Pool
from runner.sweep.engines.child import KILL, STOP, SlurmTask, task
from runner.sweep.engines.slurm_programs import FINAL_STATES, SlurmError, answer, cancel, queue
from runner.sweep.ledger import SETTLED, SLURM
from runner.system.exit_codes import STOPPED
from runner.system.import_path import is_installed, python_path

log = logging.getLogger(__name__)

ENDS = "ends"
"""The folder, in that of submitit, for the exit codes of the jobs."""

_PROGRAMS = ("sbatch", "srun", "squeue", "scancel")
_SLOT = re.compile(r"slurm ([0-9]{1,12})")
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


class SlurmPool(Pool):
    """The jobs of a sweep that are waiting or running in SLURM.

    The name of a job in SLURM ends with a hash of the sweep's directory and the number of the job, so that a later
    command finds the jobs of a killed one.

    Raises:
        SlurmError: if squeue, which lists the jobs of an earlier command, fails.
    """

    def __init__(self, options: Slurm, path: Path):
        self._options, self._folder = options, (path / SLURM).absolute()
        place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]
        self._name = f"{re.sub('[^A-Za-z0-9.-]', '-', path.parent.name)[:40]}-{place}"
        self._earlier: dict[int, list[str]] = defaultdict(list)
        for job_id, (number, state) in queue(self._name).items():
            if state not in FINAL_STATES:
                self._earlier[number].append(job_id)
        self._asked = time.monotonic()
        self._ids: dict[int, str] = {}
        self._ended: list[Ended] = []
        self._stopped: set[int] = set()
        self._looks: dict[int, int] = {}
        self._is_working = False
        """Whether SLURM has accepted jobs of this sweep, so that its options are not the reason if it rejects some."""
        self._rejection: SlurmError | None = None
        self._num_failures, self._due = 0, 0.0

    def submit(self, job: Job) -> str | None:
        if len(self._ids) >= self._options.slots or time.monotonic() < self._due:
            return None
        self._stopped.discard(job.number)
        active = self._earlier.pop(job.number, [])
        slot = None if job.is_changed else _SLOT.fullmatch(job.earlier)
        if slot and (slot[1] in active or self._code(slot[1]) in SETTLED):
            self._is_working = True
            self._ids[job.number] = slot[1]
            return job.earlier
        _stop(active)  # the new job waits for their end, by the lock of the console file
        try:
            self._ids[job.number] = self._sbatch(job)
        except SlurmError as error:
            self._failed(job, error)
            return None
        self._is_working, self._num_failures = True, 0
        return f"slurm {self._ids[job.number]}"

    def _failed(self, job: Job, error: SlurmError) -> None:
        """Let `wait` raise the error if SLURM rejects the first job; otherwise, try again a few times."""
        with suppress(SlurmError):  # it may have been accepted although sbatch failed
            answer("scancel", f"--name={self._name}-{job.number}")
        if not self._is_working:
            self._rejection = error
            return
        self._num_failures += 1
        if self._num_failures == _MAX_SUBMITS:
            self._num_failures = 0
            raise ConfigError("sweep", "slurm", str(error), "try again with resume=auto") from None
        self._due = time.monotonic() + _SUBMIT_AGAIN_SECONDS
        log.warning("%s; trying again in %.0f s", error, _SUBMIT_AGAIN_SECONDS)

    def wait(self, seconds: float) -> list[Ended]:
        if self._rejection is not None:
            remedy = "correct the option of the sweep that SLURM names, or try again"
            raise ConfigError("sweep", "slurm", str(self._rejection), remedy) from None
        self._find_ended()
        if not self._ended and seconds:
            time.sleep(seconds)
            self._find_ended()
        ended, self._ended = self._ended, []
        return ended

    def stop(self, numbers: list[int]) -> None:
        self._stopped |= self._ids.keys() & set(numbers)
        self._signal_stopped()

    def _signal_stopped(self) -> None:
        """Stop the jobs passed to `stop`, again and again: SLURM drops a signal for a job that has no process yet."""
        _stop([self._ids[number] for number in self._stopped & self._ids.keys()])

    def kill(self) -> None:
        cancel([*self._ids.values()], f"--signal={KILL.name[3:]}")
        cancel([*self._ids.values()])
        self._ids.clear()

    def _sbatch(self, job: Job) -> str:
        """Submit a job, and return its ID in SLURM."""
        import submitit
        from submitit.helpers import clean_env

        (self._folder / ENDS).mkdir(parents=True, exist_ok=True)
        options, resources = self._options, self._options.resources(job.demand)
        command = task(job.arguments, job.console, {"OMP_NUM_THREADS": str(resources.threads)})
        chosen = {key: getattr(options, key) for key in ("partition", "account", "qos", "constraint")}
        chosen["mem"] = f"{round(options.mem_gb * 1024)}M" if options.mem_gb is not None else None
        chosen["gpus_per_node"] = resources.gpus or None
        executor: submitit.SlurmExecutor = submitit.SlurmExecutor(self._folder, max_num_timeout=_MAX_REQUEUES)
        executor.update_parameters(
            **{key: value for key, value in chosen.items() if value is not None},
            job_name=f"{self._name}-{job.number}",
            time=options.timeout_min,
            signal_delay_s=options.signal_seconds,
            nodes=1,
            ntasks_per_node=1,
            cpus_per_task=resources.cores,
            stderr_to_stdout=True,
            setup=[*(f"export {name}={quote(text)}" for name, text in python_path().items()), *options.setup],
            additional_parameters={"requeue": True, **options.additional},
        )
        inside_a_job = "SLURM_JOB_ID" in os.environ
        try:
            with clean_env() if inside_a_job else nullcontext(), redirect_stderr(StringIO()):
                return executor.submit(SlurmTask(command, str(self._folder / ENDS))).job_id
        except Exception as error:  # submitit has several kinds, and the operating system its own
            why = " ".join(str(error).split()) or type(error).__name__
            raise SlurmError(f"sbatch has not accepted job {job.number}: {why}") from None

    def _code(self, job_id: str) -> int | None:
        """Return the exit code that a job has written to its file; None if there is no file or no valid exit code."""
        with suppress(OSError, ValueError):
            code = int(read_regular(self._folder / ENDS / job_id, 10))
            return code if -64 <= code <= 255 else None
        return None

    def _end(self, number: int, code: int | None, reason: str = "") -> None:
        del self._ids[number]
        self._looks.pop(number, None)
        self._ended.append(Ended(number, code, reason))

    def _find_ended(self) -> None:
        names = set(os.listdir(self._folder / ENDS)) if self._ids and (self._folder / ENDS).is_dir() else set()
        for number, job_id in list(self._ids.items()):
            if job_id in names and (code := self._code(job_id)) is not None:
                self._end(number, code)
        is_urgent = self._looks or self._stopped & self._ids.keys()
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
        for number, job_id in list(self._ids.items()):
            _, state = listed.get(job_id, (number, ""))
            if state and state not in FINAL_STATES:
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
