"""Tests of the supervisor: the results of its ranks, the rank that it blames, and that no process is left behind."""

import os
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import supervisor_functions as work
from helpers.command import TIMEOUT_SECONDS, wait_until
from helpers.command_server import fork_server_from_fork
from helpers.supervisor_functions import CONNECTION_CLOSED, RETURN_ONE, report_result_of, sleep_until_killed
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from runner.config.errors import ConfigError
from runner.parallel.launch import supervisor
from runner.parallel.launch.processes import PRELOADED
from runner.parallel.launch.supervisor import RankError, Report, Supervisor, report_of
from runner.result import CrashedError, Result
from runner.system.forkserver import start_server
from runner.system.signals import StopRequest


@pytest.fixture(scope="module", autouse=True)
def _server() -> None:
    start_server(*PRELOADED)


@pytest.fixture(autouse=True)
def _none_left(monkeypatch) -> Iterator[None]:
    """Check after each test that all processes of its supervisors have ended."""
    pids: list[int] = []
    start = Supervisor.__init__
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", TIMEOUT_SECONDS)

    def noted(self: Supervisor, *arguments: Any) -> None:
        start(self, *arguments)
        pids.extend(process.pid for process in self.processes)

    monkeypatch.setattr(Supervisor, "__init__", noted)
    yield
    wait_until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], what="left behind")


def outcome(*works: Callable[[], Any]) -> list[Any]:
    """Run each function in a rank, and return what the ranks return."""
    with Supervisor(report_result_of, [(each,) for each in works], TIMEOUT_SECONDS) as ranks:
        return ranks.wait(StopRequest())


def test_values_come_in_the_order_of_ranks():
    assert outcome(*(partial(int, rank) for rank in range(3))) == [0, 1, 2]


def test_a_report_sent_just_before_the_rank_ends_is_read():
    """A rank may report and end after its pipe was read, but before the supervisor checks which ranks are alive."""
    with Supervisor(report_result_of, [(RETURN_ONE,)], TIMEOUT_SECONDS) as ranks:
        ranks.processes[0].join(TIMEOUT_SECONDS)
        assert ranks._dead() == []
        assert ranks.wait(StopRequest()) == [1]


def test_a_config_error_of_a_rank_is_raised_unchanged():
    """Also if the rank that has lost its peer reports first."""
    refusal = ConfigError("model", "x", "it is no model", "take another")
    with pytest.raises(ConfigError) as caught:
        outcome(partial(work.fail, CONNECTION_CLOSED), partial(work.fail, refusal, 0.5))
    assert (caught.value.key, caught.value.got, caught.value.remedy) == ("model", "x", "take another")


def test_the_heartbeat_timeout_starts_at_the_first_heartbeat(monkeypatch):
    """For its first heartbeat, a rank has the timeout plus START_SECONDS, because it may still be importing torch."""
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.3)
    with Supervisor(work.send_nothing, [(None,)], 0.5) as ranks:
        for _ in range(5):
            ranks._read_pipes()
        assert not ranks._broken()
    monkeypatch.setattr(supervisor, "START_SECONDS", 0.0)
    with (
        pytest.raises(RankError, match="rank 0 did not reach the collective that the others waited in"),
        Supervisor(work.send_nothing, [(None,)], 0.5) as ranks,
    ):
        ranks.wait(StopRequest())


@pytest.mark.cases(
    ([7, 7], [None, None], 99, False),  # no rank waits for the other: both may compute for any time
    ([7, 6], [None, None], 99, True),  # rank 0 has started a collective that rank 1 has not
    ([7, 6], [None, None], 4, False),
    ([7, 6], [None, Report(value=1)], 99, False),  # rank 1 is done, so that no rank waits for it,
)
def test_ranks_that_wait_for_a_hanging_rank_are_detected(progress, reports, seconds, stalled):
    ranks = Supervisor(report_result_of, [], 5)
    ranks.progress.update(enumerate(progress))
    ranks.reports, ranks.stalled = reports, seconds
    assert ranks._has_stalled() == stalled
    assert not stalled or ranks._first([], {})[0] == 1, "the rank that has started the fewest collectives is blamed"


def test_a_stop_signal_is_forwarded_to_ranks_which_start_with_signals_blocked():
    """A signal that arrives before a rank has installed its handlers does not kill the rank."""
    stop = StopRequest()
    stop.received = "SIGTERM"
    with Supervisor(report_result_of, [(work.wait_for_signal,)] * 3, TIMEOUT_SECONDS) as ranks:
        for process, number in zip(ranks.processes, (signal.SIGTERM, signal.SIGINT), strict=False):
            os.kill(process.pid, number)
        wait_until(lambda: [ranks._read_pipes(), all(ranks.reports[:2])][1])
        assert ranks.wait(stop) == ["SIGTERM", "SIGINT", "SIGUSR1"]


def test_an_interrupt_or_a_rank_that_cannot_start_leaves_no_rank_behind():
    """That no rank is left is checked after each test."""
    with pytest.raises(KeyboardInterrupt), Supervisor(report_result_of, [(sleep_until_killed,)] * 2, TIMEOUT_SECONDS):
        raise KeyboardInterrupt
    unpicklable = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        Supervisor(report_result_of, [(sleep_until_killed,), (unpicklable,)], TIMEOUT_SECONDS)


