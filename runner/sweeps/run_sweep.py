"""Runs a sweep: plans its jobs, and lets the scheduler run each job as a command, `python -m runner OVERRIDES`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING

from runner.analysis.sweep_summary import find_best, first_lines, write_summary
from runner.config.errors import ABSENT, ConfigError, check
from runner.config.experiment_file import experiment_command, experiment_file
from runner.config.options import groups_in_defaults
from runner.config.overrides import override_key, typed_path
from runner.config.schema import build
from runner.config.user_code import given, typed_files
from runner.parallel.launch.cluster import external_rank_info
from runner.storage.files import write_text
from runner.sweeps.display import Display
from runner.sweeps.ledger import OPTIONS, Ledger
from runner.sweeps.misfits import check_one_fits
from runner.sweeps.objectives import Objective, objectives_of
from runner.sweeps.scheduler import JobSource, Scheduler
from runner.sweeps.search_space import Space
from runner.sweeps.sweep_jobs import Planner, SweepJobs
from runner.system.console import CRASHED, DIVERGED, DONE, REFUSED, STOPPED
from runner.system.forkserver import run_in_child
from runner.system.import_path import is_installed
from runner.system.signals import StopRequest
from runner.tracking.base import Tracker
from runner.tracking.tensorboard import TensorBoard

if TYPE_CHECKING:
    from runner.sweeps.search import Search


def run_sweep(
    jobs: SweepJobs, typed: list[str], config_dir: str | None, preloaded: Sequence[str] = ()
) -> tuple[Path, list[int]]:
    """Run the jobs of a sweep; return its directory and their exit codes, after 75 if a signal stopped the sweep.

    In a search, the codes of failed jobs of earlier commands, which are not run again, are returned, too. If the search
    has found a best trial, diverged jobs count as successful: their exit code is replaced by 0.

    Args:
        jobs: the combinations of values in the sweep.
        typed: the overrides on the command line, and `config_dir` that of `--config-dir`.
        preloaded: modules that the jobs import, so that they may be imported for all jobs at once.

    Raises:
        ConfigError, HydraException, OmegaConfBaseException: if the sweep or its search is invalid, or no job can run.
        KeyboardInterrupt: if the user presses Ctrl-C after a stop signal; the jobs are killed.
        StorageError: if the ledger cannot be written.
    """
    remedy = "start the sweep by itself: parallel=ddp starts the processes of each job"
    check(external_rank_info() is None, "-m", ABSENT, "torchrun or SLURM has started several processes of it", remedy)
    engine = jobs.engine
    engine.prepare(*preloaded)
    planner = Planner(jobs, config_dir)
    check_one_fits(jobs, typed, config_dir)
    root = Path(planner.config["output_root"], "sweeps", planner.config["name"])
    is_compared = any(each is not None for each in (engine.search, engine.metric, engine.goal))
    objectives = objectives_of(engine, planner.best) if is_compared else []
    search = None if engine.search is None else _search(jobs, planner, objectives)
    resume, stop = str(planner.config["resume"]), StopRequest(prints=False)  # the scheduler prints a message
    with stop, Ledger([*jobs.listed, *typed], root, resume, search is not None) as ledger:
        planner.path = ledger.path
        if search is not None:
            if {CRASHED, REFUSED} & {job.get("code") for job in ledger.jobs.values()}:
                print("trials that failed are not tried again; a larger sweep.trials adds others", file=sys.stderr)
            search.open(ledger)
        grid = JobSource(starmap(planner.plan, enumerate(jobs)), len(jobs), objectives)
        source = grid if search is None else search
        ledger.num_jobs, ledger.complete = len(source), False
        ledger.metrics = {each.tag: each.goal for each in objectives if engine.metric is not None}
        print(f"{len(source):,} job{'s' * (len(source) != 1)}", file=sys.stderr)
        display = Display(len(source), jobs.swept)
        with engine.connect(len(source), ledger.path) as pool, closing(display):
            codes = Scheduler(source, pool, ledger, engine, display).run(stop)
        source.close()
        ledger.end(source.is_complete(len(ledger.settled_states)))
        display.summary()
        found = find_best(ledger.path)
        if search is not None:
            codes += [job["code"] for job in ledger.jobs.values() if job.get("code") in (CRASHED, REFUSED)]
            if search.best():
                codes = [DONE if code == DIVERGED else code for code in codes]  # trials that diverge are results, too
                _report_best(search, ledger.path, config_dir, jobs.common)
        elif found is not None:
            print(found)
        if found is not None:
            run_in_child(write_summary, ledger.path)  # it needs torch, which the server of the jobs has imported
            where = typed_path(ledger.path)
            print(f"look: tensorboard --logdir {where}\ncompare: python -m runner compare {where}")
            if is_installed("seaborn"):
                print(f"plot: python -m runner plot {where}")
    return ledger.path, [STOPPED, *codes] if stop.received else codes


def _search(jobs: SweepJobs, planner: Planner, objectives: list[Objective]) -> Search:
    from runner.sweeps.search import Search  # it imports Optuna, which is optional

    options = jobs.engine
    remedy = "'optimizer.lr=interval(0.01,1)'"
    check(bool(jobs.swept), "sweep.search", options.search, "no key has several values", remedy)
    if options.seeds > 1 and "seed" in jobs.swept:
        raise ConfigError("sweep.seeds", options.seeds, "seed is swept, too", "leave one of them out")
    backends = build(planner.config["tracking"], Tracker, "tracking").backends()
    if options.prune and not any(isinstance(backend, TensorBoard) for backend in backends):
        remedy = "tracking=tensorboard, or several: tracking=[tensorboard,csv]"
        raise ConfigError("sweep.prune", options.prune, "it needs the event files of TensorBoard", remedy)
    space = Space(jobs.dimensions, planner.has_key, groups_in_defaults())
    if options.search == "grid" and space.combinations is None:
        why = "a grid needs a list of values for each key"
        raise ConfigError("sweep.search", "grid", why, "list some values, or sweep.search=tpe")
    seed = int(planner.config["seed"]) if options.seeds > 1 else None
    return Search(space, options, objectives, seed, planner.plan)


def _report_best(search: Search, path: Path, config_dir: str | None, common: Sequence[str]) -> None:
    """Print the best trial of a search, or those on the front of several metrics, and write the overrides of each to an
    option file with which it can be run again.

    `common` are the overrides that say where the runs of the sweep are; the files do not have them.
    """
    seeds = f", the mean of {search.options.seeds} seeds" if search.options.seeds > 1 else ""
    folder, found, several = path / OPTIONS / "experiment", search.best(), len(search.objectives) > 1
    names = [f"front_{number}" if several else "best" for number in range(1, len(found) + 1)]
    lines = []
    for name, (overrides, values) in zip(names, found, strict=True):
        texts = (f"{value:.4f}" if abs(value) < 1e5 else f"{value:.0f}" for value in values)
        numbers = (f"{each.tag} {text}" for each, text in zip(search.objectives, texts, strict=True))
        lines.append(f"{name} {', '.join(numbers)}{seeds}: {shlex.join(overrides)}")
    print(first_lines(lines))
    with suppress(OSError):  # the lines above say it, too
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("front_*.yaml"):
            old.unlink()
        for name, line, (overrides, _) in zip(names, lines, found, strict=True):
            comment = f"{'On the front' if several else 'The best'} of {search.num_trials} trials: {line}"
            write_text(folder / f"{name}.yaml", experiment_file(overrides, [comment], config_dir))
        if given().objects:  # which no command can pass
            return
        where = [text for text in common if override_key(text) == "output_root"]
        where += [text for text in found[0][0] if typed_files([text])]  # no file chooses code
        command = experiment_command(str(path / OPTIONS), names[0], config_dir)
        print(" ".join(["run:", command, *map(shlex.quote, where)]))
