"""Several processes that are one run: started here, or joined where torchrun or SLURM started them."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from runner.config import ABSENT, check, check_range
from runner.device import Device
from runner.forkserver import start_server
from runner.parallel import group
from runner.parallel.base import Parallel
from runner.parallel.cluster import Place, outer_place
from runner.parallel.crew import Crew, RankError, Report, attend, report_of
from runner.processor import allowed_cores
from runner.signals import StopRequest
from runner.workloads.base import Sums

if TYPE_CHECKING:
    from runner.run import Result, Run

log = logging.getLogger(__name__)

_PRELOADED = ("torch", "torch._dynamo", "torch.distributed.tensor", "runner.train")
"""What a rank needs; the fork server imports it while this process reads the data."""


@dataclass
class Processes(Parallel):
    """What the modes of several processes have in common: ranks, their start and end, and sums over them.

    Args:
        processes: how many; `auto`: one a visible GPU, two on a CPU. Under torchrun or SLURM it is theirs to say.
        timeout: seconds that a process waits for the others before the run ends with an error.
        max_restarts: how often all are started again from the last checkpoint after one failed or died.
        port: where the processes of this machine meet; null: any free one.
    """

    processes: int | str = "auto"
    timeout: float = 300.0
    max_restarts: int = 0
    port: int | None = None

    def __post_init__(self) -> None:
        known = self.processes == "auto" or isinstance(self.processes, int)
        check(known, "processes", self.processes, "it is neither auto nor a whole number", "parallel.processes=2")
        if isinstance(self.processes, int):
            check_range(self, "processes", least=1, most=4096)
        check_range(self, "timeout", least=1, most=86_400)
        check_range(self, "max_restarts", least=0, most=1000)
        check_range(self, "port", least=1, most=65_535)
        self._place = outer_place()
        self._is_joined = self._place is not None
        self._count = self.processes if isinstance(self.processes, int) else 1
        self._question: tuple[torch.Tensor, Any] | None = None

    # -----------------------------------------------------------------------------------------------------------------
    # Who is who

    @property
    def rank(self) -> int:
        return self._place.rank if self._place else 0

    @property
    def world_size(self) -> int:
        return self._place.world_size if self._place else self._count

    @property
    def data_shard(self) -> tuple[int, int]:
        return (self.rank, self.world_size)

    def device(self, choice: Device) -> torch.device:
        """One GPU a process, or the CPU. `auto` takes no Metal device: its tensors cannot be sent."""
        kind = choice.kind if choice.kind != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
        why = "tensors of a Metal device cannot be sent between processes"
        check(kind != "mps", "kind", kind, why, "choose device=cpu, or parallel=single")
        if kind == "cpu":
            choice.check_unnumbered(kind)
            return torch.device("cpu")
        indices = self._gpus(choice)
        local_rank = self._place.local_rank if self._place else 0
        why = f"process {local_rank} of this machine would need another: one GPU a process"
        check(local_rank < len(indices), "indices", indices, why, f"start at most {len(indices)} processes a machine")
        return torch.device("cuda", indices[local_rank])

    def _gpus(self, choice: Device) -> list[int]:
        """The GPUs that the processes of this machine may use."""
        return [device.index for device in choice.resolve_all()]

    def prepare(self, device: torch.device, run: Run) -> None:
        if self._is_joined:
            asked, started = self.processes, self.world_size
            why = f"torchrun or SLURM started {started} processes"
            check(asked in ("auto", started), "processes", asked, why, "leave parallel.processes=auto")
        if self._place is not None:
            return
        gpus = len(self._gpus(run.device)) if device.type == "cuda" else None
        if self.processes == "auto":
            self._count = gpus or 2
        why = f"{gpus} GPUs may be used, and each process needs its own"
        check(gpus is None or self._count <= gpus, "processes", self._count, why, f"at most {gpus}, or device=cpu")
        start_server(*_PRELOADED)

    # -----------------------------------------------------------------------------------------------------------------
    # Start and end

    @contextmanager
    def joined(self, run: Run) -> Iterator[None]:
        if not self._is_joined:
            yield
            return
        assert self._place is not None
        if not torch.distributed.is_initialized():  # the jobs of a sweep go on with one group
            self.enter(self._place, None, run.device)
            atexit.register(group.part)
        self._check_equal(run.config)
        self.personalise(run)
        yield
        self._settle()

    def _check_equal(self, config: dict[str, Any]) -> None:
        """Refuse processes that were started with different configs, on each of them."""
        configs: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(configs, config)
        for rank, other in enumerate(configs):
            path, ours, theirs = first_difference(configs[0], other)
            why = f"rank 0 was started with {ours!r}, rank {rank} with {theirs!r}"
            check(not path, path, ABSENT, why, "start all processes with the same command")

    def on_rank_0(self, make: Callable[[], Any]) -> Any:
        if self._place is None:
            return make()
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = make()
            except Exception as error:
                outcome[1] = error
        torch.distributed.broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def launch(self, train: Callable[[Run], Result], run: Run) -> Result:
        if self._is_joined:
            return self._train_joined(train, run)
        with StopRequest() as stop:
            for restart in range(1, self.max_restarts + 2):
                try:
                    return self._start(train, run, stop)
                except RankError as error:
                    if restart > self.max_restarts or stop.received:
                        raise
                    again = f"all start again from the last checkpoint (restart {restart} of {self.max_restarts})"
                    log.warning("%s\n%s%s", error, error.trace, again)
        raise AssertionError("the last attempt returns or raises")

    def _train_joined(self, train: Callable[[Run], Result], run: Run) -> Result:
        """Train as one of the processes that another launcher started."""
        try:
            return train(run)
        except Exception as error:
            report = report_of(error)
            if self.rank > 0 and report.what and not report.by_others:  # rank 0's the command tells
                log.critical("rank %d %s\n%s", self.rank, report.what, report.trace)
            self._question = None
            group.hang_up()  # what is on its way in this group must not meet the next job of a sweep: it makes another
            raise

    def _start(self, train: Callable[[Run], Result], run: Run, stop: StopRequest) -> Result:
        count, common = self.world_size, self.common(run)
        store = group.store_here(self.port)
        places = [Place(rank, count, rank, count, group.HOST, store.port) for rank in range(count)]
        work = partial(_work, train, run.again, run.config, run.directory)
        with Crew(work, [(place, common) for place in places], self.timeout) as crew:
            return crew.wait(stop)[0]

    def common(self, run: Run) -> Any:
        """What all processes are handed beside the config."""
        return None

    def personalise(self, run: Run) -> None:
        """Change what of `run` is this process's own."""

    def enter(self, place: Place, common: Any, choice: Device) -> None:
        """Become the process at `place`, and meet the others."""
        self._place = place
        device = self.device(choice)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        os.environ["LOCAL_WORLD_SIZE"] = str(place.local_world_size)  # data workers share the machine's cores
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, allowed_cores() // place.local_world_size))
        group.meet(place, device, self.timeout)

    def leave(self) -> None:
        """Part from the others, who are leaving too."""
        self._settle()
        group.part()

    def _settle(self) -> None:
        """Hear the answer to the last question, whatever it is."""
        if self._question is not None:
            self._question[1].wait()
            self._question = None

    # -----------------------------------------------------------------------------------------------------------------
    # Together

    def reduce(self, sums: Sums) -> Sums:
        totals = {name: tensor.clone() for name, tensor in sums.items()}
        for total in totals.values():
            torch.distributed.all_reduce(total)
        return totals

    def average_buffers(self, model: torch.nn.Module) -> None:
        """Give every process the mean of all processes' floating-point buffers.

        A running mean moves by a share of each batch's mean, so that the mean over the processes is what one process
        would have that saw all their parts. Summed in float64: what is equal stays what it is, to the last bit.
        """
        for buffer in model.buffers():
            if buffer.is_floating_point():
                total = buffer.detach().double()
                torch.distributed.all_reduce(total)
                buffer.detach().copy_(total / self.world_size)

    def agree(self, flag: bool) -> bool:
        """The answer to the question before this one: it travels while a step computes, and holds none up."""
        ours = torch.tensor(int(flag))
        asked = torch.distributed.all_reduce(ours, torch.distributed.ReduceOp.MAX, async_op=True)
        (answer, answered), self._question = self._question or (torch.tensor(0), None), (ours, asked)
        if answered is not None:
            answered.wait()
        return bool(answer)

    def barrier(self) -> None:
        torch.distributed.all_reduce(torch.zeros(()))  # over gloo, whatever the device


