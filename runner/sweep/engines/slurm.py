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
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from runner.config.errors import ConfigError, check, check_range
from runner.storage.files import UnsafeFileError, check_no_link, read_regular
from runner.sweep.engines.base import Ended, Job, Pool, Started
from runner.sweep.engines.child import task
from runner.sweep.engines.cluster import ClusterEngine, Resources
from runner.sweep.engines.slurm_task import KILL, STOP, SlurmTask
from runner.system.exit_codes import STOPPED
from runner.system.import_path import python_path
from runner.system.installed import is_installed

if TYPE_CHECKING:
    from submitit import SlurmExecutor

log = logging.getLogger(__name__)

PROGRAMS = ("sbatch", "srun", "squeue", "scancel")

FOLDER, ENDS = "slurm", "ends"
"""The folder in a sweep's directory for the files of submitit, and its subfolder for the exit codes of the jobs."""

_SETTLED = (0, 3)
"""Exit codes of jobs of an earlier command that are not started again: 0 (done) and 3 (diverged)."""

_HANDLE = re.compile(r"slurm (?P<handle>[0-9a-f]{8}_[0-9]{1,5})")
_LISTED = re.compile(r"(?P<id>[0-9]+(_[0-9\[\],%-]+)?)\|(?P<name>.*)")
_RESERVED = (
    *("array", "error", "input", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "signal"),
    *("no-requeue", "wrap"),
)
"""Options of sbatch that users cannot set, because the engine sets them itself or would not work with them."""

_MOST_REQUEUES = 10_000
_SUBMIT_AGAIN_SECONDS = (5.0, 15.0, 45.0)
_ASK_SECONDS = (2.0, 60.0)
"""The shortest and the longest time between two calls of squeue; the time grows while no job starts or ends."""

_ASK_AGAIN_SECONDS = 5.0
"""Time between two calls of squeue while jobs are being stopped, or while a job is missing from squeue's list."""

_MOST_LOOKS = 4
"""A job counts as lost if it is missing from this many squeue lists in a row, and sacct does not know it."""

_NOT_FINAL = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "RESIZING", "SUSPENDED", "UNKNOWN")
"""States in sacct that do not show how a job ended: sacct is updated later than squeue."""

_ANSWER_SECONDS = 60.0
_IDS_PER_CALL = 200


@dataclass
class Slurm(ClusterEngine):
    """The engine that runs jobs on a SLURM cluster.

    Args:
        slots: the maximum number of jobs in SLURM's queue at once, both waiting and running.
        mem_gb: the memory of each job in GB; null: the default of the partition.
        timeout_min: the time limit of each job in minutes. A job that reaches the limit saves a checkpoint and is
            requeued.
        signal_seconds: the number of seconds before the time limit at which a job is told to save a checkpoint.
        partition, account, qos, constraint: the options of sbatch with these names; null: not set.
        setup: shell commands that run before the job, for example `module load cuda`.
        additional: further options of sbatch by name, for example `{nice: 100}`; true for an option without a value.
    """

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
        missing = not is_installed("submitit")
        remedy = "pip install submitit, or sweep=local"
        check(not missing, "sweep", "slurm", "the package submitit is not installed", remedy)
        absent = [program for program in PROGRAMS if shutil.which(program) is None]
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
        import submitit  # noqa: F401  # imported here: an optional dependency

        logging.getLogger("submitit").setLevel(logging.CRITICAL)  # what matters is reported here
        pool = SlurmPool(self, path)
        try:
            pool.find_alive()
        except SlurmError as error:
            raise ConfigError("sweep", "slurm", str(error), "try again, or sweep=local") from None
        try:
            yield pool
        finally:
            pool.kill()


class SlurmError(Exception):
    """Raised when a SLURM program such as sbatch or squeue fails, or when its output cannot be parsed."""


class _Batch:
    """A batch of jobs that are submitted together as one job array.

    Args:
        resources: the resources that each job of the batch needs.
    """

    def __init__(self, resources: Resources):
        self.resources = resources
        self.token = secrets.token_hex(4)
        self.jobs: list[Job] = []
        self.failures = 0
        self.due = 0.0

    def handle(self, index: int) -> str:
        return f"{self.token}_{index}"


