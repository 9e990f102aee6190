"""Replaces `accumulation=auto` by a number of micro-batches with which the run fits into memory, before it begins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from runner.config.composition import Job
from runner.config.errors import ConfigError
from runner.config.overrides import override_key
from runner.parallel.launch.cluster import external_world_size
from runner.planning.auto_accumulation import fitting_accumulation
from runner.planning.trial import TrialError
from runner.resume.changed_options import differences
from runner.run import build_run
from runner.storage.run_directory import read_result, readable_entries
from runner.storage.saved_config import UnreadableConfigError
from runner.storage.saved_run import saved_config


def with_accumulation(job: Job, compose: Callable[[Sequence[str]], Job], directory: Path | None = None) -> Job:
    """Return `job` with a number of micro-batches in place of `accumulation=auto`; any other job is returned unchanged.

    If `resume=auto` continues a run, its number is used again, so that the resume is exact. As the run directory may
    come from somebody else, nothing but this number is taken from it.

    Args:
        job: the composed config, and the overrides from which it was composed.
        compose: function that composes the config from its overrides.
        directory: the value of the flag `--run-directory`, which every job of a sweep has; None if the flag is absent.

    Raises:
        ConfigError: if the config is refused, the run does not fit into memory with any number of micro-batches, or
            torchrun or SLURM has started several processes, each of which would choose by itself.
    """
    if job.config["accumulation"].get("steps") != "auto":
        return job
    if (started := external_world_size()) != 1:
        why = f"torchrun or SLURM has started {started} processes, each of which would choose by itself"
        remedy = "choose on one machine first (python -m runner plan), and type the number"
        raise ConfigError("accumulation", "auto", why, remedy)
    typed = [text for text in job.overrides if override_key(text) != "accumulation"]

    def divided(count: object) -> Job:
        return compose([*typed, "accumulation=1", f"accumulation.steps={count}"])

    for path in _unfinished(job, directory) if job.config["resume"] == "auto" else []:
        refused = (UnreadableConfigError, ConfigError, HydraException, OmegaConfBaseException)
        with suppress(*refused, KeyError, TypeError):
            saved = saved_config(path).values
            steps = saved["accumulation"]["steps"]
            if type(steps) is int and not differences(saved, job.config):
                continued = divided(steps)
                build_run(continued.config)
                return continued
    try:
        return divided(fitting_accumulation(lambda count: build_run(divided(count).config), _say))
    except TrialError as error:
        raise ConfigError("accumulation", "auto", error.why, "accumulation=1 shows the error in full") from None


def _unfinished(job: Job, directory: Path | None) -> list[Path]:
    """Return the directories of the runs that `job` may continue, the newest first."""
    if directory is not None:
        return [directory]
    paths = reversed(readable_entries(Path(job.config["output_root"], job.config["name"])))
    return [path for path in paths if read_result(path).get("status") != "done"]


def _say(line: str) -> None:
    print(f"accumulation=auto: {line}", file=sys.stderr, flush=True)
