"""The command in another process: in a fresh interpreter, or in a child of one that has imported everything."""

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

ROOT = Path(__file__).parent.parent.parent
GATED = str(ROOT / "tests" / "helpers" / "gated")
"""A directory that, on PYTHONPATH, puts the gate of `step_gate` into a fresh `python -m runner` and its ranks."""
PATIENCE = 300.0
"""Seconds after which something that should happen counts as never happening: generous, as machines may be busy."""


def environment(**variables: str) -> dict[str, str]:
    """For a child: this checkout, one thread, and none of a terminal's variables."""
    drop = ("CI", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "HYDRA_FULL_ERROR")
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::ResourceWarning"}
    return kept | own | variables


def start_fresh(*arguments: str, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """`python -m runner ARGUMENTS` in a fresh interpreter in `cwd`, in the background."""
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    words = [sys.executable, "-m", "runner", *arguments]
    return subprocess.Popen(words, cwd=cwd, **(usual | options))


def run_fresh(*arguments: str, cwd: Path, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    """`python -m runner ARGUMENTS` in a fresh interpreter in `cwd`, to its end."""
    process = start_fresh(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@functools.cache
def _server(kind: str) -> subprocess.Popen[str]:
    """The server of commands (see `command_server`), started when it is first needed."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    words = [sys.executable, "-m", "helpers.command_server", kind]
    server = subprocess.Popen(words, env=environment(), cwd="/", **pipes)
    atexit.register(server.communicate)
    return server


class Command:
    """`python -m runner ARGUMENTS` in `cwd`, in the background.

    Args:
        kind: of the server that forks it (see `command_server`).
        variables: of its environment; the ranks that it starts do not see them, but for the directories in PYTHONPATH.
    """

    def __init__(self, cwd: Path, *arguments: str, kind: str = "ranks", **variables: str):
        self.cwd = cwd
        cwd.mkdir(exist_ok=True)
        (cwd / "code").unlink(missing_ok=True)
        self._logged = {path: path.stat().st_size for path in glob(cwd, "outputs/**/log.txt")}
        server = _server(kind)
        assert server.stdin is not None
        assert server.stdout is not None
        print(json.dumps([str(cwd), variables, *arguments]), file=server.stdin, flush=True)
        self.pid = int(server.stdout.readline())

    @property
    def directory(self) -> Path:
        """Its only run."""
        [path] = self.cwd.glob("outputs/*/*/")
        return path

    @property
    def log(self) -> str:
        """What this command, and not one before it, wrote to its run's log."""
        found = glob(self.cwd, "outputs/**/log.txt")
        return found[0].read_text()[self._logged.get(found[0], 0) :] if found else ""

    @property
    def code(self) -> int | None:
        """Its exit code; negative: the signal that killed it; None while it goes on."""
        return int((self.cwd / "code").read_text()) if (self.cwd / "code").exists() else None

    @property
    def console(self) -> str:
        """What it has printed."""
        return (self.cwd / "console.txt").read_text()

    def ranks(self, start: int = 1) -> list[int]:
        """The process ids of the ranks, once the command has started them for the `start`-th time."""

        def started() -> list[str]:
            assert self.code is None, self.console
            return re.findall(r"the ranks' processes: ([\d ]+)\n", self.log)[start - 1 :]

        return [int(pid) for pid in until(started)[0].split()]

    def saved(self, step: int = 1) -> Command:
        """This command, once there is a checkpoint of `step` or later."""

        def there() -> bool:
            assert self.code is None, self.console
            return any(int(path.name[5:]) >= step for path in glob(self.cwd, "outputs/**/checkpoints/step_????????"))

        until(there)
        return self

    def kill(self, number: signal.Signals, *pids: int) -> float:
        """Send a signal to `pids`, or to the command itself; returns when."""
        for pid in pids or [self.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return time.monotonic()

    def wait(self) -> tuple[int, str]:
        """Its exit code and what it printed, once it has ended."""
        until(lambda: self.code is not None, what="it does not end")
        assert self.code is not None
        return self.code, self.console

    def ended(self) -> tuple[int, str]:
        """Its exit code and what it printed, once it has ended and left no process behind."""
        code, console = self.wait()
        until(lambda: not processes_in(self.cwd), what=f"left behind: {processes_in(self.cwd)}")
        return code, console


def run_command(*arguments: str, cwd: Path, kind: str = "ranks", **variables: str) -> tuple[int, str]:
    """The command to its end: exit code, and what it printed."""
    return Command(cwd, *arguments, kind=kind, **variables).wait()


def succeed(cwd: Path, *arguments: str, **variables: str) -> str:
    """The command of several processes to its successful end; what it printed."""
    code, console = Command(cwd, *arguments, **variables).ended()
    assert code == 0, console
    return console


def leftovers(cwd: Path) -> set[str]:
    """What is in `cwd`, but for what the command's server writes."""
    return {path.name for path in cwd.iterdir()} - {"console.txt", "code"}


def until(condition: Callable[[], Any], seconds: float = PATIENCE, what: str = "it never happened") -> Any:
    """What `condition` returns once that is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.005)
    return found


def glob(cwd: Path, pattern: str) -> list[Path]:
    """`cwd.glob(pattern)`, also while a run renames and removes directories that are being searched."""
    while True:
        with suppress(FileNotFoundError):
            return list(cwd.glob(pattern))


def processes_in(cwd: Path) -> dict[int, str]:
    """The command lines of all processes whose directory is `cwd`: the command, its fork server, its ranks."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "cwd").readlink() == cwd:
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
    return found
