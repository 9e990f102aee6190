"""Tests of the progress display: lines with the right numbers, and a progress bar if the output is a terminal."""

import errno
import io
import os
import pty
import re
import select
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.clock import FakeClock
from helpers.command import Command
from helpers.compose import TINY_CPU

import runner.tracking.progress
from runner.tracking.progress import Bar, Progress, progress_for


@pytest.fixture
def clock(monkeypatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(runner.tracking.progress, "time", clock)
    return clock


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert out == "", "standard output is for the result"
    return err.splitlines()


def test_lines_show_the_time_left_the_last_metrics_and_their_steps_every_five_seconds(clock, capsys):
    progress, hidden = (Progress(num_steps=1000, first_step=900, visible=visible) for visible in (True, False))
    clock.now += 60  # the first step compiles
    for step in range(901, 1001):  # 0.15 s each, of which evaluations may be the larger part
        if step == 950:
            rates = {"time/samples_per_second": 1280.4, "time/data_share": 0.5}
            progress.metrics({"eval/member_0/loss": 9.0, "eval/accuracy": 0.5}, 940)
            progress.metrics({"train/loss": 2.34567} | rates, 950)
        progress.step(step)
        hidden.step(step)
        clock.now += 0.15
    shown = "at 950: loss 2.346  at 940: eval/accuracy 0.5  1,280 samples/s"
    assert lines(capsys) == [
        "step 901/1000",
        "step 935/1000  0:10 left",
        f"step 969/1000  0:05 left  {shown}",
        f"step 1000/1000  0:00 left  {shown}",
    ]


@pytest.mark.parametrize("display", [Progress, Bar])
def test_write_errors_of_the_console_are_ignored(display, clock, monkeypatch):
    class Closed(io.StringIO):
        tried = 0

        def write(self, _: str) -> int:
            self.tried += 1
            raise OSError(errno.EIO, "Input/output error")  # as if the terminal was closed

    monkeypatch.setattr(sys, "stderr", closed := Closed())
    with display(num_steps=1000) as progress:
        for step in range(1, 5):
            clock.now += 10
            progress.step(step)
    assert closed.tried > 0


def test_the_display_depends_on_the_terminal(monkeypatch):
    def chosen(terminal: bool, visible: bool = True, **variables: str) -> type:
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: terminal, write=len, flush=lambda: None))
        for name in ("CI", "TERM"):
            monkeypatch.setenv(name, variables.get(name, ""))
        with progress_for(10, 0, visible) as progress:
            return type(progress)

    assert chosen(terminal=False) is Progress
    assert chosen(terminal=True, TERM="xterm") is Bar
    assert chosen(terminal=True, TERM="dumb") is Progress
    assert chosen(terminal=True, TERM="xterm", CI="true") is Progress
    assert chosen(terminal=True, TERM="xterm", visible=False) is Progress
    monkeypatch.setattr(sys, "stderr", None)  # closed by the caller
    assert type(progress_for(10, 0, visible=True)) is Progress


def on_a_terminal(cwd: Path, *arguments: str) -> str:
    """Run the command on a pseudoterminal with 80 columns, and return its output."""
    ours, theirs = pty.openpty()
    (cwd / "console.txt").symlink_to(os.ttyname(theirs))
    command, sent = Command(cwd, *arguments, TERM="xterm-256color", COLUMNS="80"), b""
    while (ready := select.select([ours], [], [], 0.02)[0]) or command.command_exit_code is None:
        sent += os.read(ours, 65536) if ready else b""
    for end in (ours, theirs):
        os.close(end)
    assert command.command_exit_code == 0, sent.decode()
    return sent.decode()


ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*(3[0-8]|4[0-8]|9[0-7])[0-9;]*m")


def test_the_command_draws_a_bar_and_restores_the_terminal(tmp_path):
    sent = on_a_terminal(tmp_path, *TINY_CPU, "steps=100", "log_every=10")
    assert COLOUR.search(sent)
    plain = ESCAPE.sub("", sent)
    shown = re.findall(r"━+ step (\d+)/100  \d+:\d\d left  loss \S+  accuracy \S+", plain)
    assert shown[-1] == "100", plain
    assert "done after step 100/100" in plain
    assert sent.count("\x1b[?25l") == sent.count("\x1b[?25h") == 1, "the cursor is hidden, and shown again"
    assert all(len(line) <= 80 for line in re.split(r"[\r\n]+", plain) if line.startswith("━"))
    assert re.search(r"directory +outputs/classifier/\S{55,}[\r\n]", plain), "paths can be copied"
