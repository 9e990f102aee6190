"""Trains a run in the process of a program or a notebook, without changing the settings of this process."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from runner.api.caller_settings import settings_kept
from runner.api.composing import Config, compose
from runner.api.run_job import run_one
from runner.config.composition import Job
from runner.planning.auto_accumulation import with_accumulation
from runner.result import CrashedError, Result
from runner.run import build_run


def train(config: Config | Sequence[str] = ()) -> Result:
    """Train a run with `config`, and return the result.

    Depending on the parallel mode, the run trains in this process or in processes that it starts.

    As with the command, the run writes its directory, and logs to standard error. In the main thread, a stop signal
    (Ctrl-C, the stop button of a notebook) ends the training after the current step: the result then has the status
    `stopped`, and `train(["resume=DIRECTORY"])` continues the run. A second Ctrl-C raises `KeyboardInterrupt`.

    Args:
        config: a composed config, or the overrides of one: `["parallel=ddp", "optimizer.lr=0.1"]`.

    Returns:
        The result, whose status is `done`, `stopped` or `diverged`.

    Raises:
        ConfigError: if the config cannot run; no files are left behind.
        CrashedError: if the training crashed. Its `__cause__` is the error, and its `result` has the run directory.
    """
    composed = config if isinstance(config, Config) else compose(config)

    def again(overrides: Sequence[str]) -> Job:
        other = compose(overrides, config_dir=composed.config_dir)
        return Job(dict(other), list(other.overrides))

    with settings_kept():
        job = with_accumulation(Job(deepcopy(dict(composed)), list(composed.overrides)), again)
        result = run_one(build_run(job.config), job.overrides)
    if result.status == "crashed":
        raise CrashedError(result) from result.cause
    return result
