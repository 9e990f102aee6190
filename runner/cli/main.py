"""The command: composes the config with Hydra, builds one run or those of a sweep, and launches them."""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if sys.path and sys.path[0] != ROOT and os.path.realpath(sys.path[0]) == os.path.realpath(os.curdir):
    del sys.path[0]  # `python -m` puts the working directory first: its models.py or secrets.py would shadow others

import traceback  # noqa: E402
from tempfile import TemporaryDirectory  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from runner.system.lazy_import import import_lazily  # noqa: E402

import_lazily("torch", "torchvision")

import hydra  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from hydra.errors import HydraException  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402

from runner import __version__  # noqa: E402
from runner.cli import arguments as command_line  # noqa: E402
from runner.cli.help import help_text  # noqa: E402
from runner.cli.hydra_errors import explain  # noqa: E402
from runner.config.errors import ConfigError  # noqa: E402
from runner.config.options import CONF  # noqa: E402
from runner.config.resolved import resolved  # noqa: E402
from runner.parallel.launch.cluster import external_rank_info  # noqa: E402

if TYPE_CHECKING:
    from runner.sweep.ledger import Sweep

DONE, CRASHED, REFUSED, DIVERGED, STOPPED, INTERRUPTED = 0, 1, 2, 3, 75, 130
CODES = {"done": DONE, "crashed": CRASHED, "diverged": DIVERGED, "stopped": STOPPED}
"""The exit code for each status of a result."""


def main() -> int:
    """Run the command line; returns the exit code."""
    code = DONE
    try:
        code = run_command(sys.argv[1:])
        print(end="", flush=True)
    except BrokenPipeError:  # standard output was closed, as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code


def run_command(arguments: list[str]) -> int:
    """Run the command with `arguments`; returns the exit code.

    Raises:
        BrokenPipeError: if standard output is closed.
    """
    if {"--help", "-h"} & set(arguments):
        print(help_text(command_line.flag_value(arguments, "--config-dir", "-cd")))
        return DONE
    if "--version" in arguments:
        print(f"runner {__version__}")
        return DONE
    try:
        codes = compose_and_run(arguments)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:  # a sweep that was asked to stop, and Hydra's usage errors
        return stop.code if stop.code in (DONE, STOPPED) else REFUSED
    except Exception as error:
        return report_error(error)
    return next((code for code in codes if code != DONE), DONE)


def report_error(error: Exception) -> int:
    """Print an error, with its traceback if it is unexpected; returns the exit code."""
    if isinstance(error, HydraException | OmegaConfBaseException):
        print(explain(error), file=sys.stderr)
    elif isinstance(error, ConfigError):
        print(error, file=sys.stderr)
    else:
        traceback.print_exception(error)
        return CRASHED
    return REFUSED


def compose_and_run(arguments: list[str]) -> list[int]:
    """Compose the config with Hydra, and call `job` once or, in a sweep, once per job; returns the exit codes."""
    arguments = command_line.overrides_first(arguments)
    is_sweep = bool({"-m", "--multirun"} & set(arguments))
    config_name = "config"
    if not is_sweep and (source := command_line.resumed(arguments)):
        from runner.cli.resumed import register_saved  # imported here: it needs the components

        config_name = register_saved(source, arguments)
    sys.argv[1:] = [command_line.quoted(argument, is_sweep) for argument in arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, and `report_error` explains them
    sweep = new_sweep(arguments) if is_sweep else None

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)
    def composed(config: DictConfig) -> None:
        try:
            codes.append(job(config, sweep))
        except Exception as error:  # not raised to Hydra, which would end the sweep
            codes.append(report_error(error))

    codes: list[int] = []
    with TemporaryDirectory(prefix="runner-") as scratch:
        OmegaConf.register_new_resolver("scratch", lambda: scratch, replace=True)
        try:
            composed()
        except (HydraException, OmegaConfBaseException, BrokenPipeError):
            raise
        except (ValueError, OSError) as error:  # errors that Hydra does not wrap
            raise HydraException(str(error)) from error
    if sweep is not None and codes:
        sweep.end()
        if is_first_process():
            print(f"\n{codes.count(DONE)} of {len(codes)} jobs done")
    return codes


def new_sweep(arguments: list[str]) -> Sweep:
    """Return the sweep of a command line."""
    from runner.sweep.ledger import Sweep  # imported here: a single run has no ledger

    return Sweep(argument for argument in arguments if not argument.startswith("-"))


def job(config: DictConfig, sweep: Sweep | None) -> int:
    """Run a single run or a job of a sweep; returns its exit code."""
    from runner.run import build_run  # imported here: --help and Hydra's own flags need no components

    settings = HydraConfig.get()
    plain = resolved(config)
    overrides = list(settings.overrides.task)
    if sweep is None:
        run = build_run(plain)
        from runner.cli.run_job import run_alone  # imported here: config errors are reported before torch is imported

        return CODES[run_alone(run, overrides).status]
    if is_first_process():
        print(f"\njob {settings.job.num}: {' '.join(overrides)}", file=sys.stderr)
    code = sweep_job(sweep, settings.job.num, plain, overrides)
    if code == STOPPED:
        raise SystemExit(STOPPED)  # the signal stops the whole sweep
    return code


def sweep_job(sweep: Sweep, number: int, config: dict[str, Any], overrides: list[str]) -> int:
    """Run one job of a sweep, unless it is already done, and record its exit code in the ledger."""
    from runner.run import build_run, config_hash

    directory, known = sweep.job_directory(config, number, overrides), config_hash(config)
    if (code := sweep.settled(directory.parent, number, known)) is not None:
        if is_first_process():
            print(f"already done: {os.path.relpath(directory)}", file=sys.stderr)
        return code
    entry: dict[str, Any] = {"overrides": overrides, "config_hash": known, "directory": directory.name, "error": ""}
    try:
        run = build_run(config)
        from runner.cli.run_job import run_in_sweep

        code = CODES[run_in_sweep(run, overrides, directory).status]
    except Exception as error:  # not raised to Hydra, which would end the sweep
        code, entry["error"] = report_error(error), str(error)
    sweep.record(directory.parent, number, **entry, code=code)
    return code


def is_first_process() -> bool:
    """Return whether this process prints: of those that torchrun or SLURM started, only rank 0 does."""
    rank_info = external_rank_info()
    return rank_info is None or rank_info.rank == 0
