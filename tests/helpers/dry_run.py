"""Run the command in this process up to the start of training."""

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from runner import training
from runner.api.run_job import trained, write_result
from runner.commands.train import main as run_command
from runner.parallel.session import Session
from runner.result import Result
from runner.run import Run
from runner.storage.checkpoints import Checkpoints
from runner.training import prepare, train_step


def run_up_to_training(*arguments: str, cwd: Path, train_one_step: bool = False) -> SimpleNamespace:
    """Run the command without training; return `code`, `console`, and `directory`, `checkpoint`, `result`, `state`."""
    seen: dict[str, Any] = {}

    def written(run: Run, directory: Path, result: Result) -> None:
        if "directory" not in seen:  # nothing was left to do
            seen["directory"], seen["result"] = directory, result
        write_result(run, directory, result)

    def instead(run: Run, session: Session, _: Any, directory: Path, begin: Callable[[], None], *__: Any) -> Result:
        seen["directory"] = directory
        if train_one_step:
            seen["state"] = state = prepare(run, session, directory)
            begin()
            if state.step < session.num_steps:
                batches = session.workload.batches(state.model, session.plan, state.step, session.device)
                train_step(state, batches, next(session.plan.steps(state.step, session.num_steps)), log_due=True)
        else:
            begin()
            seen["checkpoint"] = Checkpoints(directory, keep=2).latest()
        return Result("stopped")

    with mock.patch("runner.api.run_job.write_result", written):
        code, console = run_in_this_process(list(arguments), cwd, instead)
    found = {key: seen.get(key) for key in ("directory", "checkpoint", "result", "state")}
    return SimpleNamespace(code=code, console=console, **found)


def run_in_this_process(arguments: list[str], cwd: Path, trained: Callable[..., Result] = trained) -> tuple[int, str]:
    """Run the command in this process, training with `trained`; return its exit code and what it printed."""
    console = io.StringIO()
    with (
        globals_restored(),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(console),
        contextlib.redirect_stderr(console),
    ):
        with mock.patch("runner.api.run_job.trained", trained), mock.patch.object(sys, "argv", ["runner"]):
            code = run_command(arguments)
    return code, console.getvalue()


def disturbed_at(step: int, act: Callable[[Path], None]) -> Any:
    """Patch `train_step` so that it calls `act` with the run directory before step `step`."""
    original = training.train_step

    def train_step(state: Any, batches: Any, number: Any, log_due: bool) -> Any:
        if number.number == step:
            act(state.directory)
        return original(state, batches, number, log_due)

    return mock.patch("runner.training.train_step", train_step)


@contextlib.contextmanager
def globals_restored() -> Iterator[None]:
    """A context that restores logging and Hydra's global objects at its end."""
    root, config = logging.getLogger(), HydraConfig.instance().cfg
    handlers, level = list(root.handlers), root.level
    GlobalHydra.instance().clear()
    yield
    root.handlers[:], HydraConfig.instance().cfg = handlers, config
    root.setLevel(level)
