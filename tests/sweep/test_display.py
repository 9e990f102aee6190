"""Tests of the sweep display: a paused job is counted once, and the summary shows how many jobs were pruned."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len

from runner.sweep.display import Display, Table
from runner.sweep.scheduler import PlannedJob


def job(number: int) -> PlannedJob:
    return PlannedJob(number, [f"seed={number}"], [], Path("x"), "a hash")


def end(display: Display, number: int, state: str) -> None:
    display.started(job(number), "a slot", Path("console"))
    display.ended(job(number), state, "", {}, Path("console"))


@pytest.mark.parametrize("table", [False, True])
def test_a_paused_job_is_counted_once_with_its_final_state(table: bool) -> None:
    display = Table(3, ["seed"], lambda _: "") if table else Display(3, ["seed"])
    end(display, 0, "pruned")
    assert display.counts == {"pruned": 1}
    display.started(job(0), "a slot", Path("console"))
    assert display.counts == {}, "it is running again"
    display.ended(job(0), "done", "", {}, Path("console"))
    display.known(job(1), "done")
    end(display, 2, "pruned")
    assert display.counts == {"done": 2, "pruned": 1}


def test_the_summary_shows_how_many_jobs_were_pruned(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(3, ["seed"])
    end(display, 0, "done")
    display.summary()
    assert capsys.readouterr().out == "\n1 of 3 jobs done\n"
    end(display, 1, "pruned")
    display.summary()
    assert capsys.readouterr().out == "\n1 of 3 jobs done, 1 pruned\n"


@pytest.mark.parametrize(
    "title",
    ["模型" * 40, "🦆" * 40, "ab模" * 20, "x" * 80, "a\tb" * 30],
    ids=["CJK", "emoji", "mixed", "Latin", "tabs"],
)
def test_no_line_of_the_table_is_wider_than_the_terminal(
    title: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "6")
    table = Table(9, ["name"], lambda _: "last line")
    for number in range(9):
        table.started(PlannedJob(number, [f"name={title}"], [], Path("x"), "a hash"), "a slot", Path("console"))
    table.refresh()
    status, *rows = capsys.readouterr().err.expandtabs().splitlines()
    assert status == "9 running"
    assert [cell_len(row) in (38, 39) for row in rows] == [True] * 4, "one more line would scroll"
