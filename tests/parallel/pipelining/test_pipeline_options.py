"""Tests of the options of `pipeline` and `model`: invalid ones are refused, unset ones and micro-batches derived."""

import pytest
import torch
from helpers.compose import build_composed_run, prepare_session
from helpers.fake_cuda import simulate_accelerators
from torch.torch_version import TorchVersion

from runner.config.errors import ConfigError
from runner.parallel.pipeline import Pipeline
from runner.parallel.pipelining.schedules import check_split_backward, num_micro_batches
from runner.parallel.session import Session
from runner.planning.fake_step import first_process

TINY = ("model=tiny", "data.size=8")


def prepare(*overrides: str) -> Session:
    return prepare_session(build_composed_run(*TINY, "parallel=pipeline", *overrides))


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        prepare(*overrides)
    return refused.value


@pytest.mark.cases(
    ("parallel.cuts=[conv3]", "cuts", "conv3", "did you mean conv2 or conv1?"),
    ("parallel.cuts=[head] parallel.stages=3", "stages", 3, "parallel.stages=null"),
    ("parallel.cuts=3", "cuts", 3, "parallel.cuts=[layer3]"),
    ("parallel.cuts=[]", "cuts", [], "parallel.cuts=[layer3]"),
    ("parallel.stages=5", "stages", 5, "parallel.stages=4"),
    ("parallel.processes=1", "processes", 1, "parallel.engine=streams"),
    ("parallel.stages=4 parallel.processes=2", "stages", 4, "parallel.processes=auto"),
    ("parallel.stages=4 parallel.processes=50", "stages", 4, "parallel.processes=auto"),
    ("parallel.processes=50", "processes", 50, "parallel.processes=4"),
    ("parallel.schedule=zero_bubble parallel.stages=3 parallel.processes=2", "stages", 3, "parallel.processes=auto"),
    ("parallel.schedule=interleaved_1f1b parallel.processes=3", "processes", 3, "parallel.processes=2"),
    ("parallel.schedule=interleaved_1f1b parallel.processes=50", "processes", 50, "parallel.processes=2"),
    (
        "parallel.schedule=interleaved_1f1b parallel.stages=4 parallel.processes=50",
        "stages",
        4,
        "parallel.processes=auto",
    ),
    ("parallel.split_size=12", "split_size", 12, "split_size=8 or parallel.split_size=16"),
    ("parallel.engine=streams parallel.processes=2", "processes", 2, "parallel.engine=processes"),
    ("parallel.engine=streams parallel.schedule=1f1b", "schedule", "1f1b", "parallel.schedule=gpipe"),
    (
        "parallel.schedule=zero_bubble compile=true data=imagefolder data.root=/nowhere",  # no data is read
        *("compile", True, "compile=false"),
    ),
    ("device=mps", "device.kind", "mps", "device=cpu"),
)
def test_invalid_options_are_refused(overrides, key, got, remedy):
    error = refusal(*overrides.split())
    assert error.key == (key if key == "compile" or "." in key else f"parallel.{key}")
    assert error.got == got
    assert remedy in error.remedy
    assert len(str(error).splitlines()) <= 3
    if remedy.startswith(("parallel.stages=", "parallel.processes=")):
        prepare(*overrides.split(), remedy)  # what is suggested is accepted


@pytest.mark.parametrize("mode", ["pipeline", "model"])
def test_a_workload_without_a_criterion_is_refused_before_its_data_is_read(mode):
    run = build_composed_run("workload=dqn", f"parallel={mode}")
    with pytest.raises(ConfigError) as refused:
        run.session(first_process(run))
    assert (refused.value.key, refused.value.got) == ("workload", "dqn")
    assert "ddp" in refused.value.remedy


@pytest.mark.cases(
    ("", 2, 2, 8),
    ("parallel.stages=3", 3, 3, 16),
    ("parallel.cuts=[conv2,head]", 3, 3, 16),
    ("parallel.processes=3", 3, 3, 16),
    ("parallel.schedule=interleaved_1f1b", 4, 2, 16),
    ("parallel.schedule=interleaved_1f1b parallel.stages=4", 4, 2, 16),
    ("parallel.schedule=zero_bubble parallel.stages=4 parallel.processes=2", 4, 2, 16),
    ("parallel.engine=streams", 2, 1, 8),
    ("parallel.engine=streams parallel.stages=4", 4, 1, 16),
    ("parallel.split_size=16 accumulation=2", 2, 2, 2),
)
def test_unset_options_are_derived_from_the_others(overrides, stages, processes, micros):
    session = prepare(*overrides.split())
    mode = build_composed_run(*TINY, "parallel=pipeline", *overrides.split()).parallel
    assert isinstance(mode, Pipeline)
    found = (mode.num_stages(session), session.world_size, session.plan.chunks)
    assert found == (stages, processes, micros)
    assert session.plan.data_shard == (0, 1), "every process goes through the same batches"


