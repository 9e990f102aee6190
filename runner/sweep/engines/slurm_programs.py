"""Calls of SLURM's programs: which jobs wait, run or have ended, and canceling them."""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress

_LISTED = re.compile(r"(?P<id>[0-9]\S*?)\|(?P<name>.*)\|(?P<state>[A-Z_]+)")
"""A line of squeue, which also lists the user's other jobs."""

FINAL_STATES = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    "TIMEOUT",
)
"""States of jobs that have ended. squeue lists such jobs for some minutes (MinJobAge)."""

_ANSWER_SECONDS = 60.0
_IDS_PER_CALL = 200


class SlurmError(Exception):
    """Raised when a SLURM program such as sbatch or squeue fails, or when its output cannot be parsed."""


def queue(name: str) -> dict[str, tuple[int, str]]:
    """Return the number and the state of all jobs called NAME-NUMBER, by SLURM job ID.

    Raises:
        SlurmError: if squeue fails, or its output cannot be parsed.
    """
    found = {}
    flags = ("--noheader", "--states=all", f"--user={os.getuid()}", "--format=%i|%j|%T")
    for line in answer("squeue", *flags).splitlines():
        match = _LISTED.fullmatch(line.strip())
        if match is None:
            raise SlurmError(f"squeue gave an answer that cannot be understood: {line[:80]!r}")
        sweep, _, number = match["name"].rpartition("-")
        if sweep == name and number.isdecimal():
            found[match["id"]] = int(number), match["state"]
    return found


def cancel(ids: list[str], *flags: str) -> None:
    """Cancel, or signal, the jobs with these SLURM job IDs, as the flags of scancel say."""
    for first in range(0, len(ids), _IDS_PER_CALL):
        with suppress(SlurmError):  # it also fails if one of the jobs has ended
            answer("scancel", *flags, *ids[first : first + _IDS_PER_CALL])


def answer(*words: str) -> str:
    """Run a SLURM program, and return its standard output; raise `SlurmError` if it fails or does not end in time."""
    variables = {k: value for k, value in os.environ.items() if not k.startswith("SQUEUE_")}  # they filter and format
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_SECONDS, env=variables, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{words[0]} cannot be run: {error}") from None
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise SlurmError(f"{words[0]} failed: {said or f'exit code {done.returncode}'}")
    return done.stdout.decode(errors="replace")
