"""Runs a sweep from a program or a notebook, and returns its runs as a table."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.analysis.saved_runs import MeasuredRun
from runner.api.composing import JOB_MODULES, check_list_of_texts, separate_hydra
from runner.api.execution import settings_kept
from runner.config import user_code
from runner.config.composition import Composer
from runner.config.errors import check
from runner.config.overrides import checked_override, override_key, override_value, quoted
from runner.storage.ledger_file import read_ledger
from runner.sweeps.engines.local import Local
from runner.sweeps.run_sweep import run_sweep
from runner.sweeps.sweep_jobs import SweepJobs
from runner.system.console import STOPPED

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)


def sweep(overrides: Sequence[str], *, config_dir: str | None = None, **code: Any) -> pd.DataFrame:
    """Run all combinations of the values in `overrides`, as `python -m runner -m` does, and return a table of the runs.

    Each job is a process; several run at once. A stop signal (Ctrl-C, the stop button of a notebook) lets the running
    jobs save; the table then has what there is, and `resume=auto` among the same overrides continues the sweep.

    Args:
        overrides: as of the command: `["optimizer.lr=0.1,0.01", "seed=0,1,2"]`.
        config_dir: a directory of options of your own.
        code: as in `runner.train`.

    Returns:
        A row for each job: the values of the swept keys, the `status`, the latest metrics and the throughput, the step
        time and the memory of the run by TensorBoard tag, the value of the metric that selects the best checkpoint
        (`best`), the `steps`, the `seconds`, and the `directory`, which is empty if the job was refused.

    Raises:
        ConfigError: if the sweep is invalid, or no job can run.
    """
    import pandas as pd

    words = [checked_override(word) for word in check_list_of_texts(overrides)]
    given = user_code.passed(words, **code)
    words = given.added_to(words)
    with settings_kept(), user_code.using(given), separate_hydra():
        jobs = SweepJobs(Composer(config_dir), [quoted(word, sweep=True) for word in words])
        why = "its jobs are commands on other machines, which objects of this process do not reach"
        is_local = not given.objects or isinstance(jobs.engine, Local)
        check(is_local, "sweep", type(jobs.engine).__name__.lower(), why, "sweep=local, or a file: workload=mine.py")
        path, codes = run_sweep(jobs, words, config_dir, JOB_MODULES)
    if STOPPED in codes[:1]:
        log.warning("the sweep was stopped: resume=auto among the same overrides continues it")
    entries = read_ledger(path).get("jobs", {}).values()  # a sweep leaves nothing behind if all jobs are refused
    check(bool(entries), "overrides", words, "no job can run, for the reasons that were printed", "change them")
    return pd.DataFrame([_row(path, entry, jobs.swept) for entry in entries])


def _row(sweep: Path, entry: dict[str, Any], swept: Sequence[str]) -> dict[str, Any]:
    run = MeasuredRun(sweep / entry.get("directory", ""))
    labels = run.labels if entry.get("directory") else {}
    typed = {override_key(word): override_value([word], override_key(word)) for word in entry.get("overrides", [])}
    directory = str(run.directory) if run.directory.is_dir() else ""
    about = {"steps": run.steps, "seconds": run.result.get("seconds"), "directory": directory}
    best = run.best[1] if run.best else None
    values = {key: labels.get(key, typed.get(key)) for key in swept}
    return {**values, "status": entry.get("state", ""), "best": best, **run.metrics, **about}