def test_a_dead_fork_server_is_noticed_and_replaced(tmp_path):
    """In a fork of this process, so that the other tests keep their fork server."""
    if (pid := os.fork()) == 0:
        try:
            (tmp_path / "outcomes").write_text(repr(outcomes_with_a_dead_fork_server()))
        except BaseException:
            (tmp_path / "outcomes").write_text(traceback.format_exc())
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    wanted = "rank 0 exited with code 255 (or the fork server, which starts the ranks, was killed)"
    assert (tmp_path / "outcomes").read_text() == repr([wanted, [1, 1]])


def outcomes_with_a_dead_fork_server() -> list[Any]:
    """Return the error of a supervisor whose fork server is killed, and what the processes of another one return."""
    server: Any = forkserver._forkserver
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    with fork_server_from_fork():
        start_server(*PRELOADED)
        with Supervisor(report_result_of, [(sleep_until_killed,)] * 2, TIMEOUT_SECONDS) as ranks:
            os.kill(server._forkserver_pid, signal.SIGKILL)
            with pytest.raises(RankError) as caught:
                ranks.wait(StopRequest())
        return [str(caught.value), outcome(RETURN_ONE, RETURN_ONE)]


OWN, OTHERS, DONE = report_of(ValueError("x")), report_of(CONNECTION_CLOSED), Report(value=1)
LATER = report_of(TypeError("y"))


@pytest.mark.cases(
    # killed
    ([-9, 1], [None, OTHERS], [], "rank 0 was killed by SIGKILL"),
    ([1, 1, -11], [OTHERS, OTHERS, None], [], "rank 2 was killed by SIGSEGV"),
    ([None, 7], [None, None], [], "rank 1 exited with code 7"),
    # aborted by NCCL's watchdog after a collective has timed out
    ([-6, 1], [None, OWN], [], "rank 1 failed: ValueError: x"),
    ([-6, None], [None, None], [], "rank 1 did not reach"),
    ([-6, -9], [None, None], [], "rank 1 was killed by SIGKILL"),
    ([-6, 1], [None, OTHERS], [], "rank 0 was killed by SIGABRT"),
    # raised
    ([1, 1], [OTHERS, OWN], [], "rank 1 failed: ValueError: x"),
    ([1, 1], [LATER, OWN], [], "rank 1 failed: ValueError: x"),
    ([1, None], [OWN, None], [1], "rank 0 failed: ValueError: x"),
    # stopped
    ([None, None], [None, None], [1], "rank 1 did not reach"),
    ([1, None, 1], [OTHERS, None, OTHERS], [], "rank 1 did not reach"),
    ([None, 1], [None, OTHERS], [0], "rank 0 did not reach"),
    ([0, None], [DONE, None], [1], "rank 1 did not reach"),
    # all have lost their peers: the first to report is blamed
    ([1, 1], [OTHERS, OTHERS], [], "rank 0 failed: RuntimeError: [gloo"),
    ([0, 1], [DONE, OTHERS], [], "rank 1 failed: RuntimeError: [gloo"),
)
def test_the_rank_that_caused_the_failure_is_blamed(codes, reports, silent, wanted):
    """After the timeout; an exit code is None if the rank is alive."""
    ranks = Supervisor(report_result_of, [], TIMEOUT_SECONDS)
    ranks.processes = [SimpleNamespace(exitcode=code, is_alive=lambda code=code: code is None) for code in codes]
    ranks.pipes = [SimpleNamespace(poll=lambda: False) for _ in codes]
    ranks.reports = list(reports)
    if -6 in codes and None in codes:  # NCCL's watchdog aborts a process for a failed operation, too: others then wait
        assert ranks._first(silent, {})[:2] == (codes.index(-6), "was killed by SIGABRT")
    ranks.began -= TIMEOUT_SECONDS
    bad = {rank: report for rank, report in enumerate(reports) if report and not report.succeeded}
    rank, what, trace = ranks._first(silent, bad)
    assert f"rank {rank} {what}".startswith(wanted)
    assert bool(trace) == ("failed" in wanted)


def test_the_report_of_a_crashed_error_contains_its_cause_and_result():
    try:
        try:
            raise ValueError("the cause")
        except ValueError as cause:
            raise CrashedError(Result("crashed", 7)) from cause
    except CrashedError as crash:
        report = report_of(crash)
    assert re.fullmatch(r"failed: ValueError: the cause \(.*test_supervisor\.py:\d+\)", report.what)
    assert report.result.steps == 7
    assert "CrashedError" not in report.trace
    assert not report.by_others


REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."


@pytest.mark.cases(
    (CONNECTION_CLOSED, True),
    (RuntimeError("NCCL communicator was aborted"), True),
    (DistBackendError(f"NCCL error in: x.cpp:1, remote process exited\n{REMOTE}"), True),
    (DistBackendError("NCCL error in: x.cpp:1, unhandled cuda error\nncclUnhandledCudaError: Call failed."), False),
    (RuntimeError("Application timeout caused pair closure"), True),  # of gloo, without its name
    (DistStoreError("timed out"), True),
    (DistNetworkError("refused"), True),
    (RuntimeError("size mismatch"), False),
)
def test_errors_of_a_lost_peer_are_recognized(error, by_others):
    assert report_of(error).by_others == by_others
