"""Tests of the sweep display: a paused job is counted once, and the summary shows how many jobs were pruned."""

import io
import re
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console

from runner.sweeps.display import Display, message
from runner.sweeps.engines.base import Job


def test_a_paused_job_is_counted_once_with_its_final_state(capsys):
    display = Display(3, ["seed"])
    for number, state in ((0, "pruned"), (1, "pruned"), (0, "done")):
        job = Job(number, [], Path("console"))
        display.started(job, "a slot")
        assert number not in display.states, "it is running"
        display.ended(job, state, "", {})
    display.summary()
    assert capsys.readouterr().out == "\n1 of 3 jobs done, 1 pruned\n"


def test_the_table_fits_into_the_terminal(tmp_path):
    titles = ["模型" * 40, "🦆" * 40, "x" * 80, "a\tb" * 30]
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=40, height=6, color_system=None)
    table = Display(9, ["name"], console)
    (tmp_path / "console").write_text("last line\n")
    for number in range(9):
        table.started(Job(number, [], tmp_path / "console", overrides=[f"name={titles[number % 4]}"]), "a slot")
    table.refresh()
    status, *rows = [
        line for line in re.sub(r"\x1b\[[?0-9]*[a-zA-Z]", "", output.getvalue()).splitlines() if line.strip()
    ]
    assert status.strip() == "9 running"
    assert len(rows) <= 5
    assert all(cell_len(row.rstrip()) <= 40 for row in rows)
    table.close()


def test_message_returns_the_last_ten_lines_of_a_file_but_not_through_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "console").symlink_to("elsewhere")
    path = tmp_path / "elsewhere" / "007.txt"
    assert message(path) == ""
    path.write_bytes(b"x" * 50_000 + b"\n\n" + b"".join(b"line %d \xff\n" % number for number in range(20)))
    assert message(path).splitlines() == [f"line {number} \ufffd" for number in range(10, 20)]
    assert message(tmp_path / "console" / "007.txt") == ""
