"""Launchers, which start the processes of a run, or join those that torchrun or SLURM has started."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from runner.config import packed_code
from runner.config.errors import ConfigError
from runner.parallel.collectives import Collectives, ProcessGroup
from runner.parallel.launch import process_group
from runner.parallel.launch.cluster import RankInfo
from runner.parallel.launch.supervisor import RankError, Report, Supervisor, report_of, start_heartbeat
from runner.parallel.session import Session
from runner.system.accelerator import properties
from runner.system.console import open_console
from runner.system.cpu import cores_per_process
from runner.system.forkserver import show_name, start_server
from runner.system.signals import StopRequest, before_training

log = logging.getLogger(__name__)

PRELOADED = ("torch", "torch._dynamo", "torch.distributed.tensor", "torch.utils.flop_counter", "runner.training")
"""Modules that every rank needs. The fork server imports them once, while this process reads the data."""


Train = Callable[[], Any]
TrainRank = Callable[[Collectives], Any]


class Launcher:
    """The base class of all launchers; by itself, it trains in the current process, on `devices`."""

    def __init__(self, devices: list[torch.device]):
        self.devices = devices

    @contextmanager
    def connect(self) -> Iterator[Collectives]:
        """Yield the collectives of this process, for the checks before training.

        If `launch` starts the ranks, they are those of rank 0, not yet connected to the others.
        """
        before_training()
        yield Collectives(self.devices)

    def launch(self, train: Train, train_rank: TrainRank, session: Session, directory: Path) -> Any:
        """Train, in this process or in ranks that are started, and return the result of rank 0 or of this process.

        Args:
            train: function that trains in this process; called by launchers that do not start the ranks.
            train_rank: picklable function of the collectives, called in each rank that a launcher starts.
            session: the session of this process.
            directory: the run directory, in which a started rank N > 0 writes its output to `log_rank_N.txt`.

        Raises:
            ConfigError: if torch or a rank rejects the config.
            RankError: if a rank that the launcher has started fails, dies or hangs.
        """
        return train()


class LocalProcesses(Launcher):
    """A launcher that starts one process for each of `devices`, with the options of `mode`, and trains in them."""

    def __init__(self, devices: list[torch.device], mode: Any):
        super().__init__(devices)
        self.mode = mode

    @contextmanager
    def connect(self) -> Iterator[Collectives]:
        before_training()
        start_server(*PRELOADED)
        yield Collectives(self.devices[:1], 0, len(self.devices))

    def launch(self, train: Train, train_rank: TrainRank, session: Session, directory: Path) -> Any:
        mode, count, restarts = self.mode, len(self.devices), 0
        work = partial(_run_rank, packed_code.packed(), train_rank, mode.collectives_class, mode.timeout, directory)
        with StopRequest() as stop:
            while True:
                shared_state, store = mode.allocate_shared_state(session), process_group.create_store()
                rank_infos = [RankInfo(rank, count, rank, count, store.host, store.port) for rank in range(count)]
                arguments = zip(rank_infos, self.devices, [shared_state] * count, strict=True)
                try:
                    with Supervisor(work, list(arguments), mode.timeout) as supervisor:
                        return supervisor.wait(stop)[0]
                except RankError as error:
                    if restarts == mode.max_restarts or stop.received:
                        raise
                    restarts += 1
                    which = f"restart {restarts} of {mode.max_restarts}"
                    log.warning("%s\n%sall ranks restart from the last checkpoint (%s)", error, error.trace, which)


class ExternalProcesses(Launcher):
    """A launcher that joins the other ranks, which torchrun or SLURM has started together with this process.

    `mode` is the `MultiProcess`, whose options it takes; `refusal` says why this process has no device.
    """

    def __init__(self, rank_info: RankInfo, device: torch.device, mode: Any, refusal: ConfigError | None = None):
        super().__init__([device])
        self.rank_info, self.mode, self.refusal = rank_info, mode, refusal

    @contextmanager
    def connect(self) -> Iterator[Collectives]:
        """Join the process group, and yield the collectives of this process.

        Raises:
            ConfigError: on every rank, if a rank has no device, the devices do not fit together, or not all ranks join.
        """
        timeout, count = self.mode.timeout, self.rank_info.world_size
        with StopRequest():  # from here on, the ranks stop only together, after a step that all of them reach
            if not torch.distributed.is_initialized():  # the runs of a process share one process group
                try:
                    init_rank(self.rank_info, self.devices[0], timeout, external=True)
                except torch.distributed.DistError as error:
                    why = f"of {count} processes, not all have come: {str(error).splitlines()[0]}"
                    remedy = "see what the others print, or wait longer"
                    raise ConfigError("parallel.timeout", timeout, why, remedy) from None
                atexit.register(process_group.destroy_process_group)
            collectives = self.mode.collectives_class(self.devices, timeout)
            devices = collectives.all_gather(collectives.on_all_ranks(self._device))
            if len({kind for kind, _ in devices}) > 1:
                kinds = ", ".join(kind for kind, _ in devices)
                raise ConfigError("device.kind", kinds, "the ranks have devices of several kinds", "device=cpu")
            if devices[0][1] and len(set(devices)) < count:  # with which NCCL would fail
                why = "several processes have the same GPU"
                remedy = "start one process per GPU; srun --gpus-per-task=1 gives each its own"
                raise ConfigError("parallel.processes", count, why, remedy)
            yield collectives
            collectives.finish()

    def _device(self) -> tuple[str, str]:
        if self.refusal is not None:
            raise self.refusal
        device = self.devices[0]
        return device.type, "" if device.type == "cpu" else str(getattr(properties(device), "uuid", ""))

    def launch(self, train: Train, train_rank: TrainRank, session: Session, directory: Path) -> Any:
        try:
            return train()
        except Exception as error:
            report = report_of(error)
            if self.rank_info.rank > 0 and report.what and not report.by_others:  # the command reports rank 0's error
                log.critical("rank %d %s\n%s", self.rank_info.rank, report.what, report.trace)
            assert isinstance(session.collectives, ProcessGroup)
            session.collectives.forget()
            # Pending messages must not reach the next run of this process, which initializes a new group.
            process_group.abort_process_group()
            raise


def init_rank(rank_info: RankInfo, device: torch.device, timeout: float, external: bool) -> None:
    """Set up this process as a rank: its GPU, its share of the CPU's threads, and the process group."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    os.environ["LOCAL_WORLD_SIZE"] = str(rank_info.local_world_size)  # for data workers: the ranks share the cores
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_per_process())
    process_group.init_process_group(rank_info, device.type, timeout, external)


