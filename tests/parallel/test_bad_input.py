"""Tests of options that parallel modes refuse before any rank is started."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.compose import TINY_CPU, build_composed_run, prepare_session, train_in
from helpers.fake_cuda import simulate_accelerators

import runner.parallel.launch.processes
from runner.config.errors import ConfigError


class Bad(NamedTuple):
    """Invalid overrides, with the key and value of the `ConfigError`, and words in its reason or remedy.

    Args:
        gpus: number of GPUs that torch pretends to find.
    """

    overrides: str
    key: str
    got: str
    words: list[str]
    gpus: int = 0


TABLE = [
    # processes
    Bad("parallel=ddp parallel.processes=0", "parallel.processes", "0", ["≥ 1"]),
    Bad("parallel=ddp parallel.processes=two", "parallel.processes", "two", ["parallel.processes=2"]),
    Bad("parallel=ddp parallel.processes=4", "parallel.processes", "4", ["2 GPUs may be used", "at most 2"], gpus=2),
    # the batch
    Bad("parallel=ddp parallel.processes=4 batch_size=2", "batch_size", "2", ["batch_size=4"]),
    Bad("parallel=fsdp parallel.processes=3 batch_size=64", "batch_size", "64", ["batch_size=63 or batch_size=66"]),
    # devices
    Bad("parallel=hogwild device=cuda", "device.kind", "cuda", ["parallel=ddp"], gpus=2),
    Bad("parallel=ddp device=mps", "device.kind", "mps", ["share one device", "parallel=single"]),
    Bad("parallel=fsdp device=cuda", "device.kind", "cuda", ["torch finds no CUDA device", "device=auto"]),
    Bad(
        "parallel=ddp device=cuda device.index=2", "device.index", "2", ["2 CUDA devices are visible", "0 to 1"], gpus=2
    ),
    Bad("parallel=ddp device=cuda device.indices=[0,7]", "device.indices", "[0, 7]", ["0 to 1"], gpus=2),
    # options
    Bad("parallel=ddp parallel.static_graph=true accumulation=2", "parallel.static_graph", "True", ["accumulation=1"]),
    Bad("parallel=ddp parallel.compression=zip", "parallel.compression", "zip", ["powersgd"]),
]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each attempt to start the fork server or a supervisor adds `server` or `supervisor`.

    The functions that would start them are replaced, so that nothing is started.
    """
    calls: list[str] = []
    monkeypatch.setattr(runner.parallel.launch.processes, "start_server", lambda *_: calls.append("server"))
    monkeypatch.setattr(runner.parallel.launch.processes, "Supervisor", lambda *_: calls.append("supervisor"))
    return calls


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.overrides)
def test_bad_input_is_refused_before_a_process_starts(
    bad: Bad, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the fork server may start, to import torch for the ranks while this process reads the data."""
    simulate_accelerators(monkeypatch, bad.gpus)
    with pytest.raises(ConfigError) as refusal:
        prepare_session(build_composed_run(*bad.overrides.split()))
    assert (refusal.value.key, str(refusal.value.got)) == (bad.key, bad.got)
    for word in bad.words:
        assert word in f"{refusal.value.why}\n{refusal.value.remedy}"
    assert len(str(refusal.value).splitlines()) <= 10
    assert "supervisor" not in started


def test_good_input_starts_the_fork_server_and_then_the_ranks(started: list[str], tmp_path: Path) -> None:
    """`started` must record each start, because `test_bad_input_is_refused_before_a_process_starts` relies on it."""
    run = build_composed_run(*TINY_CPU, "parallel=ddp")
    prepare_session(run)
    assert started == ["server"]
    with pytest.raises(TypeError):  # the fake supervisor is not a context manager
        train_in(tmp_path, run)
    assert started == ["server", "server", "supervisor"]
