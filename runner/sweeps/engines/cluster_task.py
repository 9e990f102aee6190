"""What SLURM or Ray starts for a job: a process that runs the command of the job as a child, and passes on signals.

This module imports no third-party packages at its top, because that process does not need torch.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.system.console import STOPPED

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

COMMAND = ("-m", "runner")
"""The arguments with which Python runs the command; they are followed by the arguments of the job."""

_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.getppid() == int(sys.argv[1]) or os._exit(137); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)
"""A program that becomes a command which the kernel of Linux kills when the process with the id `argv[1]` has ended.

SLURM and Ray may kill the process that manages a job, and nothing would manage the job anymore. It is a program because
a `preexec_fn` may deadlock if there are threads; `setpriv --pdeathsig` does the same, but only since util-linux 2.33.
"""

_RECHECK_SECONDS = 0.2

STOP, KILL = signal.SIGHUP, signal.SIGINT
"""Signals that the scheduler of the sweep sends to a `SlurmTask`. SLURM itself sends SIGTERM and SIGUSR2."""

_SECONDS_TO_BE_KILLED = 120.0
"""SLURM kills a job KillWait or GraceTime seconds after SIGTERM. Almost all clusters set both to less than this."""


class Task(NamedTuple):
    """The command that a child process runs, as plain strings, because a task is sent to another machine."""

    words: list[str]  # the arguments of the Python interpreter
    console: str  # the absolute path of the file for everything that the command prints
    directory: str
    variables: dict[str, str]  # they take precedence over those of the parent process


def task(arguments: list[str], console: Path, variables: dict[str, str]) -> Task:
    """Return a task that runs `python -m runner` with `arguments` in the current working directory."""
    return Task([*COMMAND, *arguments], str(console.absolute()), os.getcwd(), variables)


class Child:
    """A child process that runs a task. Signal handlers and other threads may call `stop` and `kill`."""

    def __init__(self, task: Task):
        self.task = task
        self.code: int | None = None
        """The exit code; None until the task has ended."""
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def run(self, variables: dict[str, str] | None = None, first_line: str = "") -> int:
        """Run the task until it ends, and return its exit code, which is negative if a signal killed the task.

        The task holds a lock on its console file: if the job was started twice, the second task waits until the first
        one has ended, and then resumes the run. If the task is stopped before it begins, or before it can handle
        signals, its exit code is 75. The `variables` are added to its environment, and `first_line` to its console.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        console = os.open(self.task.console, flags, 0o666)
        try:
            while not self._stopped and not _locked(console):
                time.sleep(_RECHECK_SECONDS)
            if self._stopped:
                return self.wait()
            os.write(console, first_line.encode())
            with_parent = [sys.executable, "-ISc", _WITH_PARENT, str(os.getpid())] if sys.platform == "linux" else []
            self._process = subprocess.Popen(
                [*with_parent, sys.executable, *self.task.words],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                cwd=self.task.directory,
                env=_environment() | self.task.variables | (variables or {}),
                start_new_session=True,  # a signal to the whole group, as SLURM may send it, reaches its parent alone
            )
        finally:
            os.close(console)
        if self._stopped:  # `stop` was called after the check above
            self.stop()
        return self.wait()

    def wait(self) -> int:
        """Wait until the task has ended, and return its exit code; 75 if it has not begun."""
        if self._process is None:
            self.code = STOPPED
        elif self.code is None:
            # Not `Popen.wait`: its lock is not reentrant, and a signal handler may call this while it is waited here.
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            code = self._process.wait()
            too_early = self._stopped and code == -signal.SIGTERM  # before it could handle the signal
            self.code = STOPPED if too_early else code
        return self.code

    def stop(self) -> None:
        """Ask the task to save a checkpoint and to exit. If the task has not begun yet, it will not begin."""
        self._stopped = True
        if self._process is not None and self.code is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the task and all processes that it has started."""
        self._stopped = True
        if self._process is not None and self.code is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _locked(console: int) -> bool:
    try:
        fcntl.flock(console, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: the run, which locks its directory, reports it
        pass
    return True


def _environment() -> dict[str, str]:
    """Return the environment without the variables by which a launcher tells a process its rank: a job has none."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    slurm = ("SLURM_STEP_", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SUBMITIT_")
    return {k: value for k, value in os.environ.items() if k not in ranks and not k.startswith(slurm)}


