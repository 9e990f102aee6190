"""Plans the jobs of a sweep: their commands, their run directories, and the resources that they need."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from runner.config.errors import ConfigError, errors_under, wrapped
from runner.config.hydra_errors import explain
from runner.config.options import groups_in_defaults, option_files
from runner.config.overrides import override_key, override_value
from runner.config.schema import load_class
from runner.run import Run, build_run, config_hash
from runner.storage.run_directory import job_name
from runner.sweep.engines.base import Demand, Job
from runner.sweep.ledger import console_file
from runner.sweep.scheduler import JobSource
from runner.sweep.sweep_jobs import SweepJobs
from runner.workloads.base import Workload

REFUSALS = (ConfigError, HydraException, OmegaConfBaseException)
"""The errors that are raised if a config cannot run."""


class _Base(NamedTuple):
    """What jobs with the same overrides of config groups and devices share: a hash of the first one's config, and what
    each of them needs.
    """

    config_hash: str
    demand: Demand


class Planner:
    """The planner of a sweep's jobs.

    Composing a config takes 50 ms. Therefore, the planner composes only one config for all jobs with the same overrides
    of config groups and devices (`parallel.…`, `device.…`). Later, the command of each job composes the job's config.

    Args:
        jobs: the combinations of values in the sweep.
        config_dir: the directory of `--config-dir`; None if the flag was not typed.

    Attributes:
        config: the config of the first job in `jobs.samples()` that can run, or is refused because of a swept key, of
            which other values may be accepted.
        path: the directory of the sweep. It must be set before `plan` is called.

    Raises:
        ConfigError, HydraException, OmegaConfBaseException: if no job in `jobs.samples()` can run, or an option that is
            swept over does not exist.
    """

    def __init__(self, jobs: SweepJobs, config_dir: str | None):
        self._jobs, self._flags = jobs, [] if config_dir is None else [f"--config-dir={config_dir}"]
        self._check_options(*([] if config_dir is None else [Path(os.path.expanduser(config_dir))]))
        self._bases: dict[tuple[str, ...], _Base] = {}
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
        where = [word for word in self._jobs.common if override_value([word], "resume") is None]
        arguments = [*overrides, *where, "resume=auto", f"--run-directory={directory}", *self._flags]
        known = hashlib.sha256(json.dumps([base.config_hash, overrides]).encode()).hexdigest()[:12]
        where = {"overrides": overrides, "directory": directory, "config_hash": known}
        return Job(number, arguments, console, base.demand, **where)

    def has_key(self, groups: list[str], key: str) -> bool:
        """Return whether the config composed from overrides of groups has the dotted `key`; True if there is none."""
        if tuple(groups) not in self._configs:
            try:
                self._configs[tuple(groups)] = self._jobs.compose(0, groups).config
            except REFUSALS:
                self._configs[tuple(groups)] = None
        config: Any = self._configs[tuple(groups)]
        if config is None:
            return True
        for name in key.split("."):
            if not isinstance(config, dict) or name not in config:
                return False
            config = config[name]
        return True

    def _first_config(self) -> dict[str, Any]:
        first = None
        for overrides in self._jobs.samples():
            try:
                config = self._jobs.compose(0, overrides).config
            except REFUSALS as error:
                first = first or error
                continue
            try:
                self._bases[_shared(overrides)] = self._build(config)
                return config
            except REFUSALS as error:
                if isinstance(error, ConfigError) and error.key in self._jobs.swept:
                    return config  # another value of that key may be possible
                first = first or error
        assert first is not None
        raise first

    def _base(self, number: int, overrides: list[str]) -> _Base | str:
        """Return the `_Base` of a job, or an error message if the config cannot run."""
        key = _shared(overrides)
        if key not in self._bases:
            try:
                self._bases[key] = self._build(self._jobs.compose(number, overrides).config)
            except REFUSALS as error:
                return wrapped(explain(error))
        return self._bases[key]

    def _build(self, config: dict[str, Any]) -> _Base:
        return _Base(config_hash(config), self._demand(build_run(config)))

    def _demand(self, run: Run) -> Demand:
        threads = run.device.threads
        try:
            devices = run.parallel.launcher(run.device).devices
        except ConfigError as error:
            if not error.key.startswith("device."):
                raise
            demand = self._jobs.engine.demand_elsewhere(threads)  # the machine may only be the login node of a cluster
            if demand is None:
                raise
            return demand
        gpus = len(devices) if devices[0].type == "cuda" else 0
        return Demand(len(devices), gpus, threads)


class GridJobs(JobSource):
    """A job source with one job for each combination of the swept values."""

    def __init__(self, jobs: SweepJobs, planner: Planner):
        self._jobs, self._planner = jobs, planner
        self._all: Iterator[tuple[int, list[str]]] = enumerate(jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def next(self) -> Job | None:
        number, overrides = next(self._all, (-1, []))
        return None if number < 0 else self._planner.plan(number, overrides)


def _shared(overrides: list[str]) -> tuple[str, ...]:
    """Return the overrides of config groups and devices. Only these can change the resources that a job needs."""
    places, groups = ("parallel.", "device."), groups_in_defaults()
    keys = {text: override_key(text) for text in overrides}
    return tuple(text for text, key in keys.items() if key.partition("@")[0] in groups or key.startswith(places))
