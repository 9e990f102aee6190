"""Tests of the sweep display: a paused job is counted once, and the summary shows how many jobs were pruned."""

from __future__ import annotations

from pathlib import Path

import pytest

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
