"""Tests of the sweep display: a paused job is counted once, and the summary shows how many jobs were pruned."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from runner.sweep.display import Display, message
from runner.sweep.engines.base import Job


def job(number: int) -> Job:
    return Job(number, [], Path("console"), overrides=[f"seed={number}"])


def end(display: Display, number: int, state: str) -> None:
    display.started(job(number), "a slot")
    display.ended(job(number), state, "", {})


def test_a_paused_job_is_counted_once_with_its_final_state(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(3, ["seed"])
    end(display, 0, "pruned")
    assert display.counts == {"pruned": 1}
    display.started(job(0), "a slot")
    assert display.counts == {}, "it is running again"
    display.ended(job(0), "done", "", {})
    display.summary()
    assert capsys.readouterr().out == "\n1 of 3 jobs done\n"
    end(display, 2, "pruned")
    display.summary()
    assert capsys.readouterr().out == "\n1 of 3 jobs done, 1 pruned\n"


@pytest.mark.parametrize(
    "title", ["模型" * 40, "🦆" * 40, "x" * 80, "a\tb" * 30], ids=["CJK", "emoji", "Latin", "tabs"]
)
def test_the_table_fits_into_the_terminal(title: str, tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=40, height=6, color_system=None)
    table = Display(9, ["name"], console)
    (tmp_path / "console").write_text("last line\n")
    for number in range(9):
        table.started(Job(number, [], tmp_path / "console", overrides=[f"name={title}"]), "a slot")
    table.refresh()
    status, *rows = [
        line for line in re.sub(r"\x1b\[[?0-9]*[a-zA-Z]", "", output.getvalue()).splitlines() if line.strip()
    ]
    assert status.strip() == "9 running"
    assert len(rows) <= 5
    assert all(cell_len(row.rstrip()) <= 40 for row in rows)
    table.close()


def test_a_console_file_in_a_symlinked_directory_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "007.txt").write_text("secret\n")
    (tmp_path / "console").symlink_to("elsewhere")
    assert message(tmp_path / "elsewhere" / "007.txt") == "secret"
    assert message(tmp_path / "console" / "007.txt") == ""


def test_message_returns_the_last_ten_lines_of_a_file(tmp_path: Path) -> None:
    assert message(tmp_path / "missing") == ""
    path = tmp_path / "console"
    path.write_bytes(b"x" * 50_000 + b"\n\n" + b"".join(b"line %d \xff\n" % number for number in range(20)))
    assert message(path).splitlines() == [f"line {number} \ufffd" for number in range(10, 20)]
