"""Functions that ranks run in tests, mostly instead of `train_rank`."""

import gc
import math
import os
import resource
import signal
import threading
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from helpers.ranks import train_on_rank
from runner.batching import MicroBatch
from runner.parallel.collectives import Collectives
from runner.parallel.launch.cluster import RankInfo
from runner.parallel.launch.processes import init_rank
from runner.parallel.launch.supervisor import Report, start_heartbeat
from runner.parallel.session import Session
from runner.result import Result
from runner.run import Run, build_run
from runner.system.signals import StopRequest
from runner.tracking.log_file import LogFile
from runner.training import train


def sigterm_at(step: int, rank: int, run: Run, session: Session) -> None:
    """Send SIGTERM to `rank` at the end of `step`; −1 is the last rank."""

    def after_step(_: torch.nn.Module, now: int) -> None:
        if now == step and session.rank == rank % session.world_size:
            os.kill(os.getpid(), signal.SIGTERM)

    session.workload.after_step = after_step


def sigkill_at(step: int, run: Run, session: Session) -> None:
    """Kill this process at the end of `step`."""
    session.workload.after_step = lambda model, now: os.kill(os.getpid(), signal.SIGKILL) if now == step else None


def fail_at(rank: int, step: int, error: BaseException, run: Run, session: Session) -> None:
    if session.rank == rank:

        def after_step(_: torch.nn.Module, now: int) -> None:
            if now == step:
                raise error

        session.workload.after_step = after_step


def overflow_at(step: int, run: Run, session: Session) -> None:
    """Scale the loss, as `precision=16` does on CUDA, and make a gradient of the last layer overflow in `step`."""
    prepare, accumulate = run.precision.prepare, run.parallel.accumulate

    def scaling(device: torch.device) -> None:
        prepare(device)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
        run.precision._scaler = scaler  # pyright: ignore[reportAttributeAccessIssue]

    def overflowing(model: torch.nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> Any:
        sums = accumulate(model, batch, micro, log_due)
        if micro.start // run.batch_size == step - 1 and micro.is_last:
            for name, parameter in model.named_parameters():
                if name.endswith("head.fc.bias") and parameter.grad is not None:
                    parameter.grad.mul_(math.inf)
        return sums

    run.precision.prepare, run.parallel.accumulate = scaling, overflowing


def fail_in_evaluation(rank: int, run: Run, session: Session) -> None:
    if session.rank == rank:

        def evaluate(*_: Any) -> None:
            raise ZeroDivisionError("no samples")

        session.workload.evaluate = evaluate  # pyright: ignore[reportAttributeAccessIssue]


def limit_file_size(rank: int, num_bytes: int, run: Run, session: Session) -> None:
    """Limit the size of the files of `rank` to `num_bytes`, so that writing fails as on a full disk."""
    if session.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def layers_left(config: dict[str, Any], directory: Path) -> list[str]:
    """In a rank: train, and return the kinds of the layers that are still there when the run has ended."""
    left: list[weakref.ref[torch.nn.Module]] = []

    def keep_references(run: Run, session: Session) -> None:
        build = session.workload.build_model

        def built() -> torch.nn.Module:
            model = build()
            left.extend(weakref.ref(each) for each in model.modules())
            return model

        session.workload.build_model = built

    train_on_rank(config, directory, keep_references)
    gc.collect()
    assert left
    return [type(layer).__name__ for reference in left if (layer := reference()) is not None]


def train_with_change(
    change: Callable[[Run, Session], Any], config: dict[str, Any], directory: Path, process: Collectives, **_: Any
) -> Result:
    run = build_run(config)
    session = run.prepare(process)
    change(run, session)
    with LogFile(directory, process.rank):
        return train(run, session, directory)


def record_attempt_and_fail(config: dict[str, Any], directory: Path, process: Collectives, **_: Any) -> None:
    if process.rank == 1:
        with (directory / "attempts").open("a") as file:
            print(os.getpid(), file=file)
        raise RuntimeError("again")
    build_run(config).prepare(process).collectives.barrier()


def rank_infos(config: dict[str, Any], directory: Path, process: Collectives, **_: Any) -> list[dict[str, Any]]:
    """Return the environment variables and process group of each rank, and send SIGUSR1 to it after its training."""
    names = ("LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")
    own: dict[str, Any] = {name: os.environ.get(name) for name in names}
    own |= {"group": (torch.distributed.get_rank(), torch.distributed.get_world_size())}
    found = process.all_gather(own)
    done = threading.Event()
    with StopRequest():
        thread = threading.Thread(target=done.wait)
        thread.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    done.set()
    thread.join()
    return found


def report_num_threads(pipe: Connection, asked: str | None, config: dict[str, Any], rank_info: RankInfo) -> None:
    """Report the number of threads that operations use during training."""
    report = start_heartbeat(pipe)
    os.environ.pop("OMP_NUM_THREADS", None)
    if asked:
        os.environ["OMP_NUM_THREADS"] = asked
        torch.set_num_threads(int(asked))  # as torch does when it is imported
    cpu = torch.device("cpu")
    init_rank(rank_info, cpu, 60, external=False)
    with build_run(config).device.settings(cpu, deterministic=False):
        report(Report(value=torch.get_num_threads()))


def run_sweep_jobs(configs: list[dict[str, Any]], directory: Path) -> list[str]:
    """Run the jobs of a sweep as a rank of `torchrun`; return their statuses or errors. Rank 1 fails in the second."""
    found, groups = [], []
    for number, config in enumerate(configs):
        run, path = build_run(config), directory / str(number)
        path.mkdir(exist_ok=True)
        launcher = run.parallel.launcher(run.device)
        with launcher.connect() as process:
            session = run.prepare(process)
            if number == 1:
                groups.append(torch.distributed.group.WORLD)  # kept alive, as by a replica in a traceback
                fail_at(1, 5, ValueError("only here"), run, session)
            with LogFile(path, process.rank):
                try:
                    here = partial(train, run, session, path)
                    found.append(launcher.launch(here, fail_if_started, session, path).status)
                except Exception as error:
                    found.append(str(error.__cause__))
    return found


def fail_if_started(process: Collectives) -> None:
    raise AssertionError(f"{process} was started, where another launcher had started all")
