"""Ranks that are killed, stopped or fail, signals, and a killed parent: for real, and nothing is left behind."""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rank_work
import runner.session
import torch
from helpers.command import Command, processes_in, start_fresh, succeed, until
from helpers.compose import built
from helpers.runs import TWO, assert_bitwise, free_port, held_in, listening, weights
from runner.session import session

import runner.__main__ as command
from runner.run import Result, Run
from runner.storage.checkpoint import load

STEPS = 120
LONG = (*TWO, f"steps={STEPS}", "save_every=10", "log_every=20", "eval_every=60", "model.dropout=0.1", "data.crop=1")
KILLED = "was killed by SIGKILL (the kernel does that where memory runs out)"
SLOW = pytest.mark.slow
STOPPED = "was not where the others waited for it: it is stopped, or hangs (parallel.timeout="


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What a run ends with that nobody disturbs."""
    cwd = tmp_path_factory.mktemp("undisturbed")
    succeed(cwd, *LONG)
    return weights(next(cwd.glob("outputs/*/*")))


def assert_crashed(launch: Command, rank: int, what: str, seconds: float) -> None:
    """Refuse a launch that does not end within `seconds` with exit code 1, telling once who failed."""
    code, told = launch.ended(seconds)
    assert code == 1, told
    assert told.count(f"rank {rank} {what}") == 1, told
    assert len(re.findall(r"^rank \d+ ", told, re.MULTILINE)) == 1, told
    assert "Traceback" not in told
    assert re.search(r"^crashed after step \d+/\d+", told, re.MULTILINE), told


def assert_whole(run: Path) -> None:
    """Refuse a newest checkpoint that is not as it was written."""
    newest = max(run.glob("checkpoints/step_????????"))
    for rank in (0, 1):
        loaded = load(newest, rank)
        assert (loaded.step, loaded.world_size) == (int(newest.name[5:]), 2)
        assert loaded.local, "each rank's own"


# ---------------------------------------------------------------------------------------------------------------------
# Killed


def test_killed_again_and_again_it_ends_where_one_left_in_peace_ends(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    arguments, moments = LONG, [(0, "training"), (1, "training"), (1, "start"), (0, "evaluating"), (1, "saving")]
    often = {"evaluating": ("eval_every=1", "workload.eval_batch_size=8"), "saving": ("save_every=1",)}
    for rank, moment in moments:
        run = next(tmp_path.glob("outputs/*/*"), None)
        done = int(max(run.glob("checkpoints/step_*")).name[5:]) if run else 0
        launch = Command(tmp_path, *arguments, *often.get(moment, ()))
        ranks = launch.ranks()
        if moment != "start":
            launch.saved(done + 1)
        launch.kill(signal.SIGKILL, ranks[rank])
        assert_crashed(launch, rank, KILLED, seconds=10)
        assert_whole(launch.directory)
        typed = re.search(r"^go on: python -m runner (.*)$", launch.console, re.MULTILINE)
        assert typed
        arguments = shlex.split(typed[1])
    succeed(tmp_path, *arguments)
    assert_bitwise(launch.directory, undisturbed)
    assert not list(launch.directory.glob("checkpoints/*.corrupt*"))


@pytest.mark.parametrize("mode", ["hogwild", pytest.param("fsdp", marks=SLOW), pytest.param("ensemble", marks=SLOW)])
def test_killed_in_other_modes(mode: str, tmp_path: Path) -> None:
    launch = Command(tmp_path, *LONG, f"parallel={mode}")
    launch.saved().kill(signal.SIGKILL, launch.ranks()[1])
    assert_crashed(launch, 1, KILLED, seconds=10)


def test_one_of_three_killed(tmp_path: Path) -> None:
    launch = Command(tmp_path, *LONG, "parallel.processes=3", "batch_size=63")
    launch.saved().kill(signal.SIGKILL, launch.ranks()[2])
    assert_crashed(launch, 2, KILLED, seconds=10)


def test_restarted_from_the_last_checkpoint(tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    """At the port that was asked for, which must be free again by then."""
    launch = Command(tmp_path, *LONG, "parallel.max_restarts=2", f"parallel.port={free_port()}")
    launch.saved().kill(signal.SIGKILL, launch.ranks()[1])
    again = launch.ranks(2)
    until(lambda: "resumed after step" in launch.log)
    launch.kill(signal.SIGKILL, again[0])
    code, told = launch.ended()
    assert code == 0, told
    assert told.count(f"rank 1 {KILLED}\nall start again from the last checkpoint (restart 1 of 2)") == 1
    assert told.count(f"rank 0 {KILLED}\nall start again from the last checkpoint (restart 2 of 2)") == 1
    assert_bitwise(launch.directory, undisturbed)


def kill_at_random(cwd: Path, kills: int) -> None:
    """A run to its end, with so many kills of its ranks or of the command itself."""
    arguments = LONG
    while True:
        launch = Command(cwd, *arguments)
        time.sleep(random.uniform(0, 3))
        if not kills:
            break
        pids = [launch.pid, *(launch.ranks() if "processes: " in launch.log else [])]
        launch.kill(signal.SIGKILL, random.choice(pids))
        kills -= 1
        code, told = launch.ended(15)
        if code == 0:
            break
        assert code in (1, -9), told
        runs = [path.parent for path in cwd.glob("outputs/*/*/config.yaml")]
        arguments = (f"resume={runs[0]}",) if runs else LONG
    assert launch.ended()[0] == 0


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    for case in range(6):
        kill_at_random(tmp_path / str(case), kills=5)
        assert_bitwise(next(tmp_path.glob(f"{case}/outputs/*/*")), undisturbed)


# ---------------------------------------------------------------------------------------------------------------------
# Stopped: all these wait at the same time

TIMEOUT = 5
STOPS = {
    "ddp-1": ("ddp", 1, "training"),
    "ddp-0": ("ddp", 0, "training"),
    "start-1": ("ddp", 1, "start"),
    "hogwild-1": ("hogwild", 1, "training"),
    "ensemble-0": ("ensemble", 0, "training"),
    "fsdp-1": ("fsdp", 1, "training"),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Launch, float]]:
    """For each case its launch, one of whose ranks was stopped, and since when."""
    launches = {}
    for case, (mode, rank, moment) in STOPS.items():
        endless = ("steps=100000", f"parallel={mode}", f"parallel.timeout={TIMEOUT}")
        launch = Command(tmp_path_factory.mktemp(case), *LONG, *endless)
        pid = launch.ranks()[rank]
        if moment != "start":
            launch.saved()
        launches[case] = (launch, launch.kill(signal.SIGSTOP, pid))
    return launches


@pytest.mark.parametrize("case", STOPS)
def test_stopped(case: str, stopped: dict[str, tuple[Launch, float]]) -> None:
    """At most the timeout and five seconds; one more for this machine, on which all the cases end at once."""
    launch, since = stopped[case]
    assert_crashed(launch, STOPS[case][1], f"{STOPPED}{TIMEOUT})", seconds=60)
    ended = (launch.cwd / "code").stat().st_mtime - (time.time() - time.monotonic())
    assert ended - since < TIMEOUT + 6


def test_a_killed_parent_takes_a_stopped_rank_along(tmp_path: Path) -> None:
    launch = Command(tmp_path, *LONG, "steps=100000").saved()
    launch.kill(signal.SIGSTOP, launch.ranks()[1])
    launch.kill(signal.SIGKILL)
    assert launch.ended(10)[0] == -signal.SIGKILL


# ---------------------------------------------------------------------------------------------------------------------
# Failing


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run as the command does, with another work for the ranks; returns the result."""

    def run_it(work: Callable[[Run], Any], *overrides: str) -> Result:
        run = built(*LONG, "steps=30", *overrides)
        run.prepare()
        run.directory = tmp_path
        monkeypatch.setattr(runner.session, "session", work)
        return command.trained(run)

    return run_it


