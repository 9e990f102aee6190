"""Tests of runs whose data worker is killed or stopped, and of torchrun runs in which a rank is killed or fails."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.command import Command, processes_in, wait_until
from helpers.fault_checks import (
    ExternalResources,
    assert_each_sample_once,
    assert_newest_checkpoint_valid,
    assert_no_temporary_files,
    assert_one_value_per_step,
    run_results,
    steps_saved,
)
from helpers.fault_points import plant_fault
from helpers.faults import RUN_ALL_FAULTS, RUNS, SAMPLES, SAVE_EVERY, Fault, FaultCounter, FaultTrial, ReferenceRun
from helpers.runs import assert_bitwise_equal, free_port

# ---------------------------------------------------------------------------------------------------------------------
# Data workers


def strike_a_worker(cwd: Path, number: signal.Signals, steps: int) -> Callable[[Command], None]:
    """Return a function that sends a signal to the data worker of a run after `steps` more training steps."""

    def read() -> int:
        path = cwd / "seen.txt"
        return len(path.read_text().splitlines()) if path.exists() else 0

    before = read()

    def strike(command: Command) -> None:
        wait_until(lambda: command.command_exit_code is not None or read() >= before + steps)
        others = [pid for pid in processes_in(cwd) if pid != command.pid]
        command.signal_processes(number, *others)

    return strike


WORKER = {
    signal.SIGKILL: r"data worker \d+: it was killed by SIGKILL, perhaps because memory ran out",
    signal.SIGBUS: r"data worker \d+: it was killed by SIGBUS, most likely because shared memory ran out",
    signal.SIGSTOP: r"data workers \d+: no batch arrived within 5 s: a worker is stopped",
}


@pytest.mark.parametrize("number", [*WORKER] if RUN_ALL_FAULTS else [signal.SIGKILL])
def test_a_run_resumes_after_its_data_worker_died(number: signal.Signals, trial: Callable[..., FaultTrial]) -> None:
    run = trial("workers", "a data worker killed or stopped")
    for steps in (3, 12, 9) if RUN_ALL_FAULTS else (3,):
        fault = Fault(number.name, codes=(1,), console_pattern=WORKER[number], traceback=True)
        assert run.run_with_fault(fault, strike_a_worker(run.cwd, number, steps)), "the run was done before"
    run.run_with_faults(Fault("kill all", "after step", 9))


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that an external launcher started


class Launched:
    """Two ranks of one run, each of which is a separate command, as `torchrun` starts them."""

    def __init__(self, cwd: Path, count_fault: FaultCounter):
        cwd.mkdir(exist_ok=True)
        self.cwd, self.count_fault = cwd, count_fault
        self.hosts = [cwd / f"host_{rank}" for rank in (0, 1)]
        for host in self.hosts:
            host.mkdir()
        self.external_resources = [ExternalResources(host) for host in self.hosts]

    @property
    def directory(self) -> Path:
        [config] = self.cwd.glob("outputs/*/*/config.yaml")
        return config.parent

    def session(self, *arguments: str) -> list[tuple[int, str]]:
        """Start or resume the run, and return the exit code and console output of each rank."""
        begun = list(self.cwd.glob("outputs/*/*/config.yaml"))
        words = (f"resume={self.directory}",) if begun else (*RUNS["ddp"], f"output_root={self.cwd}/outputs")
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        common["MASTER_PORT"] = str(free_port())
        own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
        commands = [
            Command(host, *words, *arguments, kind="faults", **common, **variables)
            for host, variables in zip(self.hosts, own, strict=True)
        ]
        ended = [command.wait_for_all_processes() for command in commands]
        for each in self.external_resources:
            each.assert_released()
        return ended

    def strike(self, do: str, rank: int, at: str, count: int) -> list[tuple[int, str]]:
        with self.count_fault("a rank of torchrun killed or failing"):
            with plant_fault(self.hosts[rank], at, f"rank {rank}", count, do):
                ended = self.session()
            assert (self.hosts[rank] / "fired").exists(), ended
            for config in self.cwd.glob("outputs/*/*/config.yaml"):
                assert_newest_checkpoint_valid(config.parent, steps_saved(self.hosts[0]))
        return ended


FAULTS = [
    ("raise", 0, "before log", 1),
    ("kill", 1, "after step", 12),
    ("kill", 0, "after fsync model.safetensors", 1),
    ("raise", 1, "before fsync rank_1.pt.part", 1),
    ("kill", 1, "in evaluation", 1),
    ("kill", 0, "before preparation", 1),
]


def test_a_torchrun_run_resumes_after_its_ranks_died(
    tmp_path: Path, reference: Callable[[str], ReferenceRun], count_fault: FaultCounter
) -> None:
    """If one of the two ranks is killed or fails, the other rank waits for it in vain, and ends with exit code 1."""
    launched = Launched(tmp_path, count_fault)
    for do, rank, at, count in FAULTS if RUN_ALL_FAULTS else FAULTS[:1]:
        ended = launched.strike(do, rank, at, count)
        assert ended[rank][0] == (-signal.SIGKILL if do == "kill" else 1), ended
        assert ended[1 - rank][0] == 1, ended
        if do == "raise" and rank == 0:
            assert re.search(r"^InjectedError: planted by a test", ended[0][1], re.MULTILINE), ended
    ended = launched.session()
    assert [code for code, _ in ended] == [0, 0], ended
    run = launched.directory
    assert_newest_checkpoint_valid(run, steps_saved(launched.hosts[0]))
    assert_one_value_per_step(run)
    assert_no_temporary_files(run)
    (tmp_path / "seen.txt").write_text("".join((host / "seen.txt").read_text() for host in launched.hosts))
    assert_each_sample_once(tmp_path, "ddp", SAMPLES["ddp"], 2 * SAVE_EVERY)
    assert_bitwise_equal(run_results(run), reference("ddp").results)
