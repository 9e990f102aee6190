"""A trial: a run that trains in processes of its own, a few steps at a time, and waits in between."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from functools import partial
from itertools import chain, repeat
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from runner.config import packed_code
from runner.config.errors import ConfigError
from runner.device import synchronize
from runner.failures import torch_refusals
from runner.parallel.collectives import Collectives
from runner.parallel.launch.supervisor import RankError
from runner.result import Result
from runner.run import build_run
from runner.system import memory, torch_errors
from runner.system.forkserver import become_command, start_server, without_main_module
from runner.training import prepare, step_function

BURST_SECONDS = 0.4
"""How long a burst should take, if a single step does not take longer."""

_PATIENT = 24 * 3600.0
"""The `parallel.timeout` of a trial in seconds: its ranks wait for each other while other trials train."""


class TrialError(Exception):
    """Raised when a trial cannot train, with the reason `why` in one line.

    `status` is `refused` if the config is refused, `dropped` if the trial takes longer than it may, otherwise
    `crashed`. `out_of_memory`: whether the trial needed more memory than there is.
    """

    def __init__(self, why: str, status: str = "crashed", out_of_memory: bool = False):
        super().__init__(why, status, out_of_memory)
        self.why, self.status, self.out_of_memory = why, status, out_of_memory

    def __str__(self) -> str:
        return self.why


class Burst(NamedTuple):
    """The mean seconds of an optimizer step in a burst, and the sum of the peak memory of all ranks, in bytes."""

    step_seconds: float
    memory_bytes: float


class Trial:
    """A run with a composed config that has started, in processes of its own, and has done its first step.

    Raises:
        TrialError: if the run is refused or fails, or if the start and the first step take longer than `seconds`.
    """

    def __init__(self, config: dict[str, Any], seconds: float):
        filters = filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"])
        with patch.dict(os.environ, PYTHONWARNINGS=",".join(filters)):  # it would tell of trials that are killed
            start_server("torch", "runner.planning.trial")
        config = config | {"resume": "never"}
        if "timeout" in config["parallel"]:
            config["parallel"] = config["parallel"] | {"timeout": _PATIENT}
        self._directory = tempfile.TemporaryDirectory(prefix="runner-trial-", ignore_cleanup_errors=True)
        self._connection, remote = Pipe()
        self._process = get_context("forkserver").Process(
            target=_run_trial, args=(config, self._directory.name, remote, packed_code.packed())
        )
        with without_main_module():
            self._process.start()  # once the server has imported torch, for which only the first trial waits
        began = time.perf_counter()
        remote.close()  # so that the connection is at its end once all processes of the trial have ended
        try:
            self._receive(seconds)
        except BaseException:
            self.close()
            raise
        self.startup_seconds = time.perf_counter() - began

    def burst(self, seconds: float) -> Burst:
        """Train without a pause for about `BURST_SECONDS`, judged by the burst before, and return what was measured.

        A burst has at most eight times as many iterations of the training loop as the one before it.

        Raises:
            TrialError: if the run fails, or the burst takes longer than `seconds`.
        """
        with contextlib.suppress(OSError):  # it has died: the reason is the next message
            self._connection.send(True)
        return Burst(*self._receive(seconds))

    def _receive(self, seconds: float) -> Any:
        """Return the next message of rank 0; raise the `TrialError` that it sends instead."""
        if not wait([self._connection], max(0.0, seconds)):
            raise TrialError(f"no step within {max(0.0, seconds):.0f} s", "dropped")
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(20.0)
            code = self._process.exitcode
            ending = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
            ending += " (out of memory?)" * (code == -signal.SIGKILL)
            raise _reason(ChildProcessError(f"its process ended: {ending}")) from None
        if isinstance(message, TrialError):
            raise message
        return message

    def close(self) -> None:
        """Kill all processes of the trial."""
        self._connection.close()
        if self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its ranks and data workers too
            with contextlib.suppress(ProcessLookupError):
                if self._process.exitcode is None:  # it has not yet begun a group of its own
                    self._process.kill()
        self._process.join()
        self._directory.cleanup()


def _run_trial(config: dict[str, Any], directory: str, connection: Connection, packed: bytes) -> None:
    """Train the run of `config` in this process, or in processes that the launcher of its parallel mode starts."""
    become_command()
    # A compiler that is killed leaves an incomplete file in torch's cache, with which all later runs would fail.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(directory, "compiled"))
    file = os.open(Path(directory, "log.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(file, stream)
    try:
        packed_code.give_packed(packed)
        run = build_run(config)
        launcher = run.parallel.launcher(run.device)
        with launcher.connect() as process:
            session = run.prepare(process)
            rank_main = partial(_train_rank, config, Path(directory), connection)
            launcher.launch(partial(rank_main, process), rank_main, session, Path(directory))
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(_reason(error))


def _reason(error: BaseException) -> TrialError:
    if isinstance(error, ConfigError):
        return TrialError(" ".join(str(error).split()), "refused")
    named = f"{type(error).__name__}: {error}".removesuffix(": ")
    text = str(error) if isinstance(error, RankError | ChildProcessError) else named
    return TrialError(text.strip().splitlines()[0], out_of_memory=torch_errors.is_out_of_memory(error))


def _train_rank(config: dict[str, Any], directory: Path, connection: Connection, process: Collectives) -> Result:
    """Train for one iteration, then for a burst at each message to rank 0, which sends what was measured."""
    run = build_run(config)
    session = run.prepare(process)
    with run.settings(session.device):
        state = prepare(run, session, directory)
        batches, take_step = session.batches(state.model, 0), step_function(state)
        state.modules.train()
        steps = chain.from_iterable(session.plan.steps(0, session.num_steps) for _ in repeat(None))

        def train(count: int) -> float:
            began = time.perf_counter()
            for _ in range(count):
                take_step(state, batches, next(steps), False)
            synchronize(*session.devices)
            session.collectives.barrier()
            return time.perf_counter() - began

        def next_count(count: int, seconds: float) -> int:
            try:
                connection.recv()
            except EOFError:  # the process that compares trials has ended
                return 0
            return min(8 * count, max(1, round(count * BURST_SECONDS / seconds)))

        count = 1
        while count:
            try:
                with torch_refusals(run):
                    seconds = train(count)
            except Exception as error:
                if torch_errors.is_out_of_memory(error):  # on this rank; the others will only miss it
                    connection.send(_reason(error))
                raise
            peaks = session.collectives.all_gather(memory.usage(session.device)["memory/peak"])
            if process.rank == 0:
                connection.send((seconds / count / session.plan.steps_per_round, sum(peaks)))
            count = session.collectives.from_rank_0(partial(next_count, count, seconds))
    return Result("done")