@pytest.mark.parametrize(
    ("work", "what", "line"),
    [
        (
            partial(rank_work.fail, 1, 13, ValueError("a bad number")),
            "rank 1 failed: ValueError: a bad number",
            "raise",
        ),
        (
            partial(rank_work.fail, 0, 13, ValueError("a bad number")),
            "rank 0 failed: ValueError: a bad number",
            "raise",
        ),
        (partial(rank_work.fail, 1, 2, MemoryError("no room")), "rank 1 failed: MemoryError: no room", "raise error"),
        (partial(rank_work.fail, 1, 2, SystemExit(3)), "rank 1 failed: SystemExit: 3", "raise error"),
        (partial(rank_work.fail_in_evaluation, 1), "rank 1 failed: ZeroDivisionError: no samples", "raise Zero"),
        (partial(rank_work.fail_at_once, 1), "rank 1 failed: OSError: [Errno 5] Input/output error", "raise OSError"),
    ],
    ids=["rank 1", "rank 0", "memory", "exit", "evaluation", "start"],
)
def test_a_rank_that_fails_is_told_once_with_its_traceback(
    work: Callable[[Run], Any], what: str, line: str, failing: Callable[..., Result], capfd: pytest.CaptureFixture[str]
) -> None:
    since = time.monotonic()
    result = failing(work, "save_every=5")
    assert time.monotonic() - since < 20
    assert result.status == "crashed"
    assert result.error.startswith(what)
    told = capfd.readouterr().err
    last = what.partition("failed: ")[2]
    assert len(re.findall(rf"^(runner\.directory\.)?{re.escape(last)}", told, re.MULTILINE)) == 1, "its traceback"
    assert line in told
    assert "gloo" not in told, "what befell the others is not told"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_is_told_in_words(
    rank: int, failing: Callable[..., Result], capfd: pytest.CaptureFixture[str]
) -> None:
    result = failing(partial(rank_work.full_disk, rank), "save_every=5")
    assert result.status == "crashed"
    assert result.error.startswith(f"rank {rank} failed: StorageError: ")
    assert result.error.count("make room on the disk") == 1
    assert "Traceback" not in capfd.readouterr().err, "where in the code it was noticed helps nobody"


