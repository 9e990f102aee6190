"""Points of a run at which a test can plant a fault, and a record of the samples that the run trains on.

`install` wraps the file operations of a run and the parts of its training loop. A process that reaches a point, such as
`before fsync state.pt` or `after step`, adds it to `trace.txt` in its working directory, if there is such a file, and
does what `fault.json` says there (see `plant_fault` and `trigger_fault`), once, which the file `fired` marks.
The samples of each step are appended to `seen.txt` (see `fault_checks.assert_each_sample_once`), and the steps whose
checkpoints are committed to `saved.txt`.
"""

import functools
import hashlib
import json
import multiprocessing
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

INDEX_STRIDE = 1000
"""Until the training step, the training targets are `class + INDEX_STRIDE * (1 + index of the sample)`."""


class InjectedError(RuntimeError):
    pass


_counts: Counter[str] = Counter()


def process_role() -> str:
    """The role of this process in its run: `main` (the command), `rank 1`, or `worker`."""
    name = multiprocessing.current_process().name
    if name.startswith("rank "):
        return name
    if multiprocessing.parent_process() is not None:
        return "worker"
    return f"rank {os.environ['RANK']}" if "RANK" in os.environ else "main"


def reach_point(point: str) -> None:
    """Record that this process has reached `point`, and trigger the fault if one is planted there."""
    if os.path.exists("trace.txt"):
        _append("trace.txt", f"{process_role()}: {point}")
    _counts[point] += 1
    plan, here = _plan(), {"at": point, "process": process_role(), "count": _counts[point]}
    if here.items() <= plan.items():
        with suppress(FileExistsError):
            os.close(os.open("fired", os.O_CREAT | os.O_EXCL))
            trigger_fault(plan["do"])


@functools.cache
def _plan() -> dict[str, Any]:
    path = Path("fault.json")
    return json.loads(path.read_text()) if path.exists() else {}


def _new_process() -> None:
    _counts.clear()
    _plan.cache_clear()


def trigger_fault(what: str) -> None:
    """`kill all` or `stop all` processes of the run; `kill`, `stop`, `hang` or `raise` in this process.

    Anything else is the names of signals that are sent to the command, each when it has announced the one before.
    """
    from helpers.command import processes_in, wait_until

    here = os.getpid()
    if what in ("kill all", "stop all"):
        for pid in [*(pid for pid in processes_in(Path.cwd()) if pid != here), here]:
            os.kill(pid, signal.SIGKILL if what == "kill all" else signal.SIGSTOP)
    elif what in ("kill", "stop"):
        os.kill(here, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    elif what == "hang":
        time.sleep(3600)
    elif what == "raise":
        raise InjectedError("planted by a test")
    else:
        command = multiprocessing.parent_process()
        for number, name in enumerate(what.split()):
            wait_until(lambda number=number: not number or "finishing the step" in Path("console.txt").read_text())
            os.kill(command.pid if command and command.pid else here, signal.Signals[name])


def _append(name: str, line: str) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(file, f"{line}\n".encode())  # in one call: a killed process leaves no partial line
    finally:
        os.close(file)


def install() -> None:
    """Wrap functions of a run, in this process, all that are forked from it, and the ranks that it starts."""
    import runner.api.run_job
    import runner.training
    from runner.data.built_in import Digits
    from runner.data.memory import TensorSamples
    from runner.tracking.event_file import EventFile

    os.register_at_fork(after_in_child=_new_process)
    runner.api.run_job.train_rank = _train_rank
    os.fsync = _with_points(os.fsync, lambda file: f"fsync {_name(os.readlink(f'/proc/self/fd/{file}'))}")
    os.replace = _with_points(_and_commits(os.replace), lambda _, target, **__: f"rename {_name(os.fspath(target))}")
    for owner, name, point in (
        (runner.training, "prepare", "preparation"),
        (runner.training, "loop", "training"),
        (runner.training, "log_training", "log"),
        (runner.training, "evaluate", "evaluation"),
        (runner.training, "save", "save"),
        (EventFile, "add", "event"),
    ):
        setattr(owner, name, _with_points(getattr(owner, name), lambda *_, point=point, **__: point))
    runner.training.train_step = _record_samples(runner.training.train_step)
    Digits.load = _with_indices(Digits.load)
    TensorSamples.in_order = _with_point_per_batch(TensorSamples.in_order)


def _train_rank(*arguments: Any, **options: Any) -> Any:
    from runner.training import train_rank

    install()
    return train_rank(*arguments, **options)


def _with_points(function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        point = name(*arguments, **options)
        reach_point(f"before {point}")
        result = function(*arguments, **options)
        reach_point(f"after {point}")
        return result

    return wrapper


def _with_point_per_batch(in_order: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def batches(*arguments: Any, **options: Any) -> Iterator[Any]:
        for batch in in_order(*arguments, **options):
            reach_point("in evaluation")
            yield batch

    return batches


def _name(path: str) -> str:
    """The name of a file, normalized so that it is the same in each run and for each step."""
    if path == os.getcwd():
        return "cwd"
    name = os.path.basename(path)
    return "run" if re.match(r"\d{4}-\d\d-\d\d_", name) else re.sub(r"\d{4,}", "N", name)


def _and_commits(replace: Callable[..., None]) -> Callable[..., None]:
    def renamed(source: Any, target: Any, **options: Any) -> None:
        replace(source, target, **options)
        if committed := re.fullmatch(r"step_(\d{8})", os.path.basename(target)):
            _append("saved.txt", str(int(committed[1])))

    return renamed


def _record_samples(train_step: Callable[..., Any]) -> Callable[..., Any]:
    def noted(state: Any, batches: Any, step: Any, log_due: bool) -> Any:
        reach_point("before step")
        samples: list[str] = []
        result = train_step(state, _with_sample_ids(batches, samples), step, log_due)
        if samples:
            _append("seen.txt", json.dumps([process_role(), os.getpid(), step.number, step.local, samples]))
        reach_point("after step")
        return result

    return noted


def _with_sample_ids(batches: Iterator[Any], samples: list[str]) -> Iterator[Any]:
    """Yield the batches with their original targets; append the index of each sample, or a hash of its pixels."""
    for batch in batches:
        targets = getattr(batch, "targets", None)
        if targets is None:
            yield batch
        elif int(targets.max()) >= INDEX_STRIDE or int(targets.min()) >= INDEX_STRIDE:
            samples += [str(int(target) // INDEX_STRIDE - 1) for target in targets]
            yield batch._replace(targets=targets % INDEX_STRIDE)
        else:
            samples += [hashlib.sha1(image.contiguous().numpy().tobytes()).hexdigest()[:12] for image in batch.inputs]
            yield batch


def _with_indices(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(data: Any, *normalization: Any) -> Any:
        import torch

        train, held_out = load(data, *normalization)
        train.targets = train.targets + INDEX_STRIDE * (torch.arange(len(train)) + 1)
        return train, held_out

    return loaded


@contextmanager
def plant_fault(cwd: Path, at: str, process: str, count: int, do: str) -> Iterator[None]:
    (cwd / "fired").unlink(missing_ok=True)
    (cwd / "fault.json").write_text(json.dumps({"at": at, "process": process, "count": count, "do": do}))
    yield
    (cwd / "fault.json").unlink()
