"""The first steps of `runner.tools.verify` of narrow networks, also in processes that stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.narrow import narrowed
from runner.run import build_run
from runner.tools import verify_steps
from runner.tools.verify_steps import Steps


def narrow_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are those of networks of half the width."""
    monkeypatch.setattr(verify_steps, "build_run", lambda config: narrowed(build_run(config)))


def record_here(configs: list[dict[str, Any]], directory: Path) -> list[Steps] | None:
    """What `first_steps` returns of the runs of `configs`, in one of several processes; of rank 0, where it is.

    Args:
        directory: for files; packages that are declared there may hold components.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(directory))
        narrow_runs(monkeypatch)
        run = build_run(configs[0])
        with run.parallel.launcher(run.device).connect() as process:
            verify_steps.record_runs(configs, directory, process)
            if process.rank_info.rank > 0:
                return None
            return [
                Steps(**torch.load(directory / f"{number}.pt", weights_only=True)) for number in range(len(configs))
            ]
