"""Tests of runs in which a rank is killed, is stopped, hangs, fails, or gets a signal; no process is left behind."""

import json
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers import command as cli
from helpers import rank_functions, runs
from helpers.compose import build_composed_run, train_in

from runner.api import run_job
from runner.config.errors import ConfigError
from runner.result import Result
from runner.storage.checkpoint import load
from runner.training import train_rank

STEPS = 120
LONG = (*runs.TWO_RANK_DDP, f"steps={STEPS}", "save_every=10", "log_every=20", "eval_every=60")
LONG += ("model.dropout=0.1", "data.crop=1")
KILLED = "was killed by SIGKILL (the kernel does that where memory runs out)"
SLOW = pytest.mark.slow
STOPPED = "did not reach the collective that the others waited in: it is stopped, or hangs (parallel.timeout="


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The final step, weights and optimizer state of an undisturbed run."""
    return runs.checkpoint_tensors(
        train_in(tmp_path_factory.mktemp("undisturbed"), build_composed_run(*LONG)).directory
    )


def assert_crashed(command: cli.Command, rank: int, what: str) -> None:
    """Fail unless a command ends with exit code 1, and reports the failure `what` of `rank` exactly once."""
    code, console = command.wait_for_all_processes()
    assert code == 1, console
    assert console.count(f"rank {rank} {what}") == 1, console
    assert len(re.findall(r"^rank \d+ ", console, re.MULTILINE)) == 1, console
    assert "Traceback" not in console
    assert re.search(r"^crashed after step \d+/\d+", console, re.MULTILINE), console


SLOW_EVALUATIONS = ("eval_every=1", "workload.eval_batch_size=16", "save_every=10")
"""Options with which a run does not end before the fault; a resumed run keeps the options of the session before."""
SLOW_SAVING = ("eval_every=60", "workload.eval_batch_size=256", "save_every=1")
SESSIONS = (
    (None, signal.SIGTERM, "start"),
    (1, signal.SIGKILL, "start"),
    (0, signal.SIGTERM, "evaluating"),
    (1, signal.SIGKILL, "saving"),
    (1, signal.SIGINT, "evaluating"),
)
"""The rank that gets a signal, or None for the command itself; the signal; and when."""


def test_resume_after_killed_ranks_and_signals_is_bitwise_exact(tmp_path, undisturbed):
    arguments, done = list(LONG), 0
    for rank, number, moment in SESSIONS:
        command = cli.Command(tmp_path, *arguments, *(SLOW_SAVING if moment == "saving" else SLOW_EVALUATIONS))
        ranks = command.wait_for_rank_pids()
        if number == signal.SIGKILL and moment != "start":
            command.wait_for_checkpoint(done + 1)
        elif number != signal.SIGKILL and done:
            cli.wait_until(partial(resumed, command, done))
        command.signal_processes(number, *([] if rank is None else [ranks[rank]]))
        if number == signal.SIGKILL:
            assert_crashed(command, rank, KILLED)
        else:
            assert_stopped(command, number.name if rank is None else "")
        newest = runs.newest_checkpoint(command.single_run_directory)
        for saved in (load(newest, 0), load(newest, 1)):  # which it verifies
            assert saved.step == int(newest.name[5:])
            assert saved.local, "each rank's own"
        [words] = re.findall(r"^resume: python -m runner (.*)$", command.console, re.MULTILINE)
        arguments = shlex.split(words)
        before, done = done, int(newest.name[5:])
        assert before <= done < STEPS
        assert before < done or (number, moment) == (signal.SIGKILL, "start")
    cli.run_successfully(tmp_path, *arguments, "eval_every=60", "workload.eval_batch_size=256")
    runs.assert_checkpoint_bitwise_equal(command.single_run_directory, undisturbed)
    assert not list(command.single_run_directory.glob("checkpoints/*.corrupt*"))


def assert_stopped(command: cli.Command, received: str) -> None:
    """Fail unless a command stops after saving; `received` is its signal, empty if one of its ranks received it."""
    code, console = command.wait_for_all_processes()
    assert code == 75, console
    assert "Traceback" not in console
    assert console.count(": finishing the step, then saving") == (1 if received else 0)
    assert f"{received}: finishing" in console or not received
    step = int(runs.newest_checkpoint(command.single_run_directory).name[5:])
    assert f"stopped after step {step}/{STEPS}" in console, "where all agreed to"


def resumed(command: cli.Command, step: int) -> bool:
    return f"resumed after step {step}" in command.log


@pytest.mark.cases(
    (("parallel=hogwild",), 1),
    (("parallel.processes=3", "batch_size=63"), 2),
    pytest.param(("parallel=fsdp",), 1, marks=SLOW),
    pytest.param(("parallel=ensemble",), 1, marks=SLOW),
    ids=str,
)
def test_a_killed_rank_ends_the_run(options, rank, tmp_path):
    command = cli.Command(tmp_path, *LONG, *options)
    command.wait_for_checkpoint().signal_processes(signal.SIGKILL, command.wait_for_rank_pids()[rank])
    assert_crashed(command, rank, KILLED)


def test_all_ranks_restart_from_the_last_checkpoint(tmp_path, undisturbed):
    command = cli.Command(tmp_path, *LONG, "parallel.max_restarts=2")
    command.wait_for_checkpoint().signal_processes(signal.SIGKILL, command.wait_for_rank_pids()[1])
    again = command.wait_for_rank_pids(2)
    cli.wait_until(lambda: "resumed after step" in command.log)
    command.signal_processes(signal.SIGKILL, again[0])
    code, console = command.wait_for_all_processes()
    assert code == 0, console
    for restart, rank in ((1, 1), (2, 0)):
        restarts = rf"^rank {rank} {re.escape(KILLED)}\n.*last checkpoint \(restart {restart} of 2\)$"
        assert len(re.findall(restarts, console, re.MULTILINE)) == 1, console
    runs.assert_checkpoint_bitwise_equal(command.single_run_directory, undisturbed)


# Ranks that are stopped (SIGSTOP) or hang: all timeouts run at the same time
TIMEOUT = 8
"""`parallel.timeout` in seconds. It also limits the start of a rank, which may be slow on a busy machine."""
PAUSED = ("hogwild", "pipeline", "ddp")
BROKEN = [
    *(("ddp", 0, "stops"), ("ddp", 1, "stops at the start"), ("hogwild", 1, "stops")),
    *(("ddp", 1, "hangs"), ("pipeline", 0, "hangs"), ("hogwild", 1, "hangs")),
]
"""The mode, and the rank that is stopped or hangs: it still sends heartbeats, but the other waits in a collective."""


@pytest.fixture(scope="module")
def paused(tmp_path_factory) -> Iterator[tuple[dict[str, cli.Command], float]]:
    """For each mode, a command all of whose processes are stopped; and when this has been longer than the timeout."""
    options = ("steps=1000000", f"parallel.timeout={TIMEOUT}")
    begun = {mode: cli.Command(tmp_path_factory.mktemp(mode), *LONG, *options, f"parallel={mode}") for mode in PAUSED}
    for command in begun.values():
        command.wait_for_checkpoint()
        addresses = runs.listening_addresses(command.cwd)  # of the store and gloo, which take connections of anybody
        command.signal_processes(signal.SIGSTOP, *cli.processes_in(command.cwd))
        assert {address for address, _ in addresses} == {"0100007F"}, "only the loopback interface"
    yield begun, time.monotonic() + TIMEOUT + 4
    for command in begun.values():
        if left := cli.processes_in(command.cwd):
            command.signal_processes(signal.SIGKILL, *left)


@pytest.fixture(scope="module")
def broken(tmp_path_factory, paused: object) -> dict[tuple[str, int, str], cli.Command]:
    """A command for each case in `BROKEN`; with the commands of `paused`, so that all timeouts run at the same time."""
    commands = {}
    for mode, rank, how in BROKEN:
        cwd = tmp_path_factory.mktemp(f"{mode}-{rank}")
        if how == "hangs":
            (cwd / f"rank_{rank}_hangs").touch()
        command = cli.Command(cwd, *LONG, "steps=100000", f"parallel={mode}", f"parallel.timeout={TIMEOUT}")
        pid = command.wait_for_rank_pids()[rank]  # one after another, so that each start has all cores
        if how == "stops":
            command.wait_for_checkpoint()
        if how != "hangs":
            command.signal_processes(signal.SIGSTOP, pid)
        commands[mode, rank, how] = command
    return commands


@pytest.mark.parametrize(("mode", "rank", "how"), BROKEN)
def test_the_error_names_the_rank_that_stops_or_hangs(mode, rank, how, broken):
    command, what = broken[mode, rank, how], f"{STOPPED}{TIMEOUT})"
    assert_crashed(command, rank, what)
    assert json.loads((command.single_run_directory / "result.json").read_text())["error"] == f"rank {rank} {what}"


@pytest.mark.parametrize("mode", PAUSED)
def test_a_run_goes_on_after_all_its_processes_were_suspended(mode, paused):
    command, until = paused[0][mode], paused[1]
    before = int(runs.newest_checkpoint(command.single_run_directory).name[5:])
    time.sleep(max(0, until - time.monotonic()))
    command.signal_processes(signal.SIGCONT, *cli.processes_in(command.cwd))
    command.wait_for_checkpoint(before + 20)
    command.signal_processes(signal.SIGKILL, *cli.processes_in(command.cwd))  # its ranks keep the machine busy


@pytest.fixture
def failing(tmp_path, monkeypatch) -> Callable[..., Result]:
    """Return a function of another function, called in place of `train_rank`, and of overrides, that trains."""

    def run_it(work: Callable[..., Any], *overrides: str) -> Result:
        run = build_composed_run(*LONG, "steps=30", *overrides)
        launcher = run.parallel.launcher(run.device)
        monkeypatch.setattr(run_job, "train_rank", work)
        with launcher.connect() as process:
            return run_job.trained(run, run.prepare(process), launcher, tmp_path, begin=dict, overrides=[])

    return run_it


@pytest.mark.cases(
    (partial(rank_functions.fail_at, 0, 13, ValueError("a bad number")), 0, "ValueError: a bad number", "raise"),
    (partial(rank_functions.fail_at, 1, 2, SystemExit(3)), 1, "SystemExit: 3", "raise error"),
    (partial(rank_functions.fail_in_evaluation, 1), 1, "ZeroDivisionError: no samples", "raise Zero"),
    ids=["step", "exit", "evaluation"],
)
def test_the_error_of_a_rank_is_printed_once_with_its_traceback(change, rank, error, line, failing, capfd):
    result = failing(partial(rank_functions.train_with_change, change), "save_every=5")
    assert result.status == "crashed"
    where = r" \(tests/helpers/rank_functions\.py:\d+\)"  # the last line that is not of the project or a library
    assert re.fullmatch(re.escape(f"rank {rank} failed: {error}") + where, result.error)
    if rank == 0:  # in step 13
        assert result.steps == 12
    printed = capfd.readouterr().err
    assert len(re.findall(rf"^{re.escape(error)}", printed, re.MULTILINE)) == 1, "its traceback"
    assert line in printed
    assert "gloo" not in printed, "what it did to the others is not printed"


@pytest.mark.parametrize(("rank", "num_bytes"), [(0, 20_000), (1, 1000)])
def test_a_full_disk_is_explained_without_a_traceback(rank, num_bytes, failing, capfd):
    """With 20,000 bytes a file, rank 0 can write its log, but not the weights; with 1000, rank 1 not its state."""
    change = partial(rank_functions.limit_file_size, rank, num_bytes)
    result = failing(partial(rank_functions.train_with_change, change), "save_every=5")
    assert result.status == "crashed"
    assert result.error.startswith(f"rank {rank} failed: StorageError: ")
    assert result.error.count("make room") == 1
    assert "keep=1" in result.error
    assert "Traceback" not in capfd.readouterr().err, "where in the code it was noticed helps nobody"


def test_a_file_in_place_of_the_checkpoints_is_refused(failing, tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(ConfigError) as refusal:
        failing(train_rank)
    assert (refusal.value.key, refusal.value.got) == ("resume", str(tmp_path / "checkpoints"))


def test_a_rank_whose_log_cannot_be_opened_fails(failing, tmp_path):
    (tmp_path / "log_rank_1.txt").mkdir()
    assert failing(train_rank).error.startswith("rank 1 failed: IsADirectoryError")


def test_ranks_are_restarted_max_restarts_times(failing, tmp_path):
    result = failing(rank_functions.record_attempt_and_fail, "parallel.max_restarts=2")
    assert result.error.startswith("rank 1 failed: RuntimeError: again (")
    assert len(set((tmp_path / "attempts").read_text().split())) == 3
