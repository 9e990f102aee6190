"""`sweep.detach=true`: runs a sweep in the background, where it continues when the terminal is closed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from runner.config.errors import check
from runner.config.overrides import typed_path
from runner.sweep.console import message
from runner.sweep.ledger import CONSOLE
from runner.system.exit_codes import CRASHED, DONE
from runner.system.import_path import python_path

DETACHED = "--detached"
"""The flag whose value is the file descriptor of a pipe to the command that started this sweep in the background."""

OUTPUT = "sweep.txt"
"""The file in the folder `console` to which a detached sweep prints."""


def start_detached(arguments: list[str]) -> int:
    """Start a sweep in a background process with its own session, and wait until the jobs of the sweep can start.

    Until then, the output of the process, for example an error message, appears on this terminal.

    Args:
        arguments: the command-line arguments of the sweep.

    Returns:
        The exit code: 0 if the sweep has begun; otherwise, the exit code of the background process, or 1 if a signal
        killed it.
    """
    ready, announce = os.pipe()
    words = [sys.executable, "-m", "runner", *arguments, f"{DETACHED}={announce}"]
    process = subprocess.Popen(
        words, start_new_session=True, pass_fds=(announce,), stdin=subprocess.DEVNULL, env=os.environ | python_path()
    )
    os.close(announce)
    try:
        with os.fdopen(ready, encoding="utf-8") as file:
            path, _, begun = file.read().partition("\n")  # until the process closes it, or ends
    except BaseException:
        process.send_signal(signal.SIGTERM)
        raise
    if not begun:
        code = process.wait()
        if path:
            print(message(Path(path, CONSOLE, OUTPUT)), file=sys.stderr)
        return code if code >= 0 else CRASHED
    print(f"the sweep runs in the background, process {process.pid}: {os.path.relpath(path)}")
    print(f"look: python -m runner sweep {typed_path(Path(path))}", flush=True)
    process.returncode = DONE  # it outlives this process, which is no reason for a warning
    return DONE


class Background:
    """The pipe from a detached sweep to the process that started it.

    Args:
        descriptor: the file descriptor of the pipe, as a string, because it is passed on the command line.

    Raises:
        ConfigError: if `descriptor` is not the file descriptor of an open pipe.
    """

    def __init__(self, descriptor: str):
        is_pipe = False
        with suppress(ValueError, OSError):
            is_pipe = stat.S_ISFIFO(os.fstat(int(descriptor)).st_mode)
        check(is_pipe, DETACHED, descriptor, "only the command itself uses this flag", "sweep.detach=true")
        os.set_inheritable(int(descriptor), False)
        self._pipe = os.fdopen(int(descriptor), "w", encoding="utf-8")

    def leave_terminal(self, path: Path) -> None:
        """Redirect all further output of this process to a file in the sweep's directory.

        This method also sends the path of the sweep's directory to the command that started the sweep. If the sweep
        ends before it calls `announce_start`, the command that started it prints the last lines of the output file.

        Args:
            path: the directory of the sweep.
        """
        (path / CONSOLE).mkdir(exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(path / CONSOLE / OUTPUT, flags, 0o666)
        sys.stdout.flush()
        sys.stderr.flush()
        for stream in (1, 2):
            os.dup2(file, stream)
        os.close(file)
        self._pipe.write(f"{path}\n")

    def announce_start(self) -> None:
        """Tell the command that started this sweep that the jobs can start, so that the command returns."""
        self._pipe.write("begun")
        self._pipe.close()
