"""What goes wrong in one rank of a run, in the tests; imported in each of them, and so of little."""

from __future__ import annotations

import os
import resource
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from runner.session import session

from runner.parallel.launch.cluster import Place
from runner.parallel.launch.processes import Processes
from runner.parallel.launch.supervisor import Report, attend
from runner.run import Result, Run
from runner.tracking.log_file import LogFile


def fail(rank: int, step: int, error: BaseException, run: Run) -> Result:
    """The run, in which `rank` raises `error` after `step`."""
    if run.parallel.rank == rank:

        def after_step(_: torch.nn.Module, now: int) -> None:
            if now == step:
                raise error

        run.workload.after_step = after_step
    return session(run)


def fail_in_evaluation(rank: int, run: Run) -> Result:
    if run.parallel.rank == rank:

        def evaluate(*_: Any) -> None:
            raise ZeroDivisionError("no samples")

        run.workload.evaluate = evaluate  # pyright: ignore[reportAttributeAccessIssue]
    return session(run)


def fail_at_once(rank: int, run: Run) -> Result:
    if run.parallel.rank == rank:
        raise OSError(5, "Input/output error")
    return session(run)


def full_disk(rank: int, run: Run) -> Result:
    """No file of this rank may grow beyond a kilobyte: to a program that is a full disk."""
    if run.parallel.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    return session(run)


def count_and_fail(run: Run) -> Result:
    """Note each attempt, and fail."""
    if run.parallel.rank == 1:
        with (run.directory / "attempts").open("a") as file:
            print(os.getpid(), file=file)
        raise RuntimeError("again")
    return session(run)


def threads(pipe: Connection, asked: str | None, config: dict[str, Any], place: Place) -> None:
    """Report how many threads the operations of a rank use while it trains, where OMP_NUM_THREADS is `asked`."""
    report = attend(pipe)
    os.environ.pop("OMP_NUM_THREADS", None)
    if asked:
        os.environ["OMP_NUM_THREADS"] = asked
        torch.set_num_threads(int(asked))  # as torch does at its import
    run = Run.again(config)
    assert isinstance(run.parallel, Processes)
    run.parallel.enter(place, None, run.device)
    with run.device.settings(torch.device("cpu"), deterministic=False):
        report(Report(value=torch.get_num_threads()))


def places(run: Run) -> list[dict[str, Any]]:
    """Where each rank is."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    own = {name: os.environ.get(name) for name in names} | {"cwd": str(Path.cwd()), "rank": run.parallel.rank}
    everyone: list[dict[str, Any]] = [{}] * run.parallel.world_size
    torch.distributed.all_gather_object(everyone, own)
    return everyone


def jobs(configs: list[dict[str, Any]], directory: Path) -> list[str]:
    """The jobs of a sweep, one after another in processes that another launcher started; in the second, rank 1 fails.

    Returns:
        What became of each on this rank.
    """
    return [job(config, directory / str(number), fails=number == 1) for number, config in enumerate(configs)]


held: list[Any] = []


def job(config: dict[str, Any], directory: Path, fails: bool) -> str:
    run = Run.again(config)
    run.prepare()
    run.directory = directory
    directory.mkdir(exist_ok=True)
    with run.parallel.joined(run), LogFile(directory, run.parallel.rank):
        if fails:
            held.append(torch.distributed.group.WORLD)  # as a replica in a traceback may: nothing frees the group
        try:
            return run.parallel.launch(partial(fail, 1, 5, ValueError("only here")) if fails else session, run).status
        except Exception as error:
            return str(error.__cause__)
