"""Plans the jobs of a sweep: their commands, their run directories, and the resources that they need."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from runner.config.errors import ConfigError, errors_under, wrapped
from runner.config.hydra_errors import explain
from runner.config.options import groups_in_defaults, option_files
from runner.config.overrides import override_key, override_value
from runner.config.schema import load_class
from runner.run import build_run, config_hash
from runner.storage.run_directory import job_name
from runner.sweep.engines.base import Demand, Job
from runner.sweep.ledger import console_file
from runner.sweep.sweep_jobs import SweepJobs
from runner.workloads.base import Workload

REFUSALS = (ConfigError, HydraException, OmegaConfBaseException)
"""The errors that are raised if a config cannot run."""


class Planner:
    """The planner of a sweep's `jobs`; `config_dir` is the value of the flag `--config-dir`.

    Composing a config takes 50 ms. Therefore, the planner composes only one config for all jobs with the same overrides
    of config groups and devices (`parallel.…`, `device.…`). Later, the command of each job composes the job's config.

    Attributes:
        config: the config of the first job that can run, or is refused because of a swept key, of which other values
            may be accepted.
        path: the directory of the sweep. It must be set before `plan` is called.

    Raises:
        ConfigError, HydraException, OmegaConfBaseException: if no job can run with any options of the swept groups, or
            one of these options does not exist.
    """

    def __init__(self, jobs: SweepJobs, config_dir: str | None):
        self._jobs, self._flags = jobs, [] if config_dir is None else [f"--config-dir={config_dir}"]
        self._check_options(*([] if config_dir is None else [Path(os.path.expanduser(config_dir))]))
        self._bases: dict[tuple[str, ...], tuple[str, Demand]] = {}
        self._configs: dict[tuple[str, ...], dict[str, Any] | None] = {}
        self.path = Path()
        self.config = self._first_config()

    @property
    def best(self) -> tuple[str, str]:
        """The metric, without the prefix `eval/`, and its goal (`min` or `max`) that select the best checkpoint."""
        with errors_under("workload"):
            return load_class((self.config.get("workload") or {}).get("_target_"), Workload).best

    def _check_options(self, *folders: Path) -> None:
        """Raise the error of an option that does not exist, before any job runs."""
        options = option_files(*folders)
        for words in (words for each in self._jobs.dimensions for words in each.choices):
            for word in words:
                key = override_key(word)
                if key in options and override_value([word], key) not in options[key]:
                    self._jobs.compose(0, [word])

    def plan(self, number: int, overrides: list[str]) -> Job:
        """Return the job with this number and these overrides. It has a `refusal` if its config cannot run."""
        directory, console = self.path / job_name(number, overrides, self._jobs.swept), console_file(self.path, number)
        base = self._base(number, overrides)
        if isinstance(base, str):
            return Job(number, [], console, overrides=overrides, directory=directory, refusal=base)
        config_hash, demand = base
        where = [word for word in self._jobs.common if override_value([word], "resume") is None]
        arguments = [*overrides, *where, "resume=auto", f"--run-directory={directory}", *self._flags]
        known = hashlib.sha256(json.dumps([config_hash, overrides]).encode()).hexdigest()[:12]
        about = {"overrides": overrides, "directory": directory, "config_hash": known}
        return Job(number, arguments, console, demand, **about)

    def has_key(self, groups: list[str], key: str) -> bool:
        """Return whether the config composed from overrides of groups has the dotted `key`; True if there is none."""
        words = tuple(groups)
        if words not in self._configs:
            self._configs[words] = None
            with suppress(*REFUSALS):
                self._configs[words] = self._jobs.compose(0, groups).config
        config: Any = self._configs[words]
        for name in () if config is None else key.split("."):
            if not isinstance(config, dict) or name not in config:
                return False
            config = config[name]
        return True

    def _first_config(self) -> dict[str, Any]:
        errors: dict[tuple[str, ...], Exception] = {}
        for overrides in self._jobs:
            key = _shared(overrides)
            if key in errors:
                continue
            try:
                config = self._jobs.compose(0, overrides).config
                try:
                    self._bases[key] = self._build(config)
                except ConfigError as error:
                    if error.key not in self._jobs.swept:  # otherwise, another value of that key may be possible
                        raise
                return config
            except REFUSALS as error:
                errors[key] = error
        raise next(iter(errors.values()))

    def _base(self, number: int, overrides: list[str]) -> tuple[str, Demand] | str:
        """Return what jobs with the same `_shared` overrides have in common: a hash of the first one's config, and what
        each of them needs. Return an error message if the config cannot run.
        """
        key = _shared(overrides)
        if key not in self._bases:
            try:
                self._bases[key] = self._build(self._jobs.compose(number, overrides).config)
            except REFUSALS as error:
                return wrapped(explain(error))
        return self._bases[key]

    def _build(self, config: dict[str, Any]) -> tuple[str, Demand]:
        run = build_run(config)
        threads = run.device.threads
        try:
            devices = run.parallel.launcher(run.device).devices
            demand = Demand(len(devices), len(devices) if devices[0].type == "cuda" else 0, threads)
        except ConfigError as error:
            is_device = error.key.startswith("device.")
            demand = self._jobs.engine.demand_elsewhere(threads) if is_device else None
            if demand is None:  # otherwise, this machine may only be the login node of a cluster
                raise
        return config_hash(config), demand


def _shared(overrides: list[str]) -> tuple[str, ...]:
    """Return the overrides of config groups and devices. Only these can change the resources that a job needs."""
    places, groups = ("parallel.", "device."), groups_in_defaults()
    keys = {text: override_key(text) for text in overrides}
    return tuple(text for text, key in keys.items() if key.partition("@")[0] in groups or key.startswith(places))
