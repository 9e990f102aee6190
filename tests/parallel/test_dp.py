"""Tests of `DataParallel`: its warning on one device, its pitfalls, and its results on several GPUs."""

import logging
import threading
from dataclasses import replace

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, prepare_session
from helpers.plain_loop import PLAIN_LOOP_OVERRIDES, largest_difference, weights_at
from torch import nn

from runner.config.errors import ConfigError
from runner.parallel.collectives import Collectives
from runner.planning.fake_step import prepared, trace_ranks

GPUS = [torch.device("cuda", index) for index in range(2)]


def test_dp_on_one_device_warns_and_equals_single(trained, caplog):
    wanted = weights_at(trained(*PLAIN_LOOP_OVERRIDES, directory="single").directory, 10)
    with caplog.at_level(logging.WARNING):
        got = weights_at(trained(*PLAIN_LOOP_OVERRIDES, "parallel=dp", directory="dp").directory, 10)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["parallel=dp: there is one device, cpu: nothing is split, this is parallel=single"]
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_replica_threads_use_the_autocast_dtype():
    """DataParallel enables autocast in its threads without setting the dtype, so they would compute in float16."""
    run, devices = build_composed_run(*TINY_CPU, "parallel=dp", "precision=bf16"), GPUS
    session = prepare_session(run)
    model = nn.Linear(2, 2)
    model.to = lambda *_, **__: model  # there is no GPU here
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


def test_a_compiled_network_is_refused_on_two_gpus():
    """A replica has the attributes of the network, and so calls the compiled function of the network itself."""
    run = build_composed_run(*TINY_CPU, "parallel=dp", "compile=blocks")
    with pytest.raises(ConfigError) as refusal:
        run.session(Collectives(GPUS))
    assert (refusal.value.key, refusal.value.got) == ("compile", "blocks")


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@two_gpus
@pytest.mark.cases(
    (("precision=32",), 1e-6),
    (("precision=32", "accumulation=2"), 1e-6),
    (("precision=64",), 1e-13),
    (("precision=16",), 0.05),
    (("precision=bf16",), 0.05),
)
def test_two_gpus_compute_what_one_computes(options, tolerance, trained):
    overrides = (*PLAIN_LOOP_OVERRIDES, "device=cuda", "eval_every=5", *options)
    one = trained(*overrides, directory="one")
    two = trained(*overrides, "parallel=dp", "device.indices=[0,1]", directory="two")
    assert largest_difference(weights_at(two.directory, 10), weights_at(one.directory, 10)) <= tolerance
    assert two.result.metrics == pytest.approx(one.result.metrics, rel=max(tolerance, 1e-5))


@pytest.mark.gpu
@two_gpus
def test_a_plan_for_two_gpus_counts_the_whole_batch():
    runs = [build_composed_run(*PLAIN_LOOP_OVERRIDES, "device=cuda", f"parallel={mode}") for mode in ("single", "dp")]
    (one,), (two,) = (trace_ranks(run, prepared(run)) for run in runs)
    assert two == one
