"""Named moments of a run, at which a fault may be planted; and a record of the samples that it trains on.

`install` wraps what a run does with its files and the parts of its training loop. A process that reaches a point, such
as `before fsync state.pt` or `after step`, reads in its working directory

- `fault.json`: {"at": the point, "process": `main` or `rank 1`, "count": the how-many-eth time, "do": see `act`};
- `trace.txt`: if it exists, a line is added for each point.

A fault happens once: `fired` marks that it has. To `seen.txt` go the samples of each step (see `read_seen`), and the
steps whose checkpoint is committed. All of it belongs to the tests: nothing in the package knows about it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INDEXED = 1000
"""The training targets are `class + INDEXED * index of the sample` on their way to the training step."""


class PlantedError(RuntimeError):
    """What a process raises where a test wants it to fail."""


# ---------------------------------------------------------------------------------------------------------------------
# Reaching a point


_counts: dict[str, int] = {}


def role() -> str:
    """What this process is in its run: `main` (the command), `rank 1`, or `worker`."""
    name = multiprocessing.current_process().name
    if name.startswith("rank "):
        return name
    if multiprocessing.parent_process() is not None:
        return "worker"
    return f"rank {os.environ['RANK']}" if "RANK" in os.environ else "main"


def reach(point: str) -> None:
    """Note that this process has come to `point`; if a fault is planted there, it happens."""
    if os.path.exists("trace.txt"):
        _append("trace.txt", f"{role()}: {point}")
    _counts[point] = _counts.get(point, 0) + 1
    plan = _plan()
    if (plan.get("at"), plan.get("process"), plan.get("count")) == (point, role(), _counts[point]) and _first():
        act(plan["do"])


@functools.cache
def _plan() -> dict[str, Any]:
    path = Path("fault.json")
    return json.loads(path.read_text()) if path.exists() else {}


def _first() -> bool:
    try:
        os.close(os.open("fired", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _new_process() -> None:
    _counts.clear()
    _plan.cache_clear()


def act(what: str) -> None:
    """Let a fault happen to this process, or to all of its run.

    Args:
        what: `kill all` (SIGKILL to every process of the run), `stop all` (SIGSTOP), `kill`, `stop` or `hang` (this
            process), `raise`, or the names of signals that the command receives, a second between them.
    """
    from helpers.command import processes_in

    here = os.getpid()
    if what in ("kill all", "stop all"):
        for pid in [*(pid for pid in processes_in(Path.cwd()) if pid != here), here]:
            os.kill(pid, signal.SIGKILL if what == "kill all" else signal.SIGSTOP)
    elif what in ("kill", "stop"):
        os.kill(here, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    elif what == "hang":
        time.sleep(3600)
    elif what == "raise":
        raise PlantedError("planted by a test")
    else:
        command = multiprocessing.parent_process()
        for number, name in enumerate(what.split()):
            time.sleep(1.0 if number else 0.0)
            os.kill(command.pid if command and command.pid else here, signal.Signals[name])


def _append(name: str, line: str) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(file, f"{line}\n".encode())  # at once: a killed process leaves no half line
    finally:
        os.close(file)


# ---------------------------------------------------------------------------------------------------------------------
# What is wrapped


def install() -> None:
    """Wrap the functions that are points, in this process and those forked from it."""
    import runner.state
    import runner.training
    from runner.data.digits import Digits
    from runner.data.memory import TensorSamples
    from runner.tracking.event_file import EventFile

    os.register_at_fork(after_in_child=_new_process)
    os.fsync = _wrapped(os.fsync, lambda file: f"fsync {_name(os.readlink(f'/proc/self/fd/{file}'))}")
    os.replace = _wrapped(_noting_commits(os.replace), lambda _, target, **__: f"rename {_name(os.fspath(target))}")
    for owner, name, point in (
        (runner.training, "prepare", "preparation"),
        (runner.training, "loop", "training"),
        (runner.training, "log_training", "log"),
        (runner.training, "evaluate", "evaluation"),
        (runner.state.State, "save", "save"),
        (EventFile, "add", "event"),
    ):
        setattr(owner, name, _wrapped(getattr(owner, name), lambda *_, point=point, **__: point))
    runner.training.train_step = _noting_samples(runner.training.train_step)
    Digits.load = _with_indices(Digits.load)
    TensorSamples.in_order = _reaching(TensorSamples.in_order, "in evaluation")


def _wrapped(function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        point = name(*arguments, **options)
        reach(f"before {point}")
        result = function(*arguments, **options)
        reach(f"after {point}")
        return result

    return wrapper


def _reaching(generate: Callable[..., Iterator[Any]], point: str) -> Callable[..., Iterator[Any]]:
    @functools.wraps(generate)
    def wrapper(*arguments: Any, **options: Any) -> Iterator[Any]:
        for item in generate(*arguments, **options):
            reach(point)
            yield item

    return wrapper


def _name(path: str) -> str:
    """The name of a file, the same one for each run and each step."""
    if path == os.getcwd():
        return "cwd"
    name = os.path.basename(path)
    return "run" if re.match(r"\d{4}-\d\d-\d\d_", name) else re.sub(r"\d{4,}", "N", name)


def _noting_commits(replace: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(replace)
    def renamed(source: Any, target: Any, **options: Any) -> None:
        replace(source, target, **options)
        if committed := re.fullmatch(r"step_(\d{8})", os.path.basename(target)):
            _append("seen.txt", f"saved {int(committed[1])}")

    return renamed


def _noting_samples(train_step: Callable[..., Any]) -> Callable[..., Any]:
    def noted(state: Any, batches: Any, step: Any, log_due: bool) -> Any:
        reach("before step")
        samples: list[str] = []
        result = train_step(state, _identified(batches, samples), step, log_due)
        if samples:
            _append("seen.txt", f"{role()} {os.getpid()} {step.number} {step.own} {','.join(samples)}")
        reach("after step")
        return result

    return noted


def _identified(batches: Iterator[Any], samples: list[str]) -> Iterator[Any]:
    """The batches as the training step knows them; `samples` gets what identifies each sample.

    That is its index, or a hash of its pixels, which differ from those of the others if they are not augmented.
    """
    for batch in batches:
        targets = getattr(batch, "targets", None)
        if targets is None:
            yield batch
        elif int(targets.max()) >= INDEXED or int(targets.min()) >= INDEXED:
            samples += [str(int(target) // INDEXED - 1) for target in targets]
            yield batch._replace(targets=targets % INDEXED)
        else:
            samples += [hashlib.sha1(image.contiguous().numpy().tobytes()).hexdigest()[:12] for image in batch.inputs]
            yield batch


def _with_indices(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(data: Any) -> Any:
        import torch

        train, held_out = load(data)
        train.targets = train.targets + INDEXED * (torch.arange(len(train)) + 1)
        return train, held_out

    return loaded


@contextmanager
def planted(cwd: Path, plan: dict[str, Any]) -> Iterator[None]:
    """A context in which a fault is planted for the commands in `cwd`."""
    (cwd / "fired").unlink(missing_ok=True)
    (cwd / "fault.json").write_text(json.dumps(plan))
    yield
    (cwd / "fault.json").unlink()
