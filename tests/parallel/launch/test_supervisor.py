"""The crew: what its processes return, whom it blames, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import crew_work
import pytest
from helpers.command import ROOT, environment
from helpers.supervisor_work import LOST, WELL, does

from runner.config.errors import ConfigError
from runner.parallel.launch import supervisor as crew
from runner.parallel.launch.processes import _PRELOADED
from runner.parallel.launch.supervisor import Crew, RankError, Report, report_of
from runner.system.forkserver import start_server
from runner.system.signals import StopRequest


@pytest.fixture(scope="module", autouse=True)
def _server() -> None:
    start_server(*_PRELOADED)
    with Crew(does, [(WELL,)], timeout=60) as first:  # the server is there, and so the tests' times are theirs
        first.wait(StopRequest())


@pytest.fixture(autouse=True)
def _none_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever becomes of a crew, its processes are gone when it is closed."""
    pids: list[int] = []
    start = Crew.__init__
    monkeypatch.setattr(crew, "GRACE", 0.8)

    def noted(self: Crew, *arguments: Any) -> None:
        start(self, *arguments)
        pids.extend(process.pid for process in self.processes)

    monkeypatch.setattr(Crew, "__init__", noted)
    yield
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def outcome(*work: Callable[[], Any], timeout: float = 60, stop: StopRequest | None = None) -> list[Any]:
    """What a crew whose ranks do `work` returns or raises."""
    with Crew(does, [(what,) for what in work], timeout) as ranks:
        return ranks.wait(stop or StopRequest())


def blamed(*work: Callable[[], Any], within: float = 5, timeout: float = 60) -> RankError:
    """The error of a crew that fails, within so many seconds."""
    since = time.monotonic()
    with pytest.raises(RankError) as caught:
        outcome(*work, timeout=timeout)
    assert time.monotonic() - since < within
    return caught.value


HANG = partial(crew_work.value, 1, 60)


def test_each_ones_value_in_the_order_of_ranks() -> None:
    assert outcome(*(partial(crew_work.value, i, 0.2 * (i == 0)) for i in range(3))) == [0, 1, 2]


def test_ranks_that_end_at_once_are_never_taken_for_dead() -> None:
    for _ in range(10):
        assert outcome(WELL, WELL, WELL) == [1, 1, 1]


def test_a_report_that_comes_with_the_end_counts() -> None:
    """Between listening and looking who is alive, a rank may report and end."""
    with Crew(does, [(WELL,)], 60) as ranks:
        ranks.processes[0].join(30)
        assert ranks._dead() == []
        assert ranks.reports[0] is not None
        assert ranks.wait(StopRequest()) == [1]


def test_the_error_and_where_it_was_raised() -> None:
    error = blamed(HANG, partial(crew_work.fail, ValueError("a bad number")))
    assert str(error) == "rank 1 failed: ValueError: a bad number"
    assert error.trace.count("Traceback (most recent call last)") == 1
    assert "in fail\n    raise error" in error.trace
    assert error.result is None


def test_out_of_memory_in_one() -> None:
    assert str(blamed(partial(crew_work.fail, MemoryError("no room")), HANG)) == "rank 0 failed: MemoryError: no room"


@pytest.mark.parametrize("rank", [0, 1])
def test_who_only_lost_the_others_is_not_to_blame(rank: int) -> None:
    work = [partial(crew_work.fail, LOST)] * 3
    work[rank] = partial(crew_work.fail, KeyError("the reason"), 0.5)
    assert str(blamed(*work)) == f"rank {rank} failed: KeyError: 'the reason'"


def test_the_first_of_two_errors() -> None:
    error = blamed(partial(crew_work.fail, ValueError("late"), 0.4), partial(crew_work.fail, TypeError("early")))
    assert str(error) == "rank 1 failed: TypeError: early"


def test_all_lost_each_other() -> None:
    assert "rank 1 failed: RuntimeError: [gloo" in str(
        blamed(partial(crew_work.fail, LOST, 0.3), partial(crew_work.fail, LOST))
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT])
def test_killed(number: signal.Signals) -> None:
    error = blamed(partial(crew_work.fail, LOST, 0.3), partial(crew_work.signal_oneself, number))
    hint = " (the kernel does that where memory runs out)" if number == signal.SIGKILL else ""
    wanted = f"rank 1 was killed by {number.name}{hint}"
    if number == signal.SIGABRT:  # what NCCL's watchdog does to one that waits: rank 0 knows as little
        assert error.rank == 1
    assert str(error) == wanted


