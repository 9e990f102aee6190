"""Killing a group of processes, some of which may be compilers that `torch.compile` has started."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

_COMPILER = re.compile(
    r"(.*-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|cc1|cc1plus|as|collect2|ld|ld\.\w+|nvcc|ptxas)(-[\d.]+)?"
)
"""The names of programs that compile or link. Only their outputs are deleted: `sort -o` may write over its input."""


def kill_group(group: int) -> None:
    """Kill all processes of a process group, and delete the incomplete output files of the compilers among them.

    `torch.compile` keeps compiled code in a directory that all runs of the user share, and compilers write directly
    into it. An incomplete file in this directory would make every later run that needs it fail ("file too short").

    Args:
        group: the ID of the process group.

    Raises:
        ProcessLookupError: if there is no such group.
    """
    os.killpg(group, signal.SIGSTOP)  # while the processes are listed, they must neither start others nor finish a file
    try:
        incomplete = list(_compiler_outputs(group))
    finally:
        os.killpg(group, signal.SIGKILL)
    for path in incomplete:
        with suppress(OSError):
            path.unlink()


def _compiler_outputs(group: int) -> Iterator[Path]:
    """Yield the file after each argument `-o` of the compilers in the group `group`."""
    import psutil  # imported here, because only killing needs it

    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getpgid(process.pid) != group or not _COMPILER.fullmatch(process.name()):
                continue
            for flag, output in pairwise(process.cmdline()):
                if flag == "-o":
                    yield Path(process.cwd(), output)
