"""A sweep: composes its jobs, and lets the scheduler run each as a command, `python -m runner OVERRIDES`."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from runner.cli.arguments import is_sweep_option, override_value
from runner.cli.composition import SweepJobs
from runner.cli.exit_codes import STOPPED, WIDTH, wrapped
from runner.cli.hydra_errors import explain
from runner.config.errors import ABSENT, ConfigError, check
from runner.config.options import chosen_groups
from runner.parallel.launch.cluster import external_rank_info
from runner.run import build_run, config_hash
from runner.storage.run_directory import job_name
from runner.sweep.display import Display, Table
from runner.sweep.engines.base import Demand
from runner.sweep.ledger import Ledger
from runner.sweep.scheduler import JobSource, PlannedJob, Scheduler, last_line
from runner.system.signals import StopRequest

REFUSALS = (ConfigError, HydraException, OmegaConfBaseException)
"""The errors of a config that cannot run."""

_FOR_ALL_JOBS = ("output_root", "resume", "sweep")
"""Keys and groups that cannot be swept over."""


def run_sweep(jobs: SweepJobs, typed: list[str], config_dir: str | None) -> list[int]:
    """Run the jobs of a sweep, and return their exit codes.

    Args:
        jobs: the jobs of the sweep.
        typed: the overrides of the command line.
        config_dir: the directory of `--config-dir`; None if the flag was not typed.

    Raises:
        ConfigError: if no job can run.
        SystemExit: with code 75, if a signal stopped the sweep.
    """
    started_elsewhere = external_rank_info() is not None
    remedy = "start the sweep by itself: parallel=ddp starts the processes of each job"
    check(not started_elsewhere, "-m", ABSENT, "torchrun or SLURM has started several processes of it", remedy)
    for key in jobs.swept:
        name = key.lstrip("+~").partition(".")[0]
        check(name not in _FOR_ALL_JOBS, key, ABSENT, "it is the same for all jobs of a sweep", "give it one value")
    engine = jobs.engine()
    grid = GridJobs(jobs, config_dir)
    print(f"{len(jobs):,} jobs", file=sys.stderr, flush=True)
    with StopSweep() as stop, Ledger(typed, grid.root, grid.resume) as ledger:
        grid.path = ledger.path
        terminal = sys.stderr.isatty()
        display = Table(len(jobs), jobs.swept, last_line) if terminal else Display(len(jobs), jobs.swept, WIDTH)
        with engine.connect(len(jobs), ledger.path) as pool:
            codes = Scheduler(grid, pool, ledger, engine, display).run(stop)
        ledger.end(len(jobs))
        display.summary()
    if stop.received:
        raise SystemExit(STOPPED)
    return codes


class StopSweep(StopRequest):
    """A context manager in which a stop signal lets the running jobs of a sweep save and exit."""

    def _begin(self, number: int) -> None:
        """Leave it to the scheduler to say what happens."""


class _Base(NamedTuple):
    """What jobs have in common whose config groups and devices are the same."""

    config: dict[str, Any]
    config_hash: str
    demand: Demand


class GridJobs(JobSource):
    """One job for each combination of the swept values.

    Only one job of each combination of config groups and devices is composed here, because that takes 50 ms. The
    command of each job composes its own config.

    Args:
        jobs: the combinations.
        config_dir: the directory of `--config-dir`; None if the flag was not typed.

    Raises:
        ConfigError: if the first job cannot run for a reason that all jobs share.
    """

    def __init__(self, jobs: SweepJobs, config_dir: str | None):
        self._jobs, self._flags = jobs, [] if config_dir is None else [f"--config-dir={config_dir}"]
        self._bases: dict[tuple[str, ...], _Base | str] = {}
        self._all: Iterator[tuple[int, list[str]]] = enumerate(jobs)
        self.path = Path()
        config = self._first_config()
        self.root = Path(config["output_root"], "sweeps", config["name"])
        self.resume = str(config["resume"])

    def __len__(self) -> int:
        return len(self._jobs)

    def next(self) -> PlannedJob | None:
        number, overrides = next(self._all, (-1, []))
        if number < 0:
            return None
        overrides = [text for text in overrides if not is_sweep_option(text)]
        directory = self.path / job_name(number, overrides, self._jobs.swept)
        base = self._base(number, overrides)
        if isinstance(base, str):
            return PlannedJob(number, overrides, [], directory, "", refusal=base)
        words = [text for text in overrides if override_value([text], "resume") is None]
        arguments = [*words, "resume=auto", f"--run-directory={directory}", *self._flags]
        known = hashlib.sha256(json.dumps([base.config_hash, words]).encode()).hexdigest()[:12]
        return PlannedJob(number, overrides, arguments, directory, known, base.demand)

    def _first_config(self) -> dict[str, Any]:
        """Return the config of a job that can run, or that fails only because of a swept value.

        Raises:
            ConfigError, HydraException, OmegaConfBaseException: if no job can run.
        """
        config, first = {}, None
        for overrides in self._jobs.samples():
            try:
                config = self._jobs.compose(0, overrides).config
                build_run(config)
                return config
            except REFUSALS as error:
                if isinstance(error, ConfigError) and error.key in self._jobs.swept:
                    return config  # another value of that key may be possible
                first = first or error
        assert first is not None
        raise first

    def _base(self, number: int, overrides: list[str]) -> _Base | str:
        """Return what a job has in common with others; the message of the error if its config cannot be composed."""
        key = tuple(text for text in overrides if _is_shared(text))
        if key not in self._bases:
            try:
                self._bases[key] = self._compose(number, overrides)
            except REFUSALS as error:
                return wrapped(explain(error))
        return self._bases[key]

    def _compose(self, number: int, overrides: list[str]) -> _Base:
        config = self._jobs.compose(number, overrides).config
        run = build_run(config)
        devices = run.parallel.launcher(run.device).devices
        gpus = len(devices) if devices[0].type == "cuda" else 0
        return _Base(config, config_hash(config), Demand(len(devices), gpus, run.device.threads))


def _is_shared(override: str) -> bool:
    """Return whether jobs with different values of this override must be composed separately."""
    key = override.lstrip("+~").partition("=")[0]
    return key.partition("@")[0] in chosen_groups() or key.startswith(("parallel.", "device."))
