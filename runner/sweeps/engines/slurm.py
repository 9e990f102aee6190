"""`sweep=slurm`: runs jobs on a SLURM cluster. The package submitit submits the jobs as job arrays.

Each job has a handle, a random token and the index of the job in its array, which is written to `sweep.json` before the
job is submitted. The name of the array ends with the token, so that a later command finds the jobs of a killed one.

When a job ends, it writes its exit code to a file. If it has not, and squeue says that it has ended or no longer knows
it, the job is lost.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
import subprocess
import time
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, NamedTuple

from runner.config.errors import ConfigError, check, shortened
from runner.config.limits import NumThreads, Range, check_range
from runner.storage.files import read_regular
from runner.sweeps.engines.base import ClusterEngine, Ended, Job, Pool, Resources
from runner.sweeps.engines.cluster_task import KILL, STOP, SlurmTask, task
from runner.sweeps.ledger import SETTLED, SLURM
from runner.system.console import STOPPED
from runner.system.import_path import is_installed, python_path

log = logging.getLogger(__name__)

ENDS = "ends"
"""The folder, in that of submitit, for the exit codes of the jobs."""

_SLOT = re.compile(r"slurm ([0-9a-f]{8}_[0-9]{1,5})")
_SUBMIT_AGAIN_SECONDS, _MAX_SUBMITS = 15.0, 4
_ASK_SECONDS = 30.0
"""Time between two calls of squeue."""

_ASK_AGAIN_SECONDS = 5.0
"""Time between two calls of squeue while jobs are being stopped, or while a job seems to be lost."""

_MAX_LOOKS = 3
"""A job is lost if this many calls of squeue in a row say so: its file may be seen a moment later."""

_MAX_REQUEUES = 10_000
_LISTED = re.compile(r"(?P<id>[0-9]\S*?)\|(?P<name>.*)\|(?P<state>[A-Z_]+)")
"""A line of squeue, which also lists the user's other jobs."""

_FINAL_STATES = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    "TIMEOUT",
)
"""States of jobs that have ended. squeue lists such jobs for some minutes (MinJobAge)."""

_ANSWER_SECONDS = 60.0


class SlurmError(Exception):
    """Raised when a SLURM program such as sbatch or squeue fails, or when its output cannot be parsed."""


@dataclass
class Slurm(ClusterEngine):
    """The engine that runs jobs on a SLURM cluster; see conf/sweep/slurm.yaml for the options."""

    slots: Annotated[int, Range(least=1, most=1000)] = 100
    threads: NumThreads = 4
    mem_gb: Annotated[float, Range(above=0, most=1e6)] | None = None
    timeout_min: Annotated[int, Range(least=5, most=10**6)] = 240
    signal_seconds: int = 120
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    setup: list[str] = field(default_factory=list)
    additional: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "signal_seconds", Range(least=1, most=self.timeout_min * 30))

    def connect(self, num_jobs: int, path: Path) -> Pool:
        remedy = "pip install submitit, or sweep=local"
        check(is_installed("submitit"), "sweep", "slurm", "the package submitit is not installed", remedy)
        absent = [program for program in ("sbatch", "srun", "squeue", "scancel") if shutil.which(program) is None]
        why = f"there is no {' and no '.join(absent)} on PATH"
        check(not absent, "sweep", "slurm", why, "start the sweep on a login node of the cluster, or sweep=local")
        folder = path / SLURM
        for link in filter(Path.is_symlink, (folder, folder / ENDS, *folder.glob("*_log.*"))):
            why = f"{link} is a symbolic link, through which files elsewhere would be written"
            raise ConfigError("resume", "auto", why, "resume=never starts another sweep")
        logging.getLogger("submitit").setLevel(logging.CRITICAL)  # what matters is reported here
        try:
            return SlurmPool(self, path)
        except SlurmError as error:
            raise ConfigError("sweep", "slurm", str(error), "try again, or sweep=local") from None


class _Array(NamedTuple):
    """Jobs that need the same resources, and are submitted together."""

    token: str
    jobs: list[Job]


@dataclass
class _Started:
    """A job that is waiting or running."""

    handle: str
    id: str = ""  # empty until SLURM knows the job
    is_stopped: bool = False
    num_looks: int = 0  # how many calls of squeue in a row have said that it is lost


