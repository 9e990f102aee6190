"""Tests of `Launcher`, which trains in the current process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, prepare_session

from runner.parallel.collectives import Collectives
from runner.parallel.launch.cluster import RankInfo
from runner.parallel.launch.launcher import Launcher


def test_the_current_process_is_the_only_rank() -> None:
    devices = [torch.device("cpu")]
    with Launcher(devices).connect() as process:
        assert process.rank_info == RankInfo()
        assert process.devices == devices
        assert type(process.collectives) is Collectives
        assert process.shared_state is None


def test_training_runs_in_the_current_process_and_errors_propagate(tmp_path: Path) -> None:
    context = prepare_session(build_composed_run(*TINY_CPU)).context
    launcher = Launcher([torch.device("cpu")])

    def fail() -> None:
        raise ZeroDivisionError

    def unreachable(_: object) -> None:
        raise AssertionError("no process is started")

    assert launcher.launch(lambda: 7, unreachable, context, tmp_path) == 7
    with pytest.raises(ZeroDivisionError):
        launcher.launch(fail, unreachable, context, tmp_path)
