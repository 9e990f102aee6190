"""Runs the command of a job as a child process. The parent is the process that SLURM or Ray starts for the job.

This module imports no third-party packages, because the parent process does not need torch.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from runner.system.exit_codes import STOPPED

COMMAND = ("-m", "runner")
"""The arguments with which Python runs the command; they are followed by the arguments of the job."""

_RECHECK_SECONDS = 0.2


class Task(NamedTuple):
    """The command that a child process runs, as plain strings, because a task is sent to another machine.

    Args:
        words: the arguments of the Python interpreter.
        console: the absolute path of the file for everything that the command prints.
        directory: the working directory of the command.
        variables: environment variables, which take precedence over those of the parent process.
    """

    words: list[str]
    console: str
    directory: str
    variables: dict[str, str]


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

        The task holds a lock on its console file. If the job was started twice, the second task waits until the first
        task has ended and the lock is free. It then resumes the run, or finds that the run is done. If the task is
        stopped before it begins, or before it can handle signals, its exit code is 75.

        Args:
            variables: further environment variables; they take precedence over those of the task.
            first_line: text that is written to the console file before the task begins.

        Raises:
            OSError: if the console file cannot be opened, for example because it is a symbolic link.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        console = os.open(self.task.console, flags, 0o666)
        try:
            while not self._stopped and not _locked(console):
                time.sleep(_RECHECK_SECONDS)
            if self._stopped:
                self.code = STOPPED
                return self.code
            os.write(console, first_line.encode())
            script = str(Path(__file__).with_name("die_with_parent.py"))
            words = [sys.executable, "-I", "-S", script, str(os.getpid()), sys.executable, *self.task.words]
            self._process = subprocess.Popen(
                words,
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
        if self.code is None and self._process is None:  # it never began
            self.code = STOPPED
        if self.code is None:
            assert self._process is not None
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

    def say(self, line: str) -> None:
        """Add a line to the console file."""
        with suppress(OSError), open(self.task.console, "a", encoding="utf-8") as file:
            print(line, file=file)


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
