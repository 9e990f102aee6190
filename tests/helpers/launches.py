"""Commands of several processes, started for real: who is who among them, what they hold, and how they end."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from conftest import FAST, environment

TWO = (*FAST, "parallel=ddp", "parallel.processes=2")

SERVER = """
import json, os, signal, sys
import multiprocessing.forkserver as server
import torch, runner.resume, runner.tracking.recorder, runner.session
from runner.__main__ import main
from runner.system.forkserver import start_server
from runner.parallel import processes

torch.use_deterministic_algorithms(False)  # loads torch's compiler, as every optimizer does: two seconds
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
answers, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
os.dup2(nowhere, 1)  # what rank 0 prints
start_server(*processes._PRELOADED)
server.ensure_running = server._forkserver.ensure_running = lambda: None  # else each command starts one of its own
for line in sys.stdin:
    cwd, variables, *sys.argv[1:] = json.loads(line)
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if (child := os.fork()) == 0:
            os.chdir(cwd)
            os.environ.update(variables)
            console = os.open("console.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(console, 1), os.dup2(console, 2)
            code = main()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)  # an interpreter with torch takes a second to fall apart
        os.write(answers, b"%d\\n" % child)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with open(cwd + "/code.part", "w") as file:
            print(code, file=file)
        os.replace(cwd + "/code.part", cwd + "/code")
        os._exit(0)
"""


@functools.cache
def warm() -> subprocess.Popen[str]:
    """An interpreter that has imported everything, and starts commands that share one fork server.

    Their ranks are there in a tenth of a second, many commands may go on at once, and what rank 0 prints is lost.
    """
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-c", SERVER], env=environment(), cwd="/", **pipes)
    atexit.register(server.communicate)
    return server


def until(condition: Callable[[], Any], seconds: float = 60, what: str = "it never happened") -> Any:
    """What `condition` returns once that is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.005)
    return found


class Launch:
    """`python -m runner ARGUMENTS` in `cwd`, in the background.

    Args:
        variables: of its environment; the ranks that it starts do not see them.
    """

    def __init__(self, cwd: Path, *arguments: str, **variables: str):
        self.cwd = cwd
        cwd.mkdir(exist_ok=True)
        (cwd / "code").unlink(missing_ok=True)
        self.begun = {path: path.stat().st_size for path in cwd.glob("outputs/**/log.txt")}
        print(json.dumps([str(cwd), variables, *arguments]), file=warm().stdin, flush=True)
        self.pid = int(warm().stdout.readline())  # pyright: ignore[reportOptionalMemberAccess]

    @property
    def directory(self) -> Path:
        """Its only run."""
        [path] = self.cwd.glob("outputs/*/*/")
        return path

    @property
    def log(self) -> str:
        """What this command, and not one before it, wrote to its run's log."""
        found = list(self.cwd.glob("outputs/**/log.txt"))
        return found[0].read_text()[self.begun.get(found[0], 0) :] if found else ""

    def ranks(self, start: int = 1) -> list[int]:
        """The process ids of the ranks, once the command has started them for the `start`-th time."""

        def started() -> list[str]:
            assert self.code is None, self.console
            return re.findall(r"the ranks' processes: ([\d ]+)\n", self.log)[start - 1 :]

        return [int(pid) for pid in until(started)[0].split()]

    def saved(self, step: int = 1) -> Launch:
        """This, once there is a checkpoint of `step` or later."""

        def there() -> bool:
            assert self.code is None, self.console
            return any(int(path.name[5:]) >= step for path in self.cwd.glob("outputs/**/checkpoints/step_????????"))

        until(there)
        return self

    def kill(self, number: signal.Signals, *pids: int) -> float:
        """Send a signal to `pids`, or to the command itself; returns when."""
        for pid in pids or [self.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return time.monotonic()

    @property
    def code(self) -> int | None:
        """Its exit code; negative: the signal that killed it; None while it goes on."""
        return int((self.cwd / "code").read_text()) if (self.cwd / "code").exists() else None

    @property
    def console(self) -> str:
        return (self.cwd / "console.txt").read_text()

    def ended(self, seconds: float = 60) -> tuple[int, str]:
        """Its exit code and what it printed, where it ends within `seconds` and leaves no process behind."""
        code = until(lambda: None if self.code is None else (self.code,), seconds, "it does not end")[0]
        until(lambda: not processes_in(self.cwd), 10, f"left behind: {processes_in(self.cwd)}")
        return code, self.console


def finished(cwd: Path, *arguments: str, **variables: str) -> str:
    """Run a command to its good end; what it printed."""
    code, told = Launch(cwd, *arguments, **variables).ended(120)
    assert code == 0, told
    return told


def processes_in(cwd: Path) -> dict[int, str]:
    """The command lines of all processes that work in `cwd`: the command, its fork server, its ranks, their helpers."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "cwd").readlink() == cwd:
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
    return found


def held_in(cwd: Path) -> tuple[set[str], set[str]]:
    """(inodes of listening sockets, names in shared memory) that the processes in `cwd` have."""
    sockets, names = set(), set()
    for pid in processes_in(cwd):
        with suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    sockets |= set(re.findall(r"socket:\[(\d+)\]", str(file.readlink())))
            names |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
    return sockets & listening(), {name for name in names if Path(name).exists()}


def listening() -> set[str]:
    """Inodes of the TCP sockets of this machine that listen."""
    lines = "".join(Path(f"/proc/net/{family}").read_text() for family in ("tcp", "tcp6")).splitlines()
    return {line.split()[9] for line in lines if line.split()[3] == "0A"}


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of the newest checkpoint of `run`."""
    newest = max(run.glob("checkpoints/step_????????"))
    moments = torch.load(newest / "state.pt", weights_only=True)["optimizer"]
    flat = {f"{key} of {name}": tensor for name, state in moments.items() for key, tensor in state.items()}
    return (
        {"step": torch.tensor(int(newest.name[5:]))} | safetensors.torch.load_file(newest / "model.safetensors") | flat
    )


def assert_bitwise(run: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Refuse a run that ended elsewhere."""
    got = weights(run)
    assert got.keys() == wanted.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, wanted[name]), name


def free_port() -> int:
    """A port that nothing listened at a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
