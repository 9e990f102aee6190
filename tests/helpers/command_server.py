"""A server that forks a child process for each command, which takes 1 s instead of 4 s in a new interpreter.

The server `ranks` is a fork of the process of the tests (`fork_server`): it has imported everything that a run imports,
and starts a fork server for ranks, jobs and data workers, which all commands share. The server `no-torch` is a new
interpreter, `python -m helpers.command_server`, in which torch and numpy cannot be imported.

Each line of standard input is a command as JSON: [directory, whether it has the points at which faults can be planted
(see `fault_points`), environment variables, argument, …]. The answer is the process id of the child, which prints to
`console.txt` in its directory. When it has ended, its exit code is in the file `code` there.
"""

import gc
import importlib
import json
import os
import selectors
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker, util
from typing import Any, TextIO
from unittest import mock

STEP_GATE = "helpers.step_gate"
PRELOAD_AND_FREEZE, PRELOAD_COMMAND = "helpers.preload_and_freeze", "helpers.preload_command"


def main() -> None:
    sys.modules |= dict.fromkeys(("torch._C", "numpy"))  # type: ignore[arg-type]  # importing them fails
    importlib.import_module(PRELOAD_COMMAND)
    serve()


def fork_server(environment: dict[str, str]) -> tuple[TextIO, TextIO]:
    """Fork this process, which has imported everything, and has not used torch; return the server's input and output.

    The fork gets nothing of pytest: not its files, its capture of the output, or its hooks.
    """
    (theirs, commands), (answers, write_answers) = os.pipe(), os.pipe()
    if os.fork() != 0:
        os.close(theirs)
        os.close(write_answers)
        return open(commands, "w", encoding="utf-8"), open(answers, encoding="utf-8")
    try:
        os.dup2(theirs, 0)
        os.dup2(write_answers, 1)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        open_streams()
        sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
        warnings.simplefilter("error", ResourceWarning)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir("/")
        importlib.import_module(STEP_GATE)
        gc.freeze()
        serve(share_fork_server)
    finally:
        os._exit(0)


def open_streams() -> None:
    """Replace the streams of a fork: those of pytest have numbers that files of the fork get, once they are closed."""
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, 1, errors=errors, closefd=False)
        for number, (mode, errors) in enumerate((("r", None), ("w", None), ("w", "backslashreplace")))
    )


def serve(before: Callable[[], None] = lambda: None) -> None:
    """Run each command in a child process; a test sends a command only after the previous one was answered."""
    answer_fd, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # discards what rank 0 prints in the children of the fork server
    before()
    selector = selectors.PollSelector()
    selector.register(0, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                selector.unregister(key.fd)
                os.close(key.fd)
                write_code(*key.data)
                continue
            if not (line := sys.stdin.readline()):
                return
            cwd, faults, variables, *arguments = json.loads(line)
            if (child := os.fork()) == 0:
                run(cwd, faults, variables, arguments)
            selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, cwd))
            os.write(answer_fd, b"%d\n" % child)


def share_fork_server() -> None:
    """Start the fork server, and keep commands from starting their own."""
    from runner.parallel.launch.processes import PRELOADED
    from runner.system.forkserver import start_server

    with fork_server_from_fork():
        start_server(*PRELOADED, STEP_GATE, PRELOAD_AND_FREEZE)
    nothing: Any = lambda: None  # noqa: E731
    forkserver.ensure_running = forkserver._forkserver.ensure_running = nothing  # type: ignore[attr-defined]


@contextmanager
def fork_server_from_fork() -> Iterator[None]:
    """A context in which multiprocessing starts its fork server by forking this process."""
    resource_tracker.ensure_running()
    original_spawn = util.spawnv_passfds
    with mock.patch.object(util, "spawnv_passfds", partial(fork_instead_of_spawn, original_spawn)):
        yield


def fork_instead_of_spawn(original_spawn: Any, path: bytes, words: list[str], descriptors: list[int]) -> int:
    """Fork this process instead of starting a new interpreter; a replacement for a function of multiprocessing."""
    if (child := os.fork()) != 0:
        return child
    try:
        util.spawnv_passfds = original_spawn
        forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]  # it was forked while held
        kept = sorted({0, 1, 2, *descriptors})
        for before, after in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(before + 1, after)
        open_streams()
        exec(words[-1])  # words are: python … -c PROGRAM
    finally:
        os._exit(0)


def write_code(child: int, cwd: str) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(FileNotFoundError):  # its directory may be gone
        with open(f"{cwd}/code.part", "w") as file:
            print(code, file=file)
        os.replace(f"{cwd}/code.part", f"{cwd}/code")


def run(cwd: str, faults: bool, variables: dict[str, str], arguments: list[str]) -> None:
    os.chdir(cwd)
    os.environ.update(variables)
    sys.path += [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored if the tests run under nohup
    console = os.open("console.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(console, stream)
    from runner.commands.train import main as command
    from runner.system.signals import run_main

    if faults:
        importlib.import_module("helpers.fault_points").install()
    sys.argv[:] = [os.path.join(os.environ["PYTHONPATH"].split(os.pathsep)[0], "runner", "__main__.py"), *arguments]
    code = run_main(command)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an interpreter with torch takes a second to exit


if __name__ == "__main__":
    main()