def test_an_exit_without_a_report() -> None:
    assert str(blamed(HANG, HANG, partial(crew_work.exit_with, 7))) == "rank 2 exited with code 7"


def test_a_config_error_is_the_users_to_see() -> None:
    with pytest.raises(ConfigError) as caught:
        outcome(partial(crew_work.fail, LOST), crew_work.refuse)
    assert (caught.value.key, caught.value.got, caught.value.remedy) == ("model", "x", "take another")


def test_stopped() -> None:
    error = blamed(HANG, partial(crew_work.signal_oneself, signal.SIGSTOP, 0.5), timeout=1.5, within=0.5 + 1.5 + 5)
    why = "was not where the others waited for it: it is stopped, or hangs (parallel.timeout=1.5)"
    assert str(error) == f"rank 1 {why}"


def test_stopped_before_its_first_beat_while_the_other_waits() -> None:
    """It is not silence that tells then, but the other, whose patience ends."""
    error = blamed(
        partial(crew_work.fail, LOST, 1), partial(crew_work.signal_oneself, signal.SIGSTOP), timeout=1, within=6
    )
    assert str(error).startswith("rank 1 was not where the others waited for it")


def test_hangs_while_it_beats() -> None:
    error = blamed(HANG, partial(crew_work.fail, LOST, 0.5))
    assert str(error).startswith("rank 0 was not where the others waited for it")


def test_silence_counts_from_the_first_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that still loads torch is not lost; it is after a while."""
    with Crew(crew_work.say_nothing, [(None,)], 0.5) as ranks:
        for _ in range(5):
            ranks._listen()
        assert not ranks._broken()
    monkeypatch.setattr(crew, "START", 0.0)
    with pytest.raises(RankError, match="rank 0 was not where"), Crew(crew_work.say_nothing, [(None,)], 0.5) as ranks:
        ranks.wait(StopRequest())


def test_a_pause_of_this_process_is_nobodys_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z, or a laptop's lid: the clock goes on, and nobody was heard meanwhile."""
    with Crew(does, [(HANG,)], 5) as ranks:
        ranks.silence = [0.0]
        clock = iter([0.0, 3600.0])
        monkeypatch.setattr(crew, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        ranks._listen()
        monkeypatch.undo()
        assert ranks.silence[0] <= 0.5


def test_a_signal_is_passed_on_to_all_once() -> None:
    stop = StopRequest()
    threading.Timer(0.3, setattr, (stop, "received", "SIGTERM")).start()
    assert outcome(crew_work.wait_for_signal, crew_work.wait_for_signal, stop=stop) == ["SIGUSR1"] * 2


def test_signals_are_blocked_as_a_rank_begins() -> None:
    """One that comes before the rank is ready for it does not kill it."""
    with Crew(does, [(crew_work.wait_for_signal,)] * 2, 60) as ranks:
        for process, number in zip(ranks.processes, (signal.SIGTERM, signal.SIGINT), strict=True):
            os.kill(process.pid, number)
        assert ranks.wait(StopRequest()) == ["SIGTERM", "SIGINT"]


def test_an_interrupt_leaves_none() -> None:
    with pytest.raises(KeyboardInterrupt), Crew(does, [(HANG,), (HANG,)], 60):
        raise KeyboardInterrupt


def test_one_that_cannot_be_started_takes_those_before_it_along(monkeypatch: pytest.MonkeyPatch) -> None:
    unpicklable = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        Crew(does, [(HANG,), (unpicklable,)], 60)


def test_a_dead_fork_server_is_told_and_replaced() -> None:
    """In a process of its own: this one's server has taken seconds to load torch."""
    program = """if True:
        import os, signal
        from functools import partial
        from multiprocessing import forkserver
        from crew_work import WELL, does, value
        from runner.system.forkserver import start_server
        from runner.parallel.launch.supervisor import Crew, RankError
        from runner.system.signals import StopRequest

        start_server("runner.parallel.launch.supervisor")
        with Crew(does, [(partial(value, 1, 60),)] * 2, 60) as ranks:
            pids = [process.pid for process in ranks.processes]
            os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
            try:
                ranks.wait(StopRequest())
            except RankError as error:
                print(error)
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):
            pass
        start_server("runner.parallel.launch.supervisor")
        with Crew(does, [(WELL,)] * 2, 60) as ranks:
            print(ranks.wait(StopRequest()))
    """
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/parallel")])
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, "check": False}
    done = subprocess.run([sys.executable, "-c", program], env=environment() | {"PYTHONPATH": paths}, **options)
    assert done.stdout.splitlines() == ["rank 0 exited with code 255", "[1, 1]"], done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Whom to blame: every order in which things may have come