class SlurmPool(Pool):
    """The jobs of a sweep that are waiting or running in SLURM.

    Args:
        options: the options of the sweep.
        path: the directory of the sweep.
    """

    def __init__(self, options: Slurm, path: Path):
        self._options, self._folder = options, (path / FOLDER).absolute()
        self._is_new = not self._folder.exists()
        place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]
        self._name = f"{re.sub('[^A-Za-z0-9.-]', '-', path.parent.name)[:40]}-{place}"
        self._batches: list[_Batch] = []
        self._handles: dict[int, str] = {}
        self._ids: dict[str, str] = {}
        self._ended: list[Ended] = []
        self._adopted: set[int] = set()
        self._stopped: set[int] = set()
        self._looks: dict[int, int] = {}
        self._alive: dict[str, str] = {}
        self._has_submitted = False
        self._changed = self._asked = time.monotonic()

    def find_alive(self) -> None:
        """Find the jobs of an earlier command that are still waiting or running, so that `adopt` can take them over.

        Raises:
            SlurmError: if squeue fails several times.
        """
        for tries_left in (2, 1, 0):
            try:
                self._alive = self._listed()
                return
            except SlurmError:
                if not tries_left:
                    raise
                time.sleep(1)

    def submit(self, job: Job) -> Started | None:
        if len(self._handles) >= self._options.slots:
            return None
        resources = self._options.resources(job.demand)
        batch = next((each for each in self._batches if each.resources == resources and not each.failures), None)
        if batch is None:
            batch = _Batch(resources)
            self._batches.append(batch)
        handle = batch.handle(len(batch.jobs))
        batch.jobs.append(job)
        self._handles[job.number] = handle
        self._adopted.discard(job.number)
        self._stopped.discard(job.number)
        return Started(f"slurm {handle}")

    def adopt(self, job: Job, started: Started) -> bool:
        match = _HANDLE.fullmatch(started.slot)
        if match is None or match["handle"] in self._handles.values():
            return False
        handle = match["handle"]
        if handle not in self._alive and self._code(handle) not in _SETTLED:
            return False
        self._handles[job.number] = handle
        self._adopted.add(job.number)
        if handle in self._alive:
            self._ids[handle] = self._alive[handle]
        return True

    def wait(self, seconds: float) -> list[Ended]:
        self._submit_batches()
        self._find_ended()
        if not self._ended and seconds:
            time.sleep(seconds)
            self._find_ended()
        ended, self._ended = self._ended, []
        return ended

    def stop(self, numbers: list[int]) -> list[int]:
        self._stopped |= self._handles.keys() & set(numbers)
        for batch in self._batches.copy():  # a batch is given up only as a whole: handles have its indices
            if self._stopped.issuperset(job.number for job in batch.jobs):
                self._give_up(batch, "")
        self._signal_stopped()
        self._asked = time.monotonic() - _ASK_AGAIN_SECONDS + _ASK_SECONDS[0]  # canceled jobs are soon gone
        return []

    def kill(self) -> None:
        for batch in self._batches.copy():
            self._give_up(batch, "")
        ids = [self._ids[handle] for number, handle in self._handles.items() if number not in self._adopted]
        self._cancel(ids, f"--signal={KILL.name[3:]}")
        self._cancel(ids)
        self._handles = {number: handle for number, handle in self._handles.items() if number in self._adopted}

    # -----------------------------------------------------------------------------------------------------------------
    # Starting jobs

    def _array_name(self, batch: _Batch) -> str:
        return f"{self._name}-{batch.token}"

    def _submit_batches(self) -> None:
        """Submit the batches that are due, each as one job array.

        A batch that SLURM rejects is due again after some time, but only a limited number of times.

        Raises:
            ConfigError: if SLURM rejects a batch before any job has been submitted or adopted. The cause is then
                probably an invalid option, which the user can correct.
        """
        for batch in [batch for batch in self._batches if batch.due <= time.monotonic()]:
            try:
                ids = self._sbatch(batch)
            except SlurmError as error:
                self._not_submitted(batch, str(error))
                continue
            self._batches.remove(batch)
            self._has_submitted = True
            self._ids |= {batch.handle(index): job_id for index, job_id in enumerate(ids)}
            self._changed = time.monotonic()

    def _not_submitted(self, batch: _Batch, why: str) -> None:
        self._cancel([], f"--name={self._array_name(batch)}")  # it may have been accepted although sbatch failed
        if not self._has_submitted and not self._adopted:
            self._batches.clear()
            self._handles.clear()
            if self._is_new:
                shutil.rmtree(self._folder, ignore_errors=True)
            remedy = "correct the option of the sweep that SLURM names, or try again"
            raise ConfigError("sweep", "slurm", why, remedy)
        if batch.failures < len(_SUBMIT_AGAIN_SECONDS):
            seconds = _SUBMIT_AGAIN_SECONDS[batch.failures]
            log.warning("%s; trying again in %.0f s", why, seconds)
            batch.failures += 1
            batch.due = time.monotonic() + seconds
        else:
            self._give_up(batch, why)

    def _give_up(self, batch: _Batch, why: str) -> None:
        """Give up a batch that has not been submitted, and report all of its jobs as ended for the reason `why`."""
        self._batches.remove(batch)
        for job in batch.jobs:
            self._end(job.number, STOPPED if job.number in self._stopped else None, why)

    def _sbatch(self, batch: _Batch) -> list[str]:
        """Submit a batch, and return the SLURM job IDs of its jobs, in the order of the jobs.

        Raises:
            SlurmError: if sbatch fails, or its output cannot be parsed.
        """
        import submitit  # imported here: an optional dependency
        from submitit.helpers import clean_env

        (self._folder / ENDS).mkdir(parents=True, exist_ok=True)
        variables = {"OMP_NUM_THREADS": str(batch.resources.threads)}
        files = [self._end_file(batch.handle(index)) for index in range(len(batch.jobs))]
        tasks = [
            SlurmTask(task(job.arguments, job.console, variables), str(file))
            for job, file in zip(batch.jobs, files, strict=True)
        ]
        executor: SlurmExecutor = submitit.SlurmExecutor(self._folder, max_num_timeout=_MOST_REQUEUES)
        executor.update_parameters(**self._parameters(batch))
        inside_a_job = "SLURM_JOB_ID" in os.environ
        try:
            with clean_env() if inside_a_job else nullcontext(), redirect_stderr(StringIO()):
                return [job.job_id for job in executor.submit_array(tasks)]
        except Exception as error:  # submitit has several kinds, and the operating system its own
            why = " ".join(str(error).split()) or type(error).__name__
            raise SlurmError(f"sbatch has not accepted the jobs: {why}") from None

    def _parameters(self, batch: _Batch) -> dict[str, Any]:
        """Return the parameters of a batch, with the names that submitit uses."""
        options, resources = self._options, batch.resources
        chosen = {
            "partition": options.partition,
            "account": options.account,
            "qos": options.qos,
            "constraint": options.constraint,
            "mem": f"{round(options.mem_gb * 1024)}M" if options.mem_gb is not None else None,
            "gpus_per_node": resources.gpus or None,
        }
        return {
            **{key: value for key, value in chosen.items() if value is not None},
            "job_name": self._array_name(batch),
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

    # -----------------------------------------------------------------------------------------------------------------
    # How jobs end

    def _end_file(self, handle: str) -> Path:
        return self._folder / ENDS / handle

    def _code(self, handle: str) -> int | None:
        """Return the exit code that a job has written to its file; None if there is no file or no valid exit code."""
        with suppress(OSError, ValueError):
            code = int(read_regular(self._end_file(handle), 10))
            return code if -64 <= code <= 255 else None
        return None

    def _end(self, number: int, code: int | None, reason: str = "") -> None:
        handle = self._handles.pop(number)
        self._ids.pop(handle, None)
        self._looks.pop(number, None)
        self._ended.append(Ended(number, code, reason))
        self._changed = time.monotonic()

    def _find_ended(self) -> None:
        names = set(os.listdir(self._folder / ENDS)) if self._handles and (self._folder / ENDS).is_dir() else set()
        for number, handle in list(self._handles.items()):
            if handle in names and (code := self._code(handle)) is not None:
                self._end(number, code)
        if self._is_due():
            self._look_for_lost()
            self._signal_stopped()

    def _is_due(self) -> bool:
        """Return whether squeue should be called again now."""
        now = time.monotonic()
        if self._looks or self._stopped & self._handles.keys():
            pause = _ASK_AGAIN_SECONDS
        else:
            pause = min(_ASK_SECONDS[1], max(_ASK_SECONDS[0], (now - self._changed) / 2))
        return bool(self._ids) and now >= self._asked + pause

    def _look_for_lost(self) -> None:
        """Find jobs that are no longer in SLURM but wrote no exit code, for example because their node failed."""
        try:
            alive = self._listed()
        except SlurmError as error:
            log.warning("%s; trying again", error)
            return
        finally:
            self._asked = time.monotonic()
        absent = [number for number, handle in self._handles.items() if handle in self._ids and handle not in alive]
        self._looks = {number: self._looks.get(number, 0) + 1 for number in absent}
        # A job may have ended a moment ago, and its file is not seen yet: it is looked for at least twice.
        lost = [number for number in absent if self._looks[number] > 1 or number in self._stopped]
        states = _states([self._ids[self._handles[number]] for number in lost if number not in self._stopped])
        for number in lost:
            state = states.get(self._ids[self._handles[number]], "")
            if number in self._stopped or state.startswith("CANCELLED"):
                self._end(number, STOPPED)
            elif state or self._looks[number] >= _MOST_LOOKS:
                self._end(number, None, f"SLURM says {state}" if state else "SLURM no longer knows the job")

    def _listed(self) -> dict[str, str]:
        """Return a dict from handle to SLURM job ID, with all waiting and running jobs of this sweep.

        Raises:
            SlurmError: if squeue fails, or its output cannot be parsed.
        """
        from submitit.slurm.slurm import read_job_id  # imported here: an optional dependency

        answer = _answer("squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i|%j")
        found = {}
        for line in answer.splitlines():
            match = _LISTED.fullmatch(line.strip())
            if match is None:
                raise SlurmError(f"squeue gave an answer that cannot be understood: {line[:80]!r}")
            name, _, token = match["name"].rpartition("-")
            if name != self._name:
                continue
            for main, *indices in read_job_id(match["id"]):
                first, last = (int(indices[0]), int(indices[-1])) if indices else (0, 0)
                for index in range(first, last + 1):
                    found[f"{token}_{index}"] = f"{main}_{index}" if indices else main
        return found

    # -----------------------------------------------------------------------------------------------------------------
    # Stopping

    def _signal_stopped(self) -> None:
        """Cancel each job passed to `stop` if it is waiting; if it is running, signal it to save a checkpoint and exit.

        The pool repeats this until the jobs have ended, because SLURM drops a signal for a job that has no process yet.
        """
        handles = [self._handles[number] for number in self._stopped & self._handles.keys()]
        ids = [self._ids[handle] for handle in handles if handle in self._ids]
        self._cancel(ids, "--state=PENDING")
        self._cancel(ids, f"--signal={STOP.name[3:]}")

    def _cancel(self, ids: list[str], *flags: str) -> None:
        named = any(flag.startswith("--name=") for flag in flags)
        for first in range(0, max(len(ids), named), _IDS_PER_CALL):
            with suppress(SlurmError):  # it also fails if one of the jobs has ended
                _answer("scancel", *flags, *ids[first : first + _IDS_PER_CALL])


def _states(ids: list[str]) -> dict[str, str]:
    """Return the final states of the jobs in `ids` that have ended, by SLURM job ID.

    The states are read with sacct. If sacct fails, log a warning and return an empty dict.
    """
    from submitit.slurm.slurm import SlurmInfoWatcher  # imported here: an optional dependency

    if not ids:
        return {}
    answer = ""
    main_ids = ",".join(sorted({job_id.partition("_")[0] for job_id in ids}))
    try:
        answer = _answer("sacct", "--format=JobID,State", "--parsable2", f"--jobs={main_ids}")
        found = SlurmInfoWatcher().read_info(answer)
        states = {job_id: found[job_id]["State"] for job_id in ids if job_id in found}
    except SlurmError as error:
        log.warning("%s; trying again", error)
        return {}
    except (KeyError, ValueError):  # the output is not a table
        log.warning("sacct gave an answer that cannot be understood: %r; trying again", answer[:80])
        return {}
    return {job_id: state for job_id, state in states.items() if state and not state.startswith(_NOT_FINAL)}


def _answer(*words: str) -> str:
    """Run a SLURM program, and return its standard output.

    Args:
        words: the name of the program and its arguments.

    Raises:
        SlurmError: if the program fails, or does not end in time.
    """
    variables = {k: value for k, value in os.environ.items() if not k.startswith("SQUEUE_")}  # they filter and format
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_SECONDS, env=variables, check=False
        )
    except OSError as error:
        raise SlurmError(f"{words[0]} cannot be run ({error.strerror})") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]} has not answered for {_ANSWER_SECONDS:.0f} s") from None
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise SlurmError(f"{words[0]} failed: {said or f'exit code {done.returncode}'}")
    return done.stdout.decode(errors="replace")
