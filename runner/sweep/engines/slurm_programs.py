"""Calls of SLURM's programs: submitting jobs, which of them wait or run, how they ended, and canceling them."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_LISTED = re.compile(r"(?P<id>[0-9]+(_[0-9\[\],%-]+)?)\|(?P<name>.*)")

_NOT_FINAL = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "RESIZING", "SUSPENDED", "UNKNOWN")
"""States in sacct that do not show how a job ended: sacct is updated later than squeue."""

_MAX_REQUEUES = 10_000
_ANSWER_SECONDS = 60.0
_IDS_PER_CALL = 200


class SlurmError(Exception):
    """Raised when a SLURM program such as sbatch or squeue fails, or when its output cannot be parsed."""


def submit_array(folder: Path, tasks: Sequence[Callable[[], Any]], parameters: dict[str, Any]) -> list[str]:
    """Submit tasks as one job array, and return their SLURM job IDs.

    Args:
        folder: the folder for the files of submitit.
        tasks: the tasks, which submitit pickles.
        parameters: the options of sbatch, with the names that submitit uses.

    Raises:
        SlurmError: if sbatch fails, or its output cannot be parsed.
    """
    import submitit
    from submitit.helpers import clean_env

    executor: submitit.SlurmExecutor = submitit.SlurmExecutor(folder, max_num_timeout=_MAX_REQUEUES)
    executor.update_parameters(**parameters)
    inside_a_job = "SLURM_JOB_ID" in os.environ
    try:
        with clean_env() if inside_a_job else nullcontext(), redirect_stderr(StringIO()):
            return [job.job_id for job in executor.submit_array(tasks)]
    except Exception as error:  # submitit has several kinds, and the operating system its own
        why = " ".join(str(error).split()) or type(error).__name__
        raise SlurmError(f"sbatch has not accepted the jobs: {why}") from None


def queue(name: str, tries: int = 1) -> dict[str, str]:
    """Return a dict from handle to SLURM job ID, with all waiting and running jobs of the arrays called NAME-TOKEN.

    The handle of a job is the token of its array and its index in the array, as in `3f2a9c1b_5`.

    Raises:
        SlurmError: if squeue fails `tries` times, or its output cannot be parsed.
    """
    from submitit.slurm.slurm import read_job_id

    try:
        answer = _answer("squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i|%j")
    except SlurmError:
        if tries == 1:
            raise
        time.sleep(1)
        return queue(name, tries - 1)
    found = {}
    for line in answer.splitlines():
        match = _LISTED.fullmatch(line.strip())
        if match is None:
            raise SlurmError(f"squeue gave an answer that cannot be understood: {line[:80]!r}")
        array, _, token = match["name"].rpartition("-")
        if array != name:
            continue
        for main, *indices in read_job_id(match["id"]):
            first, last = (int(indices[0]), int(indices[-1])) if indices else (0, 0)
            for index in range(first, last + 1):
                found[f"{token}_{index}"] = f"{main}_{index}" if indices else main
    return found


def final_states(ids: list[str]) -> dict[str, str]:
    """Return the final states of the jobs in `ids` that have ended, by SLURM job ID; empty if sacct fails."""
    from submitit.slurm.slurm import SlurmInfoWatcher

    if not ids:
        return {}
    answer = ""
    main_ids = ",".join(sorted({job_id.partition("_")[0] for job_id in ids}))
    try:
        answer = _answer("sacct", "--format=JobID,State", "--parsable2", f"--jobs={main_ids}")
        found = SlurmInfoWatcher().read_info(answer)
        states = {job_id: found[job_id]["State"] for job_id in ids if job_id in found}
    except SlurmError as error:
        log.warning("%s; trying again", error)
        return {}
    except (KeyError, ValueError):  # the output is not a table
        log.warning("sacct gave an answer that cannot be understood: %r; trying again", answer[:80])
        return {}
    return {job_id: state for job_id, state in states.items() if state and not state.startswith(_NOT_FINAL)}


def cancel(ids: list[str], *flags: str) -> None:
    """Cancel, or signal, the jobs with these SLURM job IDs, as the flags of scancel say; jobs that have ended do not
    matter. Without IDs, nothing is called unless a flag selects jobs by their name.
    """
    named = any(flag.startswith("--name=") for flag in flags)
    for first in range(0, max(len(ids), named), _IDS_PER_CALL):
        with suppress(SlurmError):  # it also fails if one of the jobs has ended
            _answer("scancel", *flags, *ids[first : first + _IDS_PER_CALL])


def _answer(*words: str) -> str:
    """Run a SLURM program, and return its standard output; raise `SlurmError` if it fails or does not end in time."""
    variables = {k: value for k, value in os.environ.items() if not k.startswith("SQUEUE_")}  # they filter and format
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_SECONDS, env=variables, check=False
        )
    except OSError as error:
        raise SlurmError(f"{words[0]} cannot be run ({error.strerror})") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]} has not answered for {_ANSWER_SECONDS:.0f} s") from None
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise SlurmError(f"{words[0]} failed: {said or f'exit code {done.returncode}'}")
    return done.stdout.decode(errors="replace")