def ended_by(code: int) -> SimpleNamespace:
    return SimpleNamespace(exitcode=code, is_alive=lambda: False)


ALIVE = SimpleNamespace(exitcode=None, is_alive=lambda: True)
OWN, OTHERS = report_of(ValueError("x")), report_of(LOST)
DONE = Report(value=1)


@pytest.mark.parametrize(
    ("processes", "reports", "silent", "wanted"),
    [
        # killed
        ([-9, 1], [None, OTHERS], [], "rank 0 was killed by SIGKILL"),
        ([1, -9], [OTHERS, None], [], "rank 1 was killed by SIGKILL"),
        ([1, 1, -11], [OTHERS, OTHERS, None], [], "rank 2 was killed by SIGSEGV"),
        # NCCL's watchdog ends those that wait in vain
        ([-6, 1], [None, OWN], [], "rank 1 failed: ValueError: x"),
        ([-6, None], [None, None], [], "rank 1 was not where"),
        ([-6, -9], [None, None], [], "rank 1 was killed by SIGKILL"),
        ([-6, 1], [None, OTHERS], [], "rank 0 was killed by SIGABRT"),
        # raised
        ([1, 1], [OTHERS, OWN], [], "rank 1 failed: ValueError: x"),
        ([1, None], [OWN, None], [], "rank 0 failed: ValueError: x"),
        ([1, None], [OWN, None], [1], "rank 0 failed: ValueError: x"),
        # stopped
        ([None, None], [None, None], [1], "rank 1 was not where"),
        ([1, None, 1], [OTHERS, None, OTHERS], [], "rank 1 was not where"),
        ([None, 1], [None, OTHERS], [0], "rank 0 was not where"),
        ([0, None], [DONE, None], [1], "rank 1 was not where"),
        # whoever was first to lose the others
        ([1, 1], [OTHERS, OTHERS], [], "rank 0 failed: RuntimeError: [gloo"),
        ([0, 1], [DONE, OTHERS], [], "rank 1 failed: RuntimeError: [gloo"),
    ],
)
def test_whom_to_blame(
    processes: list[int | None], reports: list[Report | None], silent: list[int], wanted: str
) -> None:
    ranks = Crew(does, [], 60)
    ranks.processes = [ALIVE if code is None else ended_by(code) for code in processes]
    ranks.pipes = [SimpleNamespace(poll=lambda: False) for _ in processes]  # pyright: ignore[reportAttributeAccessIssue]
    ranks.reports = list(reports)
    bad = {rank: report for rank, report in enumerate(reports) if report and not report.ended_well}
    rank, what, trace = ranks._first(silent, bad)
    assert f"rank {rank} {what}".startswith(wanted)
    assert bool(trace) == ("failed" in wanted)


def test_a_crash_is_told_by_its_cause_and_keeps_the_result() -> None:
    from runner.run import CrashedError, Result

    try:
        try:
            raise ValueError("the cause")
        except ValueError as cause:
            raise CrashedError(Result("crashed", 7)) from cause
    except CrashedError as crash:
        report = report_of(crash)
    assert report.what == "failed: ValueError: the cause"
    assert report.result.steps == 7
    assert "CrashedError" not in report.trace
    assert not report.by_others


@pytest.mark.parametrize(
    ("error", "by_others"),
    [
        (LOST, True),
        (RuntimeError("NCCL communicator was aborted"), True),
        (RuntimeError("Application timeout caused pair closure"), True),  # gloo's, which does not give its name here
        (RuntimeError("size mismatch"), False),
    ],
)
def test_who_only_lost_the_others(error: Exception, by_others: bool) -> None:
    assert report_of(error).by_others == by_others


def test_a_store_that_nobody_comes_to_is_the_others_doing() -> None:
    from torch.distributed import DistNetworkError, DistStoreError

    assert report_of(DistStoreError("timed out")).by_others
    assert report_of(DistNetworkError("refused")).by_others
