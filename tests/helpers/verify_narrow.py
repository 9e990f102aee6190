"""Record the first steps for `runner verify` with narrow networks, also in persistent ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.narrow_resnet import use_narrow_resnet
from runner.run import build_run
from runner.verification import steps as verify_steps
from runner.verification.steps import Steps


def use_narrow_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_steps, "build_run", lambda config: use_narrow_resnet(build_run(config)))


def record_first_steps(configs: list[dict[str, Any]], directory: Path) -> list[Steps] | None:
    """Record the first steps of the runs of `configs`, with narrow networks; called in each process of the runs."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(directory))
        use_narrow_networks(monkeypatch)
        run = build_run(configs[0])
        with run.parallel.launcher(run.device).connect() as process:
            verify_steps.record_runs(configs, directory, process)
            if process.rank > 0:
                return None
            return [
                Steps(**torch.load(directory / f"{number}.pt", weights_only=True)) for number in range(len(configs))
            ]
