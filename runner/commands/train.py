"""The command `python -m runner`: it composes the config with Hydra, and runs a single run or a sweep."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from runner.system.lazy_import import import_lazily

import_lazily("torch", "torchvision")

from runner.commands import COMMANDS  # noqa: E402
from runner.commands.arguments import Parser, command  # noqa: E402
from runner.commands.help import help_text  # noqa: E402
from runner.config.errors import ABSENT, check, did_you_mean  # noqa: E402
from runner.config.options import option_files  # noqa: E402
from runner.config.overrides import checked_path, quoted, resumed  # noqa: E402
from runner.system import __version__  # noqa: E402
from runner.system.console import CRASHED, DONE, STOPPED, output_code  # noqa: E402
from runner.system.turns import own_seat  # noqa: E402

RUN_DIRECTORY, JOB_NUMBER = "--run-directory", "--job-number"
"""The flags that set the run directory and `${hydra:job.num}`. The scheduler of a sweep passes them to the jobs."""


@command
def main(arguments: Sequence[str] | None) -> int:
    """Run the command with `arguments`, by default those of `sys.argv`, and return the exit code."""
    try:
        codes = _run(sys.argv[1:] if arguments is None else list(arguments))
    except SystemExit as stop:
        if stop.code == STOPPED:  # a stop signal before training
            return STOPPED
        traceback.print_exc()  # `sys.exit()` of a user's code
        return CRASHED
    printed = output_code()
    return next((code for code in codes if code != DONE), DONE) if codes else printed


def parser() -> Parser:
    parser = Parser("", None, overrides=True, add_help=False)
    for flag in (["--help", "-h"], ["--version"]):
        parser.add_argument(*flag, action="store_true")
    parser.add_argument(RUN_DIRECTORY, metavar="DIR")
    parser.add_argument(JOB_NUMBER, type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--stack", help=argparse.SUPPRESS)
    what = parser.add_mutually_exclusive_group()
    for flag in (["--multirun", "-m"], ["--summary"]):
        what.add_argument(*flag, action="store_true")
    what.add_argument("--cfg", "-c", choices=["job"])
    return parser


def _run(arguments: list[str]) -> list[int]:
    """Do what the command line asks for, and return the exit code of each run; empty if it is only information."""
    asks_for_help = bool({"--help", "-h"} & set(arguments))
    for word in arguments[: 0 if asks_for_help else 1]:
        is_override = word[:1] in ("-", "~") or "=" in word or word in option_files() or not word.isidentifier()
        check(is_override, word, ABSENT, "there is no such subcommand;", did_you_mean(word, COMMANDS))
    if asks_for_help:
        flags, words = parser().parse_known_args(arguments)
        print(help_text(flags.config_dir, words))
        return []
    options = parser().parsed(arguments)
    if options.version:
        print(f"runner {__version__}")
        return []
    if options.stack is not None:
        from runner.sweeps.engines.stack import StackFiles

        StackFiles.of(Path(options.stack)).run(main)
        return []
    directory = options.run_directory
    if directory is not None:
        check(directory != "", RUN_DIRECTORY, ABSENT, "it has no value", f"{RUN_DIRECTORY}=DIR")
        why, remedy = "a sweep chooses the directories of its jobs", "output_root=DIR says where the sweep is written"
        check(not options.multirun, RUN_DIRECTORY, directory, why, remedy)
        why, remedy = "resume=RUN continues in the directory of the run", "type resume=auto, or leave one out"
        check(resumed(options.overrides) is None, RUN_DIRECTORY, directory, why, remedy)
        directory = Path(os.path.abspath(checked_path(RUN_DIRECTORY, directory)))
    from runner.api.composing import JOB_MODULES, compose_run, composer_of
    from runner.config.composition import Composer

    if options.multirun:
        from runner.sweeps.run_sweep import run_sweep
        from runner.sweeps.sweep_jobs import SweepJobs

        jobs = SweepJobs(Composer(options.config_dir), [quoted(word, sweep=True) for word in options.overrides])
        return run_sweep(jobs, options.overrides, options.config_dir, JOB_MODULES)[1]
    composer = composer_of(options.overrides, options.config_dir, options.job_number)
    job = compose_run(composer, options.overrides)
    if options.cfg:
        from runner.storage.saved_run import config_yaml

        print(config_yaml(job.config), end="")
        return []
    from runner.run import build_run

    run = build_run(job.config)
    if options.summary:
        from runner.model.base import structure
        from runner.models.blocks import table_of

        run.workload.prepare()
        shape = run.workload.input_shape()
        why = f"{type(run.workload).__name__} does not say of what shape the inputs of its network are"
        check(shape is not None, "--summary", ABSENT, why, "leave it out, or define input_shape()")
        print(table_of(structure(run.workload.build_model), shape)[0])
        print(f"for one input of {'×'.join(map(str, shape or ()))}; FLOPs are those of a forward pass")
        return []
    if run.accumulation.steps == "auto":
        from runner.planning.auto_accumulation import resolve_auto_accumulation

        job = resolve_auto_accumulation(job, partial(compose_run, composer), directory)
        run = build_run(job.config)
    from runner.api.run_job import run_one

    if own_seat() is not None:  # it is computed together with others
        from runner.parallel.stack.member import StackMember

        run.parallel = StackMember()
    return [run_one(run, job.overrides, directory, print_end=True).exit_code]
