"""Run `python -m runner` in another process: a fresh interpreter, or a fork of one that has imported everything."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from helpers.command_server import fork_server

ROOT = Path(__file__).parent.parent.parent
STEP_GATE_PYTHONPATH = str(ROOT / "tests" / "helpers" / "gated")
"""A directory that, on PYTHONPATH, installs the gate of `step_gate` in a fresh `python -m runner` and its ranks."""
TIMEOUT_SECONDS = 300.0
"""Timeout in seconds for events that a test waits for; generous, because machines may be busy."""


def child_environment(**variables: str) -> dict[str, str]:
    """Return the environment variables for a child process, including `variables`."""
    drop = ("CI", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "HYDRA_FULL_ERROR")
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    # A stop signal may interrupt Python between opening a module's file and the `with` that closes it.
    warn = "error::ResourceWarning,ignore::ResourceWarning:importlib._bootstrap_external"
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": warn}
    return kept | own | variables


def run_program(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a function of `helpers.programs` with its arguments in a new interpreter, to its end."""
    options: Any = {"capture_output": True, "text": True, "timeout": TIMEOUT_SECONDS, "env": child_environment()}
    return subprocess.run([sys.executable, "-m", "helpers.programs", *words], **options)


def start_in_new_interpreter(*arguments: str, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """Start `python -m runner ARGUMENTS` in a fresh interpreter in `cwd`, in the background."""
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": child_environment()}
    words = [sys.executable, "-m", "runner", *arguments]
    return subprocess.Popen(words, cwd=cwd, **(usual | options))


@functools.cache
def command_server(kind: str) -> tuple[Any, Any]:
    """Return the input and output of the server of a kind, which is started when it is first asked for."""
    if kind == "ranks":
        commands, answers = fork_server(child_environment())
        for pipe in (commands, answers):
            atexit.register(pipe.close)  # the server ends
        return commands, answers
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(
        [sys.executable, "-m", "helpers.command_server"], env=child_environment(), cwd="/", **pipes
    )
    atexit.register(server.communicate)
    return server.stdin, server.stdout


class Command:
    """`python -m runner ARGUMENTS` in `cwd`, in the background; faults can be planted in the kind `faults`."""

    def __init__(self, cwd: Path, *arguments: str, kind: str = "ranks", **variables: str):
        self.cwd = cwd
        cwd.mkdir(exist_ok=True)
        (cwd / "code").unlink(missing_ok=True)
        self._logged = {path: path.stat().st_size for path in glob(cwd, "outputs/**/log.txt")}
        commands, answers = command_server("ranks" if kind == "faults" else kind)
        print(json.dumps([str(cwd), kind == "faults", variables, *arguments]), file=commands, flush=True)
        self.pid = int(answers.readline())

    @property
    def single_run_directory(self) -> Path:
        [path] = self.cwd.glob("outputs/*/*/")
        return path

    @property
    def log(self) -> str:
        """What this command, as opposed to earlier ones in `cwd`, has written to the log of its run."""
        found = glob(self.cwd, "outputs/**/log.txt")
        return found[0].read_text()[self._logged.get(found[0], 0) :] if found else ""

    @property
    def command_exit_code(self) -> int | None:
        """The exit code; the negative signal number if a signal killed the command; None while it runs."""
        return int((self.cwd / "code").read_text()) if (self.cwd / "code").exists() else None

    @property
    def console(self) -> str:
        return (self.cwd / "console.txt").read_text()

    def wait_for_rank_pids(self, start: int = 1) -> list[int]:
        """Wait until the command has started its ranks for the `start`-th time, and return their process ids."""

        def started() -> list[str]:
            assert self.command_exit_code is None, self.console
            return re.findall(r"the ranks' processes: ([\d ]+)\n", self.log)[start - 1 :]

        return [int(pid) for pid in wait_until(started)[0].split()]

    def wait_for_checkpoint(self, step: int = 1) -> Command:
        """Wait until there is a checkpoint of `step` or later, and return this command."""

        def there() -> bool:
            assert self.command_exit_code is None, self.console
            return any(int(path.name[5:]) >= step for path in glob(self.cwd, "outputs/**/checkpoints/step_????????"))

        wait_until(there)
        return self

    def signal_processes(self, number: signal.Signals, *pids: int) -> float:
        """Send the signal `number` to the processes `pids`, and return `time.monotonic()` after sending it."""
        for pid in pids or [self.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return time.monotonic()

    def wait(self) -> tuple[int, str]:
        """Wait until the command has ended; return its exit code and what it printed."""
        wait_until(lambda: self.command_exit_code is not None, what="it does not end")
        assert self.command_exit_code is not None
        return self.command_exit_code, self.console

    def wait_for_all_processes(self) -> tuple[int, str]:
        """Wait until the command and all of its processes have ended; return its exit code and what it printed."""
        code, console = self.wait()
        wait_until(lambda: not processes_in(self.cwd), what=f"left behind: {processes_in(self.cwd)}")
        return code, console


def run_command(*arguments: str, cwd: Path, kind: str = "ranks", **variables: str) -> tuple[int, str]:
    """Run a command to its end; return its exit code and what it printed."""
    return Command(cwd, *arguments, kind=kind, **variables).wait()


def run_successfully(cwd: Path, *arguments: str, **variables: str) -> str:
    """Run a command, which must succeed and leave no process behind; return what it printed."""
    code, console = Command(cwd, *arguments, **variables).wait_for_all_processes()
    assert code == 0, console
    return console


def names_left_in(cwd: Path) -> set[str]:
    """Return the names in `cwd`, without the files that the command server writes."""
    return {path.name for path in cwd.iterdir()} - {"console.txt", "code"}


def wait_until(condition: Callable[[], Any], seconds: float = TIMEOUT_SECONDS, what: str = "it never happened") -> Any:
    """Call `condition` until it returns a true value, and return that value; fail with `what` after `seconds`."""
    end, pause = time.monotonic() + seconds, 0.005
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(pause)
        pause = min(1.1 * pause, 0.025)  # the conditions read many small files, and the cores have other work
    return found


def glob(cwd: Path, pattern: str) -> list[Path]:
    """`cwd.glob(pattern)`, repeated if a run renames or removes a directory during the search."""
    while True:
        with suppress(FileNotFoundError):
            return list(cwd.glob(pattern))


def process_that_runs(directory: Path) -> int:
    """The process id of the run in a run directory, whose lock it has open."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if directory / ".lock" in [link.readlink() for link in (path / "fd").iterdir()]:
                return int(path.name)
    raise AssertionError(f"no process runs in {directory}")


def processes_in(cwd: Path) -> dict[int, str]:
    """The command lines, by process id, of all processes that run in `cwd`: the command, its fork server, its ranks."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "cwd").readlink() == cwd:
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
    return found