# ---------------------------------------------------------------------------------------------------------------------
# In each process


def _work(
    train: Callable[[Run], Result],
    again: Callable[[dict[str, Any]], Run],
    config: dict[str, Any],
    directory: Path,
    pipe: Connection,
    place: Place,
    common: Any,
) -> None:
    """A rank's work from its start to its report."""
    report = attend(pipe)
    try:
        if place.rank > 0:
            _redirect(directory / f"log_rank_{place.rank}.txt")
        run = again(config)
        assert isinstance(run.parallel, Processes)
        run.directory = directory
        run.parallel.enter(place, common, run.device)
        run.parallel.personalise(run)
        run.prepare()
        result = train(run)
        run.parallel.leave()
    except BaseException as error:
        report(report_of(error))
        sys.stderr.flush()
        os._exit(1)  # nothing here may wait for processes that are gone
    report(Report(value=result))


def _redirect(path: Path) -> None:
    """What this process prints goes to a file: the console is rank 0's."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def first_difference(one: Any, other: Any, path: str = "") -> tuple[str, Any, Any]:
    """(key, its value in one, its value in the other) of the first difference of two configs; an empty key for none."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in (*one, *(key for key in other if key not in one)):
            found = first_difference(one.get(key), other.get(key), f"{path}.{key}" if path else key)
            if found[0]:
                return found
        return "", None, None
    return ("", None, None) if one == other else (path, one, other)
