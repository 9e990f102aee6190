"""Tests of `Parallel`, the single-device mode from which the other modes inherit."""

from __future__ import annotations

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, prepare_session

from runner.config.errors import ConfigError
from runner.parallel.launch.cluster import RankInfo


@pytest.mark.parametrize("mode", ["single", "dp", "model", "hogwild", "pipeline parallel.engine=streams"])
def test_several_externally_launched_processes_are_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RankInfo(1, 2, 1, 2, "127.0.0.1", 1234).variables().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refusal:
        prepare_session(build_composed_run(*TINY_CPU, *f"parallel={mode}".split()))
    assert (refusal.value.key, refusal.value.got) == ("parallel.processes", 2)


def test_an_evaluation_covers_every_held_out_sample_in_inference_mode() -> None:
    run = build_composed_run(*TINY_CPU)
    session = prepare_session(run)
    model = run.parallel.place(session.workload.build_model(), session)
    seen: list[bool] = []
    model.register_forward_hook(
        lambda module, *_: seen.append(torch.is_inference_mode_enabled() and not module.training)
    )
    metrics, sums = run.parallel.evaluate(model.eval())
    assert int(sums["count"]) == 359
    assert metrics.keys() == {"loss", "accuracy"}
    assert all(seen)
    assert seen
