"""The command `python -m runner`: it composes the config with Hydra, and runs a single run or a sweep."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from runner.system.lazy_import import import_lazily

import_lazily("torch", "torchvision")

from runner.cli import arguments as command_line  # noqa: E402
from runner.cli.messages import report_error  # noqa: E402
from runner.commands.help import help_text  # noqa: E402
from runner.config.errors import ABSENT, check  # noqa: E402
from runner.system.console import output_code  # noqa: E402
from runner.system.exit_codes import DONE, INTERRUPTED, REFUSED, STOPPED  # noqa: E402
from runner.system.signals import CommandSignals  # noqa: E402
from runner.system.version import __version__  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from runner.cli.composition import Job


def main() -> int:
    """Run the command line, and return the exit code."""
    with CommandSignals():
        return run_command(sys.argv[1:])


def run_command(arguments: list[str]) -> int:
    """Run the command with `arguments`, and return the exit code."""
    if {"--help", "-h"} & set(arguments):
        print(help_text(command_line.flag_value(arguments, "--config-dir", "-cd")))
        return output_code()
    if "--version" in arguments:
        print(f"runner {__version__}")
        return output_code()
    try:
        codes = compose_and_run(arguments)
        printed = output_code()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:  # a stop signal before training, or during a sweep
        return stop.code if stop.code in (DONE, STOPPED) else REFUSED
    except Exception as error:
        return report_error(error)
    return next((code for code in codes if code != DONE), DONE) if codes else printed


def compose_and_run(arguments: list[str]) -> list[int]:
    """Compose the config, run a single run or a sweep, and return the exit code of each run.

    If a flag only asks for information, print this information and return an empty list.

    Raises:
        ConfigError, HydraException, OmegaConfBaseException: if the command line or the config is invalid.
        SystemExit: with code 75, if a signal stopped a sweep.
        StorageError: if the ledger of a sweep cannot be written.
    """
    typed, is_sweep = arguments, bool({"-m", "--multirun"} & set(arguments))
    directory = command_line.run_directory(arguments, is_sweep)
    pipe = command_line.flag_value(arguments, command_line.DETACHED)
    for flag in (command_line.RUN_DIRECTORY, command_line.DETACHED):
        arguments = command_line.without_flag(arguments, flag)
    arguments = command_line.overrides_first(arguments)
    shows_model = command_line.SUMMARY in arguments
    arguments = [word for word in arguments if word != command_line.SUMMARY]
    from hydra._internal.utils import get_args_parser  # imported here: --help needs no Hydra

    from runner.api.composing import compose_run, composer_of
    from runner.cli.composition import Composer

    parser = get_args_parser()
    parser.error = command_line.refuse_usage  # type: ignore[method-assign]
    flags = parser.parse_args(arguments)
    check_flags(flags, shows_model)
    overrides = [command_line.quoted(word, is_sweep) for word in flags.overrides]
    composer = Composer(flags.config_dir) if is_sweep else composer_of(flags.overrides, flags.config_dir)
    if flags.cfg is not None:
        composer.show(overrides, flags)
    elif flags.hydra_help or flags.shell_completion or flags.info is not None:
        composer.answer(overrides, flags)
    elif is_sweep:
        from runner.cli.run_sweep import run_sweep  # imported here: a single run has no ledger
        from runner.cli.sweep_jobs import SweepJobs

        jobs = SweepJobs(composer, overrides)
        if jobs.engine.detach and pipe is None:
            from runner.cli.detached import start_detached

            return [start_detached(typed)]
        return run_sweep(jobs, flags.overrides, flags.config_dir, pipe)
    else:
        compose = partial(compose_run, composer)
        if shows_model:
            from runner.cli.model_table import print_model_table
            from runner.run import build_run

            print_model_table(build_run(compose(flags.overrides).config))
            return []
        return [run_single(compose(flags.overrides), compose, directory)]
    return []


def check_flags(flags: Namespace, shows_model: bool) -> None:
    """Check that the flags can be used together.

    Args:
        flags: Hydra's flags.
        shows_model: whether `--summary` was typed.

    Raises:
        ConfigError: if two flags ask for different things, or a flag has no effect without another flag.
    """
    what = {
        "--summary": shows_model,
        "--run": flags.run,
        "--multirun": flags.multirun,
        "--cfg": flags.cfg is not None,
        "--info": flags.info is not None,
        "--hydra-help": flags.hydra_help,
        "--shell-completion": flags.shell_completion,
    }
    given = [flag for flag, is_given in what.items() if is_given]
    check(len(given) <= 1, " ".join(given), ABSENT, "they ask for different things", "keep only one of them")
    for flag, is_given in {"--package": flags.package is not None, "--resolve": flags.resolve}.items():
        why = "it has an effect only with --cfg"
        check(not is_given or flags.cfg is not None, flag, ABSENT, why, "add --cfg job")


def run_single(job: Job, compose: Callable[[Sequence[str]], Job], directory: Path | None) -> int:
    """Run `job` as a single run, and return its exit code.

    Args:
        job: the composed config and its overrides.
        compose: function that composes a config from overrides.
        directory: the run directory; None: a new directory in `output_root`, or the directory that `resume` determines.

    Raises:
        ConfigError: if the config cannot run.
    """
    from runner.run import build_run  # imported here: --help and Hydra's own flags need no components

    run = build_run(job.config)
    if run.accumulation.steps == "auto":
        from runner.cli.auto_options import with_accumulation

        job = with_accumulation(job, compose, directory)
        run = build_run(job.config)
    if getattr(run.parallel, "in_processes", False):
        from runner.parallel.launch.processes import start_rank_server

        start_rank_server()
    # Imported here: config errors are reported before torch is imported.
    from runner.cli.run_job import print_summary, run_one

    return run_one(run, job.overrides, directory, print_summary).exit_code
