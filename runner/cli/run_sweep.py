"""Runs the jobs of a sweep one after another."""

from __future__ import annotations

import os
import sys
from functools import partial

from runner.cli.composition import SweepJobs
from runner.cli.exit_codes import CODES, DONE, REFUSED, STOPPED, WIDTH, is_first_process, report_error
from runner.config.errors import ConfigError, escaped
from runner.sweep.ledger import Sweep
from runner.system.secrets import redacted_values


def run_sweep(jobs: SweepJobs, typed: list[str]) -> list[int]:
    """Run the jobs of a sweep one after another, and return their exit codes.

    Args:
        jobs: the jobs of the sweep.
        typed: the overrides on the command line; they are recorded in the ledger.
    """
    if is_first_process():
        print(f"{len(jobs):,} jobs", file=sys.stderr)
    jobs.check()
    refusals, codes = Refusals(), []
    with Sweep(typed, jobs.swept) as sweep:
        for number, overrides in enumerate(jobs):
            codes.append(run_sweep_job(sweep, jobs, number, overrides, refusals))
            if codes[-1] == STOPPED:
                raise SystemExit(STOPPED)  # the signal stops the whole sweep
        sweep.end()
    if is_first_process():
        refusals.print_repeated()
        print(f"\n{codes.count(DONE)} of {len(codes)} jobs done")
    return codes


def run_sweep_job(sweep: Sweep, jobs: SweepJobs, number: int, overrides: list[str], refusals: Refusals) -> int:
    """Run one job of a sweep, record its exit code in the ledger, and return the exit code.

    A job that is already done or has diverged is not repeated; its recorded exit code is returned.

    Args:
        sweep: the sweep, which has the ledger.
        jobs: the jobs of the sweep.
        number: the number of the job, from 0.
        overrides: the overrides of the job.
        refusals: prints and records the error if the job fails.
    """
    from runner.run import build_run, config_hash  # imported here: a test replaces build_run

    title, record = _title(number, overrides), None
    try:
        job = jobs.compose(number, overrides)
        title = _title(number, job.overrides)
        directory, known = sweep.job_directory(job.config, number, job.overrides), config_hash(job.config)
        if (code := sweep.settled(directory.parent, number, known)) is not None:
            if is_first_process():
                print(f"{title}\nalready done: {os.path.relpath(directory)}", file=sys.stderr)
            return code
        entry = {"overrides": job.overrides, "config_hash": known, "directory": directory.name, "error": ""}
        record = partial(sweep.record, directory.parent, number, **entry)
        run = build_run(job.config)
        if is_first_process():
            print(title, file=sys.stderr)
            title = ""
        from runner.cli.run_job import run_in_sweep

        code = CODES[run_in_sweep(run, job.overrides, directory).status]
    except Exception as error:  # not raised, which would end the sweep
        code = refusals.report(number, title, error)
        if record is not None:
            record(error=str(error), code=code)
        return code
    record(code=code)
    return code


def _title(number: int, overrides: list[str]) -> str:
    line = escaped(f"job {number}: {' '.join(redacted_values(overrides))}").replace("\n", "\\n")
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


class Refusals:
    """A record of why jobs were refused, so that each reason is printed only once."""

    def __init__(self) -> None:
        self._jobs: dict[str, list[int]] = {}

    def report(self, number: int, title: str, error: Exception) -> int:
        """Print the error of a job unless an earlier job was refused for the same reason, and return the exit code.

        Args:
            number: the number of the job, from 0.
            title: the line to print above the error; empty if this line has already been printed.
            error: why the job failed.
        """
        if not isinstance(error, ConfigError):
            print(title, file=sys.stderr)
            return report_error(error)
        jobs = self._jobs.setdefault(f"{error.key}: {error.why}", [])
        jobs.append(number)
        if len(jobs) == 1:
            print(title, file=sys.stderr)
            return report_error(error)
        if not title:
            print(f"refused for the same reason as job {jobs[0]}", file=sys.stderr)
        return REFUSED

    def print_repeated(self) -> None:
        """Print, for each reason for which several jobs were refused, how many there were besides the first job."""
        for reason, (first, *others) in self._jobs.items():
            if others:
                key, count = reason.partition(":")[0], f"{len(others):,} more job{'s' * (len(others) > 1)}"
                print(f"{key}: {count} refused for the same reason as job {first}", file=sys.stderr)
