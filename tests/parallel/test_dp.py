"""Tests of `DataParallel`: its warning on one device, its pitfalls, and its results on several GPUs."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest
import torch
import yaml
from helpers.compose import TINY_CPU, build_composed_run, prepare_session
from helpers.plain_loop import PLAIN_LOOP_OVERRIDES, largest_difference, weights_at
from torch import nn

from runner.config.errors import ConfigError
from runner.parallel.collectives import Collectives
from runner.planning.fake_step import trace
from runner.planning.planned_session import prepared


def test_dp_on_one_device_warns_and_equals_single(trained, caplog: pytest.LogCaptureFixture) -> None:
    wanted = weights_at(trained(*PLAIN_LOOP_OVERRIDES, directory="single").directory, 10)
    with caplog.at_level(logging.WARNING):
        got = weights_at(trained(*PLAIN_LOOP_OVERRIDES, "parallel=dp", directory="dp").directory, 10)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["parallel=dp: there is one device, cpu: nothing is split, this is parallel=single"]
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_replica_threads_use_the_autocast_dtype() -> None:
    """DataParallel enables autocast in its threads without setting the dtype, so they would compute in float16."""
    run, devices = (
        build_composed_run(*TINY_CPU, "parallel=dp", "precision=bf16"),
        [torch.device("cuda", i) for i in range(2)],
    )
    session = prepare_session(run)
    model = nn.Linear(2, 2)
    model.to = lambda *_, **__: model  # type: ignore[method-assign]  # there is no GPU here
    run.parallel.place(model, replace(session, collectives=Collectives(devices)))
    seen = []

    def replica() -> None:
        seen.append(torch.get_autocast_dtype("cuda"))
        model(torch.zeros(1, 2))
        seen.append(torch.get_autocast_dtype("cuda"))

    thread = threading.Thread(target=replica)
    thread.start()
    thread.join()
    assert seen == [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("how", ["true", "blocks"])
def test_a_compiled_network_is_refused_on_two_gpus(how: str) -> None:
    """A replica has the attributes of the network, and so calls the compiled function of the network itself."""
    run = build_composed_run(*TINY_CPU, "parallel=dp", f"compile={how}")
    with pytest.raises(ConfigError) as refusal:
        run.session(Collectives([torch.device("cuda", index) for index in range(2)]))
    assert (refusal.value.key, refusal.value.got) == ("compile", yaml.safe_load(how))


# ---------------------------------------------------------------------------------------------------------------------
# On GPUs


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_gpus_compute_what_one_computes(accumulation: int, trained) -> None:
    overrides = (*PLAIN_LOOP_OVERRIDES, "device=cuda", f"accumulation={accumulation}", "eval_every=5")
    one = trained(*overrides, directory="one")
    two = trained(*overrides, "parallel=dp", "device.indices=[0,1]", directory="two")
    assert largest_difference(weights_at(two.directory, 10), weights_at(one.directory, 10)) <= 1e-6
    assert two.result.metrics == pytest.approx(one.result.metrics, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("precision", ["16", "bf16", "64"])
def test_two_gpus_compute_what_one_computes_in_every_precision(precision: str, trained) -> None:
    overrides = (*PLAIN_LOOP_OVERRIDES, "device=cuda", f"precision={precision}")
    one = trained(*overrides, directory="one")
    two = trained(*overrides, "parallel=dp", "device.indices=[0,1]", directory="two")
    tolerance = 1e-13 if precision == "64" else 0.05
    assert largest_difference(weights_at(two.directory, 10), weights_at(one.directory, 10)) <= tolerance


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_plan_for_two_gpus_counts_the_whole_batch() -> None:
    runs = [build_composed_run(*PLAIN_LOOP_OVERRIDES, "device=cuda", f"parallel={mode}") for mode in ("single", "dp")]
    (one,), (two,) = (trace(run, prepared(run)) for run in runs)
    assert two == one
