"""Persistent ranks: processes that train one run after another."""

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from helpers.command import TIMEOUT_SECONDS
from helpers.compose import train_in
from runner.parallel.launch import processes
from runner.parallel.launch.cluster import external_rank_info
from runner.run import build_run
from runner.system.forkserver import start_server
from runner.tracking.log_file import LogFile


class PersistentRanks:
    """`count` processes with the environment variables of torchrun, which say their rank and where the store is."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def start(self) -> None:
        start_server(*processes.PRELOADED)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.count):
            ours, theirs = multiprocessing.Pipe()
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            variables |= {"WORLD_SIZE": str(self.count), "LOCAL_WORLD_SIZE": str(self.count)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
            variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is in this process, not in rank 0
            context = multiprocessing.get_context("forkserver")
            process = context.Process(target=_serve, args=(theirs, variables), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def call_on_all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the result of `function(*arguments)` on each rank. After an error, the next call starts new ranks."""
        if not self.processes:
            self.start()
        answers: dict[Any, Any] = {}
        try:
            for pipe in self.pipes:
                pipe.send((function, arguments))
            while len(answers) < self.count:
                ready: list[Any] = connection.wait(
                    [each for each in self.pipes if each not in answers], TIMEOUT_SECONDS
                )
                if not ready:
                    raise TimeoutError(f"{len(answers)} of {self.count} ranks answered within {TIMEOUT_SECONDS:g} s")
                for pipe in ready:
                    answers[pipe], trouble = pipe.recv()
                    if trouble:
                        raise answers[pipe] from RuntimeError(trouble)
        except (EOFError, BrokenPipeError):
            ended = connection.wait([process.sentinel for process in self.processes], TIMEOUT_SECONDS)
            codes = {rank: each.exitcode for rank, each in enumerate(self.processes) if each.sentinel in ended}
            self.close()
            raise RuntimeError(f"ranks ended with these exit codes: {codes}") from None
        except BaseException:
            self.close()
            raise
        return [answers[pipe] for pipe in self.pipes]

    def train(self, config: dict[str, Any], directory: Path, change: Callable[..., Any] | None = None) -> Any:
        """Train the run of `config` in `directory`, and return rank 0's result; `change` gets each run and session."""
        directory.mkdir(exist_ok=True)
        return self.call_on_all(train_on_rank, config, directory, change)[0]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []


class ThisProcess(PersistentRanks):
    """The only process of a run: that of the tests."""

    def call_on_all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [function(*arguments)]

    def train(self, config: dict[str, Any], directory: Path, change: Callable[..., Any] | None = None) -> Any:
        return train_in(directory, build_run(config), change).result


Ranks = Callable[[int], PersistentRanks]
"""The fixture `ranks`: a function from a number of processes to the persistent ones of this session; 1 is this one."""


@contextmanager
def connected_session(config: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """A context that yields the run of `config` and its session in this process, connected to the other ranks."""
    run = build_run(config)
    with run.parallel.launcher(run.device).connect() as process:
        yield run, run.prepare(process)


def train_on_rank(config: dict[str, Any], directory: Path, change: Callable[..., Any] | None = None) -> Any:
    """Train a run in one of several processes, from its config to its result, as the command does."""
    rank_info = external_rank_info()
    with LogFile(directory, rank_info.rank if rank_info else 0):
        return train_in(directory, build_run(config), change).result


def _serve(pipe: Connection, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    gc.freeze()  # a run collects garbage before its first step, which would visit torch's million objects
    with tempfile.TemporaryFile() as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = function(*arguments), ""
        except Exception as error:
            answer = error, traceback.format_exc()
        pipe.send(answer)
