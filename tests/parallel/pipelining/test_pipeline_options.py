"""What a pipeline, or a network over several devices, cannot be: refused before anything is written."""

from __future__ import annotations

import pytest
import torch
from helpers.compose import built

from runner.config.errors import ConfigError
from runner.parallel.pipeline import Pipeline
from runner.run import Run

TINY = ("model=tiny", "data.size=8")
BLOCKS = "the network has 4 blocks: conv1, conv2, hidden, head"


def prepared(*overrides: str) -> Run:
    run = built(*TINY, "parallel=pipeline", *overrides)
    run.prepare()
    return run


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        prepared(*overrides)
    return str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("parallel.cuts=[conv3]", ["parallel.cuts: got 'conv3'", "did you mean conv2 or conv1?"]),
        ("parallel.cuts=[conv1]", ["parallel.cuts: got 'conv1': nothing comes before it", "cut at conv2 or later"]),
        ("parallel.cuts=[head,conv2]", ["not in the network's order", "parallel.cuts=[conv2,head]"]),
        ("parallel.cuts=[head] parallel.stages=3", ["parallel.stages: got 3: 1 cuts make 2 stages"]),
        ("parallel.cuts=3", ["parallel.cuts: got 3: it is neither auto nor a list"]),
        ("parallel.stages=1", ["parallel.stages: got 1: it must be a finite number ≥ 2"]),
        ("parallel.stages=5", ["parallel.stages: got 5", BLOCKS, "at most parallel.stages=4"]),
        ("parallel.processes=1", ["parallel.processes: got 1: a pipeline has two or more", "parallel.engine=streams"]),
        ("parallel.stages=4 parallel.processes=2", ["parallel.stages: got 4: each of the 2 processes has one stage"]),
        ("parallel.schedule=zero_bubble parallel.stages=3 parallel.processes=2", ["got 3", "parallel.stages=2"]),
        ("parallel.schedule=interleaved_1f1b parallel.stages=2", ["parallel.stages: got 2", "at least 2", "stages=4"]),
        ("parallel.schedule=interleaved_1f1b parallel.processes=3", ["parallel.stages: got 6", BLOCKS]),
        (
            "parallel.schedule=interleaved_1f1b parallel.num_micro_batches=1",
            ["got 1", "as many as there are processes"],
        ),
        ("parallel.schedule=2f2b", ["parallel.schedule: got '2f2b': it must be one of gpipe, 1f1b"]),
        ("parallel.split_size=12", ["parallel.split_size: got 12: it does not divide the 64", "=8 or ", "=16"]),
        ("parallel.split_size=12 accumulation=2", ["does not divide the 32", "=8 or ", "=16"]),
        ("parallel.split_size=65", ["parallel.split_size: got 65: there are no more than 64"]),
        ("parallel.split_size=0", ["parallel.split_size: got 0: it must be a finite number ≥ 1"]),
        ("parallel.engine=threads", ["parallel.engine: got 'threads': it must be one of processes, streams"]),
        ("parallel.engine=streams parallel.processes=2", ["parallel.processes: got 2: engine=streams has one"]),
        (
            "parallel.engine=streams parallel.schedule=1f1b",
            ["parallel.schedule: got '1f1b'", "parallel.schedule=gpipe"],
        ),
        ("parallel.schedule=zero_bubble compile=true", ["compile: got True: schedule=zero_bubble"]),
        ("parallel.batch_norm=sync", ["parallel.batch_norm: got 'sync': it must be one of micro, defer"]),
        ("device=mps", ["device.kind: got 'mps'"]),
    ],
)
def test_what_cannot_be_is_refused_with_its_key_and_a_remedy(overrides: str, words: list[str]) -> None:
    told = refusal(*overrides.split())
    for word in words:
        assert word in told, told
    assert "\n  " in told, "and what to do"
    assert len(told.splitlines()) <= 3


@pytest.mark.parametrize("mode", ["pipeline", "model"])
def test_a_workload_without_a_criterion_is_refused(mode: str) -> None:
    run = built("workload=dqn", f"parallel={mode}")
    with pytest.raises(
        ConfigError, match=r"^workload: got 'DQN': its loss is not criterion\(model\(inputs\), targets\)"
    ):
        run.prepare()


def test_a_network_that_cannot_be_cut_is_refused() -> None:
    run = built(*TINY, "parallel=pipeline")
    run.workload.build_model = lambda: torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"^model: got 'Linear': it does not say where it can be cut"):
        run.prepare()


@pytest.mark.parametrize(
    ("overrides", "stages", "processes", "micros"),
    [
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
    ],
)
def test_what_is_not_said_follows_from_the_rest(overrides: str, stages: int, processes: int, micros: int) -> None:
    run = prepared(*overrides.split())
    assert isinstance(run.parallel, Pipeline)
    assert (run.parallel.num_stages, run.parallel.world_size, run.parallel.num_parts) == (stages, processes, micros)
    assert run.plan.shard == (0, 1), "every process walks the same batches"


# ---------------------------------------------------------------------------------------------------------------------
# On a machine with two GPUs


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("parallel.stages=3", ["parallel.processes: got 3: 2 GPUs may be used", "at most 2"]),
        ("parallel.engine=streams parallel.stages=3", ["parallel.stages: got 3: there are 2 GPUs", "stages=2"]),
        ("device.indices=[1]", ["parallel.processes: got 1: a pipeline has two or more"]),
        ("parallel=model parallel.stages=3", ["parallel.stages: got 3: there are 2 GPUs", "stages=2"]),
        ("parallel=model parallel.cuts=[nowhere]", ["parallel.cuts: got 'nowhere'"]),
    ],
)
def test_more_stages_than_devices_are_refused(overrides: str, words: list[str]) -> None:
    told = refusal(*overrides.split())
    for word in words:
        assert word in told, told


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize("mode", ["model", "pipeline parallel.engine=streams"])
def test_the_gpus_that_are_named_are_taken_in_their_order(mode: str) -> None:
    run = prepared(*f"parallel={mode} device.indices=[1,0]".split())
    assert run.parallel._devices == [torch.device("cuda", 1), torch.device("cuda", 0)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["model", "pipeline parallel.engine=streams"])
def test_hidden_gpus_are_refused_unless_the_cpu_is_meant(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "device.kind: got 'auto': CUDA_VISIBLE_DEVICES='' hides every GPU" in refusal(*f"parallel={mode}".split())
    prepared(*f"parallel={mode}".split(), "device=cpu")
