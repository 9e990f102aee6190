"""Runs a single run, from checking its config to writing its result, for the command and for `runner.train`."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from runner.config import user_code
from runner.config.errors import ConfigError, described
from runner.config.overrides import override_key, replaced, text_override, typed_path
from runner.parallel.launch.processes import Launcher
from runner.parallel.launch.supervisor import RankError, report_of
from runner.parallel.session import Session
from runner.result import CrashedError, Result
from runner.resume.starting_point import Claim, claimed_directory
from runner.run import Run, build_run, check_same_config, check_used, config_hash
from runner.storage import run_directory
from runner.storage.checkpoints import prune
from runner.storage.files import json_text, write_text
from runner.system import torch_errors
from runner.system.secrets import printable, redacted
from runner.system.signals import is_of_signal
from runner.tracking.log_file import LogFile
from runner.training import train, train_rank
from runner.verification.proof import prove

log = logging.getLogger(__name__)


def run_one(run: Run, overrides: list[str], directory: Path | None = None, print_end: bool = False) -> Result:
    """Check and train `run`, write `result.json`, and return the result, even if training crashed.

    Args:
        run: the run.
        overrides: the overrides that are already applied to the run's config; they are saved in the run directory.
        directory: where to train; None: in a new directory in `output_root`, or in the one that `resume` determines.
        print_end: whether to print what became of the run, and what to type next.

    Raises:
        ConfigError: if the config cannot run; no files are left behind.
    """
    root = Path(run.output_root) / run.name
    parent, name = (root, None) if directory is None else (directory.parent, directory.name)
    check_used(run, overrides)
    launcher = run.parallel.launcher(run.device)
    with launcher.connect() as collectives, ExitStack() as stack, LogFile(None, collectives.rank) as log_file:
        check_same_config(run.config, collectives)
        if None not in (run.steps, run.epochs) and {"steps", "epochs"} <= set(map(override_key, overrides)):
            log.warning("epochs has no effect: steps=%d says how long to train", run.steps)
        session = collectives.on_all_ranks(lambda: run.prepare(collectives))
        claims: list[Claim] = []  # on rank 0

        def claim() -> tuple[str, dict[str, Any] | None]:
            claims.append(stack.enter_context(claimed_directory(run, session, parent, name, overrides)))
            return str(claims[0].path), claims[0].result

        path, done = collectives.from_rank_0(claim)
        directory, begin = Path(path), claims[0].begin if claims else lambda: None
        known = run_directory.identity(directory)
        log_file.open(directory)
        if done is None:
            result = trained(run, session, launcher, directory, begin, overrides)
        else:
            result = Result(**done)
            why = result.stopped_by or "nothing is left to do (more: epochs=N or steps=N)"
            log.info("all %d steps are done: %s", result.steps, why)
        is_there = run_directory.identity(directory) == known  # otherwise, another run may be in its place
        result.directory = directory if is_there else None
        if session.rank == 0:
            if is_there:
                begin()  # if the run has crashed before: the result of the earlier session is kept
                write_result(run, directory, result)
            if print_end:
                print_summary(run, session, directory, result)
    return result


def trained(
    run: Run, session: Session, launcher: Launcher, directory: Path, begin: Callable[[], None], overrides: Sequence[str]
) -> Result:
    """Train a run, and return its result, even if training crashed; `begin` is that of `runner.training.train`."""
    known = config_hash(run.config)
    try:
        first = {"begin": begin, "prove": prove}
        rank_main = partial(train_rank, run.config, directory, **first)
        return launcher.launch(partial(train, run, session, directory, **first), rank_main, session, directory)
    except ConfigError:
        raise
    except RankError as failure:
        crashed = Result("crashed", run_directory.newest_step(directory), config_hash=known)
        result, error = failure.result or crashed, failure
        result.error = str(failure)
    except CrashedError as crash:
        result, error = crash.result, crash.__cause__ or crash
    except BaseException as early:  # before the first step of this session, or after its last one
        if is_of_signal(early):
            raise
        steps = run_directory.newest_step(directory)
        result, error = Result("crashed", steps, config_hash=known, error=described(early)), early
    trace = error.trace if isinstance(error, RankError) else report_of(error).trace
    print(printable(redacted(trace)), end="", file=sys.stderr)
    log.debug("crashed", exc_info=error)
    log.error("%s", result.error)
    result.cause = error
    if torch_errors.is_out_of_memory(error) and "SIGKILL" not in result.error:  # which need not be for lack of memory
        with suppress(Exception):  # the run has said what is wrong; this is only advice
            from runner.api.composing import compose
            from runner.planning.report import advice_when_out_of_memory

            for line in advice_when_out_of_memory(run, lambda w: build_run(dict(compose(replaced(overrides, *w))))):
                log.error("%s", line)
    return result


def write_result(run: Run, directory: Path, result: Result) -> None:
    """Write `result.json` to the run directory; if the run is done and `keep=0`, delete all checkpoints.

    If `result.json` cannot be written, print the reason, and make it the error of `result`, with the status `crashed`.
    """
    try:
        write_text(directory / run_directory.RESULT, json_text(result.as_dict()))
        if result.status == "done" and run.keep == 0:
            # After writing the result: a run killed in between must not start from step 0.
            prune(directory / "checkpoints", keep=0)
    except OSError as error:  # what is printed is all that remains
        why = f"{run_directory.RESULT} cannot be written: {error.strerror}"
        result.status, result.error = "crashed", why
        print(why, file=sys.stderr)


def print_summary(run: Run, session: Session, directory: Path, result: Result) -> None:
    """Print the summary of a run: its status, time and results, and what to type next."""
    steps = f"{result.steps}/{max(result.steps, session.num_steps)}"
    lines = [f"{result.status} after step {steps}" + (f", {result.seconds:.1f} s" if result.seconds else "")]
    lines[0] += f": {result.error}" if result.error and result.status != "crashed" else ""  # already printed
    lines[0] += f": {result.stopped_by}" if result.stopped_by else ""
    if best := result.best:
        lines.append(f"best {best['metric']} {best['value']:.4f} at step {best['step']}")
    if result.directory is not None:
        root = Path(run.output_root).resolve()
        where = typed_path(directory)
        lines.append(f"run: {where}")
        if result.status != "done":
            lines.append(f"log: {where}/log.txt")
            if any((directory / "checkpoints").glob("step_*")):
                other = f" optimizer.lr={run.optimizer.lr / 10:g}" if result.status == "diverged" else ""
                code = [shlex.quote(f"{group}={file.typed}") for group, file in user_code.given().files.items()]
                env = str((run.config.get("env") or {}).get("id"))
                code += [text_override("env.id", env)] if ":" in env else []  # it names a module to import
                lines.append(" ".join([f"resume: python -m runner resume={where}{other}", *code]))
        if any(directory.glob("events.out.tfevents.*")):  # other trackers write none
            logs = root if directory.is_relative_to(root) else directory
            lines.append(f"look: tensorboard --logdir {typed_path(logs)}")
    text = redacted(printable("\n".join(lines)))
    log.debug("%s", text)  # it may be impossible to print
    print(text, flush=True)
