"""What the caller of a command gets: its exit code, and standard streams to which a failed write raises no exception.

The reader of a pipe may have left (`| head`), the disk of a file may be full, a stream may be closed, and its encoding
may lack a character. None of this may end a training or a sweep.
"""

from __future__ import annotations

import io
import os
import select
import sys
from typing import Any, TextIO

DONE, CRASHED, REFUSED, DIVERGED = 0, 1, 2, 3

STOPPED = 75
"""A stop signal arrived, or the time `stop.max_time` was up. A run that had begun is saved: the same command with
`resume=auto` continues it.

The number is that of `EX_TEMPFAIL` in sysexits.h, a temporary failure, so that a scheduler may start the command again.
"""

INTERRUPTED = 130
"""Ctrl-C was pressed before training began, or after an earlier stop signal: no further checkpoint was saved."""


class _Descriptor(io.FileIO):
    """A file descriptor. What cannot be written to it is discarded, and the reason is kept in `error`."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # another program has made the pipe non-blocking
                select.select([], [self.fileno()], [])
        except OSError as error:
            self.error = error
            return len(data)
        return written


_output: _Descriptor | None = None


def open_console() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that raise no exception if a write fails.

    Characters that the encoding lacks are printed as escape sequences, also by Python processes that this one starts. A
    closed descriptor is opened on /dev/null: the next file would get its number, and what native code prints.
    """
    global _output
    closed: dict[int, OSError] = {}
    for number in range(3):
        try:
            os.fstat(number)
        except OSError as error:
            closed[number] = error
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number: this one
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
    _output, errors = _Descriptor(1, "w", closefd=False), _Descriptor(2, "w", closefd=False)
    _output.error = closed.get(1)
    before: Any = sys.stdout
    by_line = before is not None and (before.line_buffering or before.write_through)  # as with `python -u`
    sys.stdout, sys.stderr = _text(_output, before, by_line), _text(errors, sys.stderr, True)
    os.environ["PYTHONIOENCODING"] = f"{sys.stdout.encoding}:backslashreplace"


def _text(stream: _Descriptor, before: TextIO | None, line_buffering: bool) -> TextIO:
    encoding = "utf-8" if before is None else before.encoding
    return io.TextIOWrapper(io.BufferedWriter(stream), encoding, "backslashreplace", line_buffering=line_buffering)


def output_code() -> int:
    """Return the exit code of a command whose result is what it prints: 1, after a message, if printing has failed.

    The code is 0 if the reader of a pipe has left, as after `| head`.
    """
    sys.stdout.flush()
    if _output is None or isinstance(_output.error, BrokenPipeError | None):
        return DONE
    print(f"standard output: it cannot be written ({_output.error.strerror})", file=sys.stderr)
    return CRASHED