def _run_rank(
    packed: bytes,
    train_rank: TrainRank,
    make_collectives: type[ProcessGroup],
    timeout: float,
    directory: Path,
    pipe: Connection,
    rank_info: RankInfo,
    device: torch.device,
    shared_state: Any,
) -> None:
    """Run a rank that `LocalProcesses` has started, from its first heartbeat to its report."""
    open_console()
    show_name(f"rank {rank_info.rank}")
    send = start_heartbeat(pipe, process_group.progress, process_group.fail_collectives)
    # Ctrl-C reaches all processes of a terminal, so a rank may stop before it receives the supervisor's signal. Threads
    # that were started during training do not block that signal: without a handler, it would kill the rank.
    with StopRequest():
        try:
            if rank_info.rank > 0:
                log_file = directory / f"log_rank_{rank_info.rank}.txt"
                file = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                for stream in (1, 2):  # only rank 0 prints to the console
                    os.dup2(file, stream)
                os.close(file)
            if device.type == "cuda":  # torch's flight recorder: if a collective times out, NCCL writes the last ones
                # https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
                os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
                os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
                os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(directory / "nccl_rank_"))
            packed_code.give_packed(packed)
            init_rank(rank_info, device, timeout, external=False)
            collectives = make_collectives([device], timeout, shared_state)
            result = train_rank(collectives)
            collectives.finish()
            process_group.destroy_process_group()
        except BaseException as error:
            send(report_of(error))
            sys.stderr.flush()
            os._exit(1)  # skips exit handlers, which could wait for processes that are gone
        send(Report(value=result))