@pytest.fixture
def _two_gpus(monkeypatch) -> None:
    simulate_accelerators(monkeypatch, 2)


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.cases(
    ("parallel.stages=3", "parallel.processes", 3, "at most 2"),
    ("parallel.engine=streams parallel.stages=3", "parallel.stages", 3, "parallel.stages=2"),
    ("device.indices=[1]", "parallel.processes", 1, "parallel.processes=2"),
    ("parallel=model parallel.stages=3", "parallel.stages", 3, "parallel.stages=2"),
    ("parallel=model parallel.cuts=[nowhere]", "parallel.cuts", "nowhere", "conv2"),
)
def test_more_stages_than_devices_are_refused(overrides, key, got, remedy):
    error = refusal(*overrides.split())
    assert (error.key, error.got) == (key, got)
    assert remedy in error.remedy


GPIPE, FOUR_1F1B, ZERO_BUBBLE = ("gpipe", 2, 2), ("1f1b", 4, 4), ("zero_bubble", 2, 2)
"""Schedules, with the numbers of stages and processes."""


@pytest.mark.cases(
    (120, 12, None, GPIPE, 10),
    (120, 12, 10, GPIPE, 10),
    (120, None, None, GPIPE, 8),
    (120, None, None, ("gpipe", 4, 4), 15),
    (12, None, None, ("gpipe", 3, 3), 6),
    (7, None, None, GPIPE, 7),
    (7, 7, None, GPIPE, 1),
    (1, None, None, GPIPE, 1),
    (48, None, None, ("1f1b", 3, 3), 12),
    (10, None, None, ("interleaved_1f1b", 8, 4), 5),
    (64, None, None, ("zero_bubble", 2, 2), 8),
)
def test_the_number_of_micro_batches(samples, size, count, pipeline, found):
    assert num_micro_batches(samples, size, count, *pipeline) == found


@pytest.mark.cases(
    (120, 7, None, GPIPE, "split_size", 7, "split_size=6 or parallel.split_size=8"),
    (120, 200, None, GPIPE, "split_size", 200, "split_size=120"),
    (64, None, 65, GPIPE, "num_micro_batches", 65, "num_micro_batches=64"),
    (64, None, 3, GPIPE, "num_micro_batches", 3, "num_micro_batches=2 or parallel.num_micro_batches=4"),
    (64, 8, 4, GPIPE, "num_micro_batches", 4, "one of the two"),
    (64, 32, None, FOUR_1F1B, "split_size", 32, "split_size=16"),
    (8, None, 1, ("interleaved_1f1b", 4, 2), "num_micro_batches", 1, "num_micro_batches=2"),
    (30, None, 5, ZERO_BUBBLE, "num_micro_batches", 5, "num_micro_batches=3 or parallel.num_micro_batches=6"),
    (2, None, None, ("1f1b", 3, 3), "schedule", "1f1b", "parallel.schedule=gpipe"),
)
def test_the_error_for_an_impossible_split_suggests_the_nearest_possible_ones(
    samples, size, count, pipeline, key, got, remedy
):
    with pytest.raises(ConfigError) as refusal:
        num_micro_batches(samples, size, count, *pipeline)
    assert (refusal.value.key, refusal.value.got) == (f"parallel.{key}", got)
    assert remedy in refusal.value.remedy


def test_zero_bubble_with_group_normalization_is_refused_with_a_torch_that_crashes(monkeypatch):
    grouped, batched = (torch.nn.Sequential(norm) for norm in (torch.nn.GroupNorm(1, 2), torch.nn.BatchNorm2d(2)))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.0"))
    check_split_backward("zero_bubble", grouped)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cpu"))
    check_split_backward("1f1b", grouped)
    check_split_backward("zero_bubble", batched)
    with pytest.raises(ConfigError, match=r"zero_bubble.*torch 2\.1[13]\.0\+cpu crashes") as error:
        check_split_backward("zero_bubble", grouped)
    assert error.value.key == "parallel.schedule"
