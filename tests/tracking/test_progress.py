"""Tests of the progress display: lines with the right numbers, and a progress bar if the output is a terminal."""

from __future__ import annotations

import errno
import io
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.command import TIMEOUT_SECONDS, child_environment
from helpers.compose import TINY_CPU

import runner.tracking.progress
from runner.tracking.metrics import Measured
from runner.tracking.progress import Bar, Progress, Silent, progress_for

BATCH = 64


class FakeClock:
    """A fake clock, which moves only when a test sets `now`."""

    now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(runner.tracking.progress, "time", clock)
    return clock


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert out == "", "standard output is for the result"
    return err.splitlines()


# ---------------------------------------------------------------------------------------------------------------------
# Lines


def test_a_line_every_five_seconds_shows_the_metrics(clock: FakeClock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(num_steps=1000, batch_size=BATCH)
    progress.metrics({"train/loss": 2.34567, "train/accuracy": 0.5})
    for step in range(1, 101):  # ten steps per second, for ten seconds
        clock.now += 0.1
        progress.step(step, Measured(step, step / 10, step / 10))
    first, second = lines(capsys)
    assert re.fullmatch(r"step (49|50|51)/1000  loss 2.346  accuracy 0.5  640 samples/s  1:3[45] left", first)
    assert re.fullmatch(r"step (99|100|101)/1000  loss 2.346  accuracy 0.5  640 samples/s  1:[23]\d left", second)


Step = tuple[float, int, Measured]
"""Seconds on the clock since the previous step, the number of the step, and how long the steps took so far."""

SHOWN: dict[str, tuple[Progress, list[Step], list[str]]] = {
    "the rate is recent, and the time left is based on all steps": (
        Progress(num_steps=10_000, batch_size=BATCH),
        [(30, step, Measured(step, s, s)) for step, s in ((100, 10), (105, 20), (505, 40))],  # 10, 0.5 and 20 a second
        [
            "step 100/10000  640 samples/s  16:30 left",
            "step 105/10000  32 samples/s  31:25 left",  # 9,895 steps at 20 s per 105
            "step 505/10000  1,280 samples/s  12:32 left",  # 9,495 steps at 40 s per 505
        ],
    ),
    "evaluations of half a minute count toward the time left but not the rate": (
        Progress(num_steps=20, batch_size=BATCH),
        [(31, step, Measured(step, step / 10, 31 * step / 10)) for step in (10, 20)],
        ["step 10/20  640 samples/s  0:31 left", "step 20/20  640 samples/s  0:00 left"],
    ),
    "steps that are only queued on a device do not count": (  # which takes 0.1 s a step
        Progress(num_steps=1000, batch_size=BATCH),
        [(5, step, Measured(m, m / 10, m / 10)) for step, m in ((49, 0), (50, 50), (99, 50), (100, 100))],
        ["step 49/1000  ", *(f"step {n}/1000  640 samples/s  1:{s} left" for n, s in ((50, 35), (99, 30), (100, 30)))],
    ),
    "the last step is always shown": (
        Progress(num_steps=3, batch_size=BATCH),
        [(0.5, step, Measured(step, step / 2, step / 2)) for step in (1, 2, 3)],
        ["step 3/3  128 samples/s  0:00 left"],
    ),
    "a resumed run counts only its own steps": (
        Progress(num_steps=1000, batch_size=BATCH, first_step=900),
        [(10, 950, Measured(950, 10, 10))],
        ["step 950/1000  320 samples/s  0:10 left"],
    ),
}


@pytest.mark.parametrize(("progress", "steps", "shown"), SHOWN.values(), ids=SHOWN)
def test_lines_show_the_rate_and_the_time_left(
    progress: Progress, steps: list[Step], shown: list[str], clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    progress._shown_at = clock.now
    for seconds, step, measured in steps:
        clock.now += seconds
        progress.step(step, measured)
    assert lines(capsys) == shown


@pytest.mark.parametrize("display", [Progress, Bar])
def test_write_errors_of_the_console_are_ignored(
    display: type[Progress], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        tried = 0

        def write(self, _: str) -> int:
            self.tried += 1
            raise OSError(errno.EIO, "Input/output error")  # as if the terminal was closed

    monkeypatch.setattr(sys, "stderr", closed := Closed())
    with display(num_steps=1000, batch_size=BATCH) as progress:
        for step in range(1, 5):
            clock.now += 10
            progress.step(step, Measured(step, step, step))
    assert closed.tried > 0


def test_the_last_step_is_always_shown(clock: FakeClock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(num_steps=3, batch_size=BATCH)
    for step in (1, 2, 3):
        clock.now += 0.5
        progress.step(step, Measured(step, step / 2, step / 2))
    progress.close()
    assert lines(capsys) == ["step 3/3  128 samples/s  0:00 left"]


def test_a_resumed_run_counts_only_its_own_steps(clock: FakeClock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(num_steps=1000, batch_size=BATCH, first_step=900)
    clock.now += 10
    progress.step(950, Measured(950, 10, 10))
    assert lines(capsys) == ["step 950/1000  320 samples/s  0:10 left"]


# ---------------------------------------------------------------------------------------------------------------------
# Choice of the display


def test_the_display_depends_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(terminal: bool, visible: bool = True, **variables: str) -> type:
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: terminal, write=len, flush=lambda: None))
        for name in ("CI", "TERM"):
            monkeypatch.setenv(name, variables.get(name, ""))
        with progress_for(10, BATCH, 0, visible) as progress:
            return type(progress)

    assert chosen(terminal=False) is Progress
    assert chosen(terminal=True, TERM="xterm") is Bar
    assert chosen(terminal=True, TERM="dumb") is Progress
    assert chosen(terminal=True, TERM="xterm", CI="true") is Progress
    assert chosen(terminal=True, TERM="xterm", visible=False) is Silent
    monkeypatch.setattr(sys, "stderr", None)  # closed by the caller
    assert type(progress_for(10, BATCH, 0, visible=True)) is Progress


# ---------------------------------------------------------------------------------------------------------------------
# On a terminal


def on_a_terminal(program: list[str], cwd: Path) -> str:
    """Run `program` on a pseudoterminal with 120 columns, and return its output."""
    ours, theirs = pty.openpty()
    environment = child_environment(TERM="xterm-256color", COLUMNS="120")
    process = subprocess.Popen(program, cwd=cwd, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    sent = b""
    with suppress(OSError):  # on Linux, the error when the other end is closed
        while part := os.read(ours, 65536):
            sent += part
    os.close(ours)
    assert process.wait(timeout=TIMEOUT_SECONDS) == 0, sent.decode()
    return sent.decode()


ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*(3[0-8]|4[0-8]|9[0-7])[0-9;]*m")


def test_the_command_draws_a_bar_and_restores_the_terminal(tmp_path: Path) -> None:
    sent = on_a_terminal([sys.executable, "-m", "runner", *TINY_CPU, "steps=100", "log_every=10"], tmp_path)
    assert COLOUR.search(sent)
    plain = ESCAPE.sub("", sent)
    numbers = r"(?:eval/\w+ \S+  )*loss \S+  accuracy \S+  .*?[\d,]+ samples/s  \d+:\d\d left"
    shown = re.findall(rf"━+ +(\d+)/100 +{numbers}", plain)
    assert shown[-1] == "100", plain
    assert "done after step 100/100" in plain
    assert sent.count("\x1b[?25l") == sent.count("\x1b[?25h") == 1, "the cursor is hidden, and shown again"
    assert all(len(line) <= 120 for line in re.split(r"[\r\n]+", plain) if "/100 " in line)
