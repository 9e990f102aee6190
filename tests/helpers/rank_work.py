"""What ranks do in the tests in place of training as they are told; imported in each of them, and so of little."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from runner.parallel.context import Process
from runner.parallel.launch import process_group
from runner.parallel.launch.cluster import RankInfo, external_rank_info
from runner.parallel.launch.processes import init_rank
from runner.parallel.launch.supervisor import Report, start_heartbeat
from runner.run import Result, Session, build_run
from runner.system.signals import StopRequest
from runner.tracking.log_file import LogFile
from runner.training import train

# ---------------------------------------------------------------------------------------------------------------------
# Changes of a session, before it trains


def stop_at(step: int, rank: int, session: Session) -> None:
    """Send SIGTERM to `rank` at the end of `step`; −1: the last rank."""

    def after_step(_: torch.nn.Module, now: int) -> None:
        if now == step and session.rank == rank % session.context.world_size:
            os.kill(os.getpid(), signal.SIGTERM)

    session.run.workload.after_step = after_step


def fail_at(rank: int, step: int, error: BaseException, session: Session) -> None:
    """Raise `error` on `rank` after `step`."""
    if session.rank == rank:

        def after_step(_: torch.nn.Module, now: int) -> None:
            if now == step:
                raise error

        session.run.workload.after_step = after_step


def fail_in_evaluation(rank: int, session: Session) -> None:
    if session.rank == rank:

        def evaluate(*_: Any) -> None:
            raise ZeroDivisionError("no samples")

        session.run.workload.evaluate = evaluate  # pyright: ignore[reportAttributeAccessIssue]


def fail_at_once(rank: int, session: Session) -> None:
    if session.rank == rank:
        raise OSError(5, "Input/output error")


def full_disk(rank: int, num_bytes: int, session: Session) -> None:
    """No file of this rank may grow beyond `num_bytes`: to a program that is a full disk."""
    if session.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


# ---------------------------------------------------------------------------------------------------------------------
# In place of `runner.training.train_rank`


def train_changed(
    change: Callable[[Session], Any], config: dict[str, Any], directory: Path, process: Process
) -> Result:
    """Train as `train_rank` does, after a `change` of the session."""
    session = build_run(config).prepare(process)
    change(session)
    with LogFile(directory, process.rank_info.rank):
        return train(session, directory)


def count_and_fail(config: dict[str, Any], directory: Path, process: Process) -> None:
    """Note each attempt, and fail."""
    if process.rank_info.rank == 1:
        with (directory / "attempts").open("a") as file:
            print(os.getpid(), file=file)
        raise RuntimeError("again")
    build_run(config).prepare(process).collectives.barrier()


def stop_late(config: dict[str, Any], directory: Path, process: Process) -> int:
    """Receive a stop signal after training, while a thread that was started during training does not block it."""
    process.collectives.barrier()  # as in training: gloo fails on a rank that still connects while another one ends
    done = threading.Event()
    with StopRequest():
        thread = threading.Thread(target=done.wait)
        thread.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    done.set()
    thread.join()
    return process.rank_info.rank


def rank_infos(config: dict[str, Any], directory: Path, process: Process) -> list[dict[str, Any]]:
    """What each rank is told of itself."""
    names = ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    own = {name: os.environ.get(name) for name in names} | {"rank_info": process.rank_info}
    own |= {"group": (torch.distributed.get_rank(), torch.distributed.get_world_size())}
    return process.collectives.all_gather(own)


# ---------------------------------------------------------------------------------------------------------------------
# In processes that are started in another way


def threads(pipe: Connection, asked: str | None, config: dict[str, Any], rank_info: RankInfo) -> None:
    """Report how many threads the operations of a rank use while it trains, where OMP_NUM_THREADS is `asked`."""
    report = start_heartbeat(pipe)
    os.environ.pop("OMP_NUM_THREADS", None)
    if asked:
        os.environ["OMP_NUM_THREADS"] = asked
        torch.set_num_threads(int(asked))  # as torch does at its import
    cpu = torch.device("cpu")
    init_rank(rank_info, cpu, 60, external=False)
    with build_run(config).device.settings(cpu, deterministic=False):
        report(Report(value=torch.get_num_threads()))


def jobs(configs: list[dict[str, Any]], directory: Path) -> list[str]:
    """The jobs of a sweep, one after another in processes that another launcher started; in the second, rank 1 fails.

    Returns:
        What became of each on this rank.
    """
    return [job(config, directory / str(number), fails=number == 1) for number, config in enumerate(configs)]


held: list[Any] = []


def job(config: dict[str, Any], directory: Path, fails: bool) -> str:
    run = build_run(config)
    directory.mkdir(exist_ok=True)
    launcher = run.parallel.launcher(run.device)
    with launcher.connect() as process:
        session = run.prepare(process)
        if fails:
            held.append(torch.distributed.group.WORLD)  # as a replica in a traceback may: nothing frees the group
            fail_at(1, 5, ValueError("only here"), session)
        with LogFile(directory, process.rank_info.rank):
            try:
                return launcher.launch(
                    partial(train, session, directory), unreachable, session.context, directory
                ).status
            except Exception as error:
                return str(error.__cause__)


def unreachable(process: Process) -> None:
    raise AssertionError(f"{process} was started, where another launcher had started all")


CPU = torch.device("cpu")


def info(rank: int, port: int) -> RankInfo:
    """One of two ranks of this machine."""
    return RankInfo(rank, 2, rank, 2, process_group.HOST, port)


def form_and_leave(pipe: Connection, rank: int, port: int) -> None:
    """Report the sum over both ranks, and whether there is a group at the end."""
    report = start_heartbeat(pipe)
    process_group.init_process_group(info(rank, port), CPU, 300, external=False)
    tensor = torch.tensor(float(rank + 1))
    torch.distributed.all_reduce(tensor)
    process_group.destroy_process_group()
    process_group.destroy_process_group()  # there is none any more
    report(Report(value=(float(tensor), torch.distributed.is_initialized())))


def abort_or_wait(pipe: Connection, rank: int, port: int) -> None:
    """Rank 0 aborts the group while rank 1 waits in a collective, which has an hour's time."""
    report = start_heartbeat(pipe)
    process_group.init_process_group(info(rank, port), CPU, 3600, external=False)
    torch.distributed.barrier()
    if rank == 0:
        held.append(torch.distributed.group.WORLD)
        process_group.abort_process_group()
        report(Report(value="aborted"))
        return
    try:
        torch.distributed.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        report(Report(value=type(error).__name__))


def form_three_groups() -> list[float]:
    """In processes that another launcher started: what is broadcast from rank 0 in one group after the other."""
    rank_info, received = external_rank_info(), []
    assert rank_info is not None
    for _ in range(3):
        process_group.init_process_group(rank_info, CPU, 300, external=True)
        tensor = torch.tensor(1.0 - rank_info.rank)
        torch.distributed.broadcast(tensor, 0)
        received.append(float(tensor))
        torch.distributed.barrier()
        process_group.abort_process_group()
    return received