class SlurmTask:
    """A task that saves a checkpoint and is requeued when its time limit is reached, or when SLURM preempts it.

    - SIGUSR2, for which submitit calls `checkpoint`: the time limit is reached, or the job is preempted. The job saves
      a checkpoint, and is requeued.
    - SIGTERM: SLURM is going to kill the job, because the job was canceled or preempted. The job saves a checkpoint,
      and the task then waits until it is killed or receives SIGUSR2. SLURM itself requeues a preempted job.
    - `STOP`: the job saves a checkpoint, and ends. `KILL`: it ends at once.

    When the job has ended for good, its exit code is written to the file `end`.
    """

    def __init__(self, task: Task, end: str):
        self.task, self.end = task, end

    def __call__(self) -> int:
        self._child, self._stopping, self._terminated = Child(self.task), False, False
        for number in (STOP, KILL, signal.SIGTERM):
            signal.signal(number, self._handle)
        name = "_".join(filter(None, map(os.environ.get, ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"))))
        line = f"SLURM job {name or os.environ.get('SLURM_JOB_ID', '?')} on {socket.gethostname()}\n"
        try:
            has_gpus = any(map(os.environ.get, ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE")))
            self._child.run({} if has_gpus else {"CUDA_VISIBLE_DEVICES": ""}, line)  # else it would see the node's GPUs
            patience = time.monotonic() + _SECONDS_TO_BE_KILLED
            while self._is_to_be_requeued() and self._terminated and time.monotonic() < patience:
                time.sleep(0.1)
        except Exception as error:  # raised by submitit's signal handler if it does not requeue the job
            if self._child.code is None:
                raise
            if self._is_to_be_requeued():
                with suppress(OSError), open(self.task.console, "a", encoding="utf-8") as file:
                    print(f"SLURM has not requeued the job, which can be resumed: {error}", file=file)
        code = self._child.wait()
        part = Path(f"{self.end}.part")
        part.write_text(f"{code}\n", encoding="utf-8")
        part.replace(self.end)
        return code

    def checkpoint(self) -> DelayedSubmission | None:
        """Save a checkpoint, and return the task to requeue, or None; submitit calls this method on SIGUSR2."""
        from submitit.helpers import DelayedSubmission

        self._child.stop()
        self._child.wait()
        return DelayedSubmission(SlurmTask(self.task, self.end)) if self._is_to_be_requeued() else None

    def _is_to_be_requeued(self) -> bool:
        return self._child.code == STOPPED and not self._stopping

    def _handle(self, number: int, _: object) -> None:
        self._stopping |= number in (STOP, KILL)
        self._terminated |= number == signal.SIGTERM
        if number == KILL:
            self._child.kill()
        else:
            self._child.stop()


def import_ray() -> Any:
    """Import and return the package `ray`, which type checkers would take for the module beside this one."""
    return import_module("ray")


class RayTask(Child):
    """The Ray actor that runs a job. It gets those `variables` of the scheduler that are not set here."""

    def __init__(self, task: Task, variables: dict[str, str]):
        super().__init__(task)
        self._variables = variables

    def start(self) -> int:
        """Run the task until it ends, and return its exit code."""
        os.environ.update({key: value for key, value in self._variables.items() if key not in os.environ})
        return self.run({"CUDA_VISIBLE_DEVICES": ",".join(map(str, import_ray().get_gpu_ids()))})

    def ready(self) -> None:
        """Do nothing. Ray completes this call only after the actor has received its CPU cores and GPUs."""