def test_a_disk_that_cannot_be_written(failing: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    result = failing(session)
    assert result.error.startswith("rank 0 failed: StorageError: ")
    assert "resume (keep=1 needs the least room)" in result.error


def test_a_log_that_cannot_be_opened(failing: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "log_rank_1.txt").mkdir()
    assert failing(session).error.startswith("rank 1 failed: IsADirectoryError")


def test_too_many_failures_end_it(failing: Callable[..., Result], tmp_path: Path) -> None:
    result = failing(rank_work.count_and_fail, "parallel.max_restarts=2")
    assert result.error == "rank 1 failed: RuntimeError: again"
    assert len(set((tmp_path / "attempts").read_text().split())) == 3


def test_how_far_it_had_come_is_known(failing: Callable[..., Result]) -> None:
    result = failing(partial(rank_work.fail, 0, 13, ValueError("x")))
    assert result.steps == 12


# ---------------------------------------------------------------------------------------------------------------------
# The parent killed


@pytest.mark.parametrize("moment", ["start", "training", "saving"])
def test_a_killed_parent_leaves_nothing(moment: str, tmp_path: Path) -> None:
    launch = Command(tmp_path, *LONG, "steps=100000", *(["save_every=1"] if moment == "saving" else []))
    launch.ranks()
    if moment != "start":
        launch.saved()
    sockets, _ = held_in(tmp_path)
    assert sockets, "where they meet"
    launch.kill(signal.SIGKILL)
    assert launch.ended(10)[0] == -signal.SIGKILL
    until(lambda: not sockets & listening(), 5, "left behind")  # the kernel closes them as the last of them ends


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Commands as they are typed, each with a fork server of its own, in a process group of its own."""
    begun = []

    def start_it(*arguments: str) -> Any:
        with (tmp_path / "console.txt").open("w") as console:
            process = start_fresh(*arguments, cwd=tmp_path, stdout=console, stderr=console, start_new_session=True)
        begun.append(process)
        until(lambda: list(tmp_path.glob("outputs/**/checkpoints/step_*")) or process.poll() is not None)
        assert process.poll() is None, (tmp_path / "console.txt").read_text()
        return process

    yield start_it
    for process in begun:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_killed_parent_leaves_no_server(cold: Callable[..., Any], tmp_path: Path) -> None:
    process = cold(*LONG, "steps=100000")
    assert len(processes_in(tmp_path)) >= 5, "the parent, the tracker of shared memory, the fork server, two ranks"
    process.kill()
    assert process.wait() == -signal.SIGKILL
    until(lambda: not processes_in(tmp_path), 20, "left behind")


@pytest.mark.slow
def test_a_killed_parent_leaves_no_worker_and_no_memory(cold: Callable[..., Any], tmp_path: Path) -> None:
    from test_resume import pictures

    pictures(tmp_path / "pictures")
    data = ["data=imagefolder", f"data.root={tmp_path}/pictures", "data.size=8", "data.workers=1", "batch_size=8"]
    few = ["model=tiny", "device=cpu", "device.threads=1", "steps=100000", "save_every=5", "eval_every=0"]
    process = cold("parallel=ddp", *few, *data)
    sockets, names = until(lambda: held if all(held := held_in(tmp_path)) else None)
    assert len(processes_in(tmp_path)) >= 9, "and each rank's own fork server and worker"
    process.kill()
    assert process.wait() == -signal.SIGKILL
    until(lambda: not processes_in(tmp_path), 20, "left behind")
    until(lambda: not sockets & listening(), 5, "left behind")  # the kernel closes them as the last of them ends
    assert not [name for name in names if Path(name).exists()]


# ---------------------------------------------------------------------------------------------------------------------
# Asked to stop


def assert_stopped(launch: Command, told_by: str) -> list[str]:
    """Refuse a launch that does not stop after saving once; returns the arguments that it says to go on with."""
    code, told = launch.ended(20)
    assert code == 75, told
    assert "Traceback" not in told
    assert told.count(": finishing the step, then saving") == (1 if told_by else 0)
    assert f"{told_by}: finishing" in told or not told_by
    assert f"stopped after step {weights(launch.directory)['step']}/{STEPS}" in told, "where all agreed to"
    assert_whole(launch.directory)
    typed = re.search(r"^go on: python -m runner (.*)$", told, re.MULTILINE)
    assert typed
    return shlex.split(typed[1])


def resumed(launch: Command, step: int) -> bool:
    return f"resumed after step {step}" in launch.log


def test_asked_to_stop_again_and_again_it_ends_where_one_left_in_peace_ends(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """By a signal to the command, or to any one rank; the first of them before the first step."""
    arguments, done = list(LONG), 0
    for rank, number in [
        (None, signal.SIGTERM),
        (None, signal.SIGINT),
        (0, signal.SIGTERM),
        (None, signal.SIGUSR1),
        (1, signal.SIGINT),
    ]:
        launch = Command(tmp_path, *arguments)
        ranks = launch.ranks()
        if done:
            until(partial(resumed, launch, done))
        launch.kill(number, *([] if rank is None else [ranks[rank]]))
        arguments = assert_stopped(launch, number.name if rank is None else "")
        before, done = done, int(weights(launch.directory)["step"])
        assert before < done <= before + 30
    succeed(tmp_path, *arguments)
    assert_bitwise(launch.directory, undisturbed)


@pytest.mark.parametrize("mode", ["hogwild", "ensemble", pytest.param("fsdp", marks=SLOW)])
def test_a_signal_in_other_modes(mode: str, tmp_path: Path) -> None:
    launch = Command(tmp_path, *LONG, "steps=100000", f"parallel={mode}").saved()
    launch.kill(signal.SIGTERM, launch.ranks()[1])
    code, told = launch.ended(20)
    assert code == 75, told
    assert f"stopped after step {weights(launch.directory)['step']}/100000" in told


def test_a_ctrl_c_in_a_terminal_reaches_all_and_stops_all_once(cold: Callable[..., Any], tmp_path: Path) -> None:
    """The signal goes to the whole process group: command, fork server, ranks."""
    process = cold(*LONG)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) == 75
    told = (tmp_path / "console.txt").read_text()
    assert told.count("SIGINT: finishing the step, then saving") == 1
    assert "Traceback" not in told
    until(lambda: not processes_in(tmp_path), 10, "left behind")
    [run] = tmp_path.glob("outputs/*/*")
    assert_whole(run)
    assert f"stopped after step {weights(run)['step']}/{STEPS}" in told


def test_the_second_ctrl_c_leaves_at_once_and_nothing_behind(tmp_path: Path) -> None:
    launch = Command(tmp_path, *LONG, "steps=100000").saved()
    launch.kill(signal.SIGSTOP, launch.ranks()[1])  # the step that they would finish has no end
    launch.kill(signal.SIGINT)
    until(lambda: "SIGINT: finishing the step" in launch.console)
    launch.kill(signal.SIGINT)
    code, told = launch.ended(10)
    assert (code, told.splitlines()[-1]) == (130, "interrupted")
    assert "Traceback" not in told
