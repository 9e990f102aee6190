"""Tests of the objective of a search, which is read from results and event files that anybody may have written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from runner.config.errors import ConfigError
from runner.sweep.objective import Curve, Objective
from runner.tracking.event_file import EventFile, points, record

TAG = "eval/loss"


@pytest.mark.parametrize("best", [True, False])
def test_the_value_is_the_best_or_the_last_one(best: bool) -> None:
    result = {"metrics": {TAG: 3}, "best": {"metric": TAG, "value": 1.5, "step": 2}}
    assert Objective(TAG, "min", best).value(result) == (1.5 if best else 3.0)
    assert Objective("eval/accuracy", "max", best).value({"metrics": {"eval/accuracy": 0.5}}) == 0.5


@pytest.mark.parametrize("value", [None, "abc", [1], {}, 10**400])
@pytest.mark.parametrize("best", [True, False])
def test_a_value_that_is_no_number_is_refused(best: bool, value: Any) -> None:
    result = {"metrics": {TAG: value}, "best": {"metric": TAG, "value": value, "step": 2}}
    with pytest.raises(ConfigError) as refused:
        Objective(TAG, "min", best).value(result)
    assert (refused.value.key, refused.value.got) == ("sweep.metric", TAG)
    assert "is not a number" in refused.value.why


def write_curve(directory: Path, values: dict[int, float]) -> None:
    file = EventFile(directory, 1)
    for step, value in values.items():
        file.add(points({TAG: value}), step)
    file.close()


@pytest.mark.parametrize("kind", ["link", "directory", "pipe", "no record", "no event"])
def test_event_files_that_cannot_be_read_are_ignored(kind: str, tmp_path: Path) -> None:
    write_curve(tmp_path, {1: 0.5, 2: 0.25})
    bad = tmp_path / "events.out.tfevents.0"
    if kind == "link":
        bad.symlink_to("nothing")
    elif kind == "directory":
        bad.mkdir()
    elif kind == "pipe":
        os.mkfifo(bad)
    elif kind == "no record":
        bad.write_bytes(b"x" * 100)
    else:
        bad.write_bytes(record(b"\xff\xff\xff"))
    curve = Curve(tmp_path, TAG)
    assert curve.read() == [0.5, 0.25]
    write_curve(tmp_path, {3: 0.125})
    assert curve.read() == [0.125], "a session from step 1 replaces the values of the earlier one"