class SlurmPool(Pool):
    """The jobs of a sweep that are waiting or running in SLURM.

    Raises:
        SlurmError: if squeue, which lists the jobs of an earlier command, fails.
    """

    def __init__(self, options: Slurm, path: Path):
        self._options, self._folder = options, (path / SLURM).absolute()
        place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]
        self._name = f"{re.sub('[^A-Za-z0-9.-]', '-', path.parent.name)[:40]}-{place}"
        self._earlier = queue(self._name)
        self._asked = time.monotonic()
        self._arrays: dict[Resources, _Array] = {}
        """Those that have not been submitted yet."""
        self._jobs: dict[int, _Started] = {}
        self._ended: list[Ended] = []
        self._is_working = False
        """Whether SLURM has accepted jobs of this sweep, so that its options are not the reason if it rejects some."""
        self._num_failures, self._due = 0, 0.0

    def submit(self, job: Job) -> str | None:
        if len(self._jobs) >= self._options.slots:
            return None
        match = _SLOT.fullmatch(job.earlier)
        handle = match[1] if match else ""
        job_id, state = self._earlier.pop(handle, ("", ""))
        if state in _FINAL_STATES:
            job_id = ""
        if not job.is_changed and (job_id or (handle and self._code(handle) in SETTLED)):
            self._jobs[job.number], self._is_working = _Started(handle, job_id), True
            return job.earlier
        _stop([job_id] if job_id else [])  # its config has changed; the new job waits for the lock of the console file
        array = self._arrays.setdefault(self._options.resources(job.demand), _Array(secrets.token_hex(4), []))
        self._jobs[job.number] = _Started(f"{array.token}_{len(array.jobs)}")
        array.jobs.append(job)
        return f"slurm {self._jobs[job.number].handle}"

    def wait(self, seconds: float) -> list[Ended]:
        if time.monotonic() >= self._due:
            self._submit_arrays()
        self._find_ended()
        if not self._ended and seconds:
            time.sleep(seconds)
            self._find_ended()
        ended, self._ended = self._ended, []
        return ended

    def stop(self, numbers: list[int]) -> None:
        for number in self._jobs.keys() & set(numbers):
            self._jobs[number].is_stopped = True
        for resources, array in list(self._arrays.items()):  # only as a whole: handles have the indices of its jobs
            if all(self._jobs[job.number].is_stopped for job in array.jobs):
                self._give_up(resources, "")
        self._signal_stopped()

    def _signal_stopped(self) -> None:
        """Stop the jobs passed to `stop`, again and again: SLURM drops a signal for a job that has no process yet."""
        _stop([job.id for job in self._jobs.values() if job.is_stopped and job.id])

    def kill(self) -> None:
        ids = [job.id for job in self._jobs.values() if job.id]
        cancel(ids, f"--signal={KILL.name[3:]}")
        cancel(ids)
        self._arrays.clear()
        self._jobs.clear()

    def _submit_arrays(self) -> None:
        """Submit the arrays. If SLURM rejects one, they are due again later, but only a few times."""
        for resources, array in list(self._arrays.items()):
            try:
                ids = self._sbatch(resources, array)
            except SlurmError as error:
                with suppress(SlurmError):  # it may have been accepted although sbatch failed
                    answer("scancel", f"--name={self._name}-{array.token}")
                if not self._is_working:
                    self._arrays.clear()
                    self._jobs.clear()
                    remedy = "correct the option of the sweep that SLURM names, or try again"
                    raise ConfigError("sweep", "slurm", str(error), remedy) from None
                self._num_failures += 1
                if self._num_failures < _MAX_SUBMITS:
                    self._due = time.monotonic() + _SUBMIT_AGAIN_SECONDS
                    log.warning("%s; trying again in %.0f s", error, _SUBMIT_AGAIN_SECONDS)
                    return
                self._give_up(resources, str(error))
            else:
                del self._arrays[resources]
                for job, job_id in zip(array.jobs, ids, strict=True):
                    self._jobs[job.number].id = job_id
                self._is_working = True
            self._num_failures = 0

    def _give_up(self, resources: Resources, why: str) -> None:
        """Report all jobs of an array that has not been submitted as ended, for the reason `why`."""
        for job in self._arrays.pop(resources).jobs:
            self._end(job.number, STOPPED if self._jobs[job.number].is_stopped else None, why)

    def _sbatch(self, resources: Resources, array: _Array) -> list[str]:
        """Submit an array, and return the SLURM job IDs of its jobs, in the order of the jobs."""
        import submitit
        from submitit.helpers import clean_env

        (self._folder / ENDS).mkdir(parents=True, exist_ok=True)
        options, variables = self._options, {"OMP_NUM_THREADS": str(resources.threads)}
        ends = [str(self._folder / ENDS / self._jobs[job.number].handle) for job in array.jobs]
        tasks = [task(job.arguments, job.console, variables) for job in array.jobs]
        chosen = {key: getattr(options, key) for key in ("partition", "account", "qos", "constraint")}
        chosen["mem"] = f"{round(options.mem_gb * 1024)}M" if options.mem_gb is not None else None
        chosen["gpus_per_node"] = resources.gpus or None
        executor: submitit.SlurmExecutor = submitit.SlurmExecutor(self._folder, max_num_timeout=_MAX_REQUEUES)
        executor.update_parameters(
            **{key: value for key, value in chosen.items() if value is not None},
            job_name=f"{self._name}-{array.token}",
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
        try:
            with clean_env() if "SLURM_JOB_ID" in os.environ else nullcontext(), redirect_stderr(StringIO()):
                return [job.job_id for job in executor.submit_array([*map(SlurmTask, tasks, ends)])]
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
        del self._jobs[number]
        self._ended.append(Ended(number, code, reason))

    def _find_ended(self) -> None:
        names = set(os.listdir(self._folder / ENDS)) if self._jobs and (self._folder / ENDS).is_dir() else set()
        for number, job in list(self._jobs.items()):
            if job.handle in names and (code := self._code(job.handle)) is not None:
                self._end(number, code)
        submitted = [job for job in self._jobs.values() if job.id]
        pause = _ASK_AGAIN_SECONDS if any(job.num_looks or job.is_stopped for job in submitted) else _ASK_SECONDS
        if submitted and time.monotonic() >= self._asked + pause:
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
        for number, job in list(self._jobs.items()):
            _, state = listed.get(job.handle, ("", ""))
            if not job.id or (state and state not in _FINAL_STATES):
                job.num_looks = 0
                continue
            job.num_looks += 1
            if job.is_stopped or (state == "CANCELLED" and job.num_looks == _MAX_LOOKS):
                self._end(number, STOPPED)
            elif job.num_looks == _MAX_LOOKS:
                self._end(number, None, f"SLURM says {state}" if state else "SLURM no longer knows the job")


def _stop(ids: list[str]) -> None:
    """Cancel the jobs with these SLURM job IDs that are waiting, and let those that are running save and exit."""
    cancel(ids, "--state=PENDING")
    cancel(ids, f"--signal={STOP.name[3:]}")


def queue(name: str) -> dict[str, tuple[str, str]]:
    """Return the SLURM job ID and the state of all jobs of the arrays called NAME-TOKEN, by handle.

    Raises:
        SlurmError: if squeue fails, or its output cannot be parsed.
    """
    found = {}
    flags = ("--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%j|%T")
    for line in answer("squeue", *flags).splitlines():
        match = _LISTED.fullmatch(line.strip())
        if match is None:
            raise SlurmError(f"squeue gave an answer that cannot be understood: {shortened(line)!r}")
        array, _, token = match["name"].rpartition("-")
        if array == name:
            found[f"{token}_{match['id'].partition('_')[2] or 0}"] = match["id"], match["state"]
    return found


def cancel(ids: list[str], *flags: str) -> None:
    """Cancel, or signal, the jobs with these SLURM job IDs, as the flags of scancel say."""
    if ids:
        with suppress(SlurmError):  # it also fails if one of the jobs has ended
            answer("scancel", *flags, *ids)


def answer(*words: str) -> str:
    """Run a SLURM program, and return its standard output; raise `SlurmError` if it fails or does not end in time."""
    variables = {k: value for k, value in os.environ.items() if not k.startswith("SQUEUE_")}  # they filter and format
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_SECONDS, env=variables, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{words[0]} cannot be run: {error}") from None
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise SlurmError(f"{words[0]} failed: {said or f'exit code {done.returncode}'}")
    return done.stdout.decode(errors="replace")
