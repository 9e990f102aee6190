"""Tests of `Launcher`, which trains in the current process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, prepare_session

from runner.parallel.collectives import Collectives
from runner.parallel.launch.launcher import Launcher


def test_the_current_process_is_the_only_rank() -> None:
    devices = [torch.device("cpu")]
    with Launcher(devices).connect() as process:
        assert type(process) is Collectives
        assert (process.rank, process.world_size, process.devices) == (0, 1, devices)


def test_training_runs_in_the_current_process_and_errors_propagate(tmp_path: Path) -> None:
    session = prepare_session(build_composed_run(*TINY_CPU))
    launcher = Launcher([torch.device("cpu")])

    def fail() -> None:
        raise ZeroDivisionError

    def unreachable(_: object) -> None:
        raise AssertionError("no process is started")

    assert launcher.launch(lambda: 7, unreachable, session, tmp_path) == 7
    with pytest.raises(ZeroDivisionError):
        launcher.launch(fail, unreachable, session, tmp_path)
