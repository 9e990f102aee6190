"""Tests of each profiler with a small loop: the files that it writes, and the numbers in them."""

import gzip
import json
import logging
import pstats
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.compose import option_content

import runner.system.section_timer
from runner.config.schema import build
from runner.profiler import Advanced, Profiler, Simple, Trace
from runner.system.section_timer import timer

CPU = torch.device("cpu")


def some_function() -> float:
    return float(torch.ones(50, 50).mm(torch.ones(50, 50)).sum())


def train(profiler: Profiler, directory: Path, num_steps: int) -> None:
    with profiler.profile(directory, CPU):
        for step in range(1, num_steps + 1):
            some_function()
            profiler.after_step(step)


@pytest.mark.parametrize("name", ["simple", "advanced", "trace"])
def test_a_profile_that_cannot_be_written_does_not_hide_the_error_of_the_run(name, tmp_path, monkeypatch, caplog):
    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(self))

    def crash(profiler: Profiler) -> None:
        with profiler.profile(tmp_path, CPU):
            for step in range(1, 30):
                profiler.after_step(step)
            raise RuntimeError("the run's own error")

    profiler = build(option_content("profiler", name), Profiler, "profiler")
    monkeypatch.setattr(Path, "write_text", full)
    train(profiler, tmp_path, 30)
    assert "No space left on device" in caplog.text
    with pytest.raises(RuntimeError, match="own error"):
        crash(profiler)


@pytest.fixture
def move(monkeypatch):
    """Return a function that advances the timer's fake clock by a number of seconds."""
    now = [0.0]
    monkeypatch.setattr(runner.system.section_timer, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def move(seconds: float) -> None:
        now[0] += seconds

    yield move
    monkeypatch.undo()
    timer.reset()


def four_steps(profiler: Profiler, directory: Path, device: torch.device, move) -> None:
    with profiler.profile(directory, device):
        for step in range(1, 5):
            with timer.section("data"):
                move(0.25)
            for _ in range(2):
                with timer.section("forward"):
                    move(0.5)
            profiler.after_step(step)
        move(3)


def test_simple_writes_a_table_of_the_time_per_section(tmp_path, move, caplog):
    caplog.set_level(logging.INFO)
    move(1000)  # before the profile: not counted
    four_steps(Simple(), tmp_path, CPU, move)
    text = (tmp_path / "profile" / "simple.txt").read_text()
    assert [line.split() for line in text.splitlines()] == [
        ["section", "calls", "seconds", "share", "ms/call"],
        ["forward", "8", "4.000", "50.0%", "500.000"],
        ["other", "–", "3.000", "37.5%", "–"],
        ["data", "4", "1.000", "12.5%", "250.000"],
        ["total", "4", "steps", "8.000", "100.0%", "2000.000"],
    ]
    assert text in caplog.text
    assert str(tmp_path / "profile" / "simple.txt") in caplog.text


def test_simple_waits_for_an_accelerator_while_it_profiles(tmp_path, move, monkeypatch):
    waits = []
    monkeypatch.setattr("runner.profiler.synchronize", waits.append)
    device = torch.device("cuda", 1)
    four_steps(Simple(), tmp_path, device, move)
    assert len(waits) == 2 * 12 + 1  # at the beginning and end of 12 sections, and at the end of the profile
    assert set(waits) == {device}
    with timer.section("data"):
        pass
    assert len(waits) == 25


def test_simple_writes_its_table_when_a_run_is_interrupted(tmp_path, move):
    def interrupted() -> None:
        with Simple().profile(tmp_path, CPU), timer.section("data"):
            move(0.5)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "data                1       0.500" in (tmp_path / "profile" / "simple.txt").read_text()


def test_advanced_counts_calls_by_function(tmp_path):
    train(Advanced(), tmp_path, 7)
    stats = pstats.Stats(str(tmp_path / "profile" / "advanced.prof"))
    calls = {name: entry[0] for (_, _, name), entry in stats.stats.items()}  # type: ignore[attr-defined]
    assert calls["some_function"] == 7
    text = (tmp_path / "profile" / "advanced.txt").read_text()
    assert "Ordered by: cumulative time" in text
    assert "Ordered by: internal time" in text
    assert "some_function" in text


def events(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def profiled_steps(path: Path) -> list[str]:
    names = {event["name"] for event in events(path) if event["name"].startswith("ProfilerStep#")}
    return sorted(names)


def test_trace_records_the_active_steps_only(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    train(Trace(wait=2, warmup=1, active=2), tmp_path, 8)
    folder = tmp_path / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["trace.json.gz", "trace.txt"]
    assert profiled_steps(folder / "trace.json.gz") == ["ProfilerStep#3", "ProfilerStep#4"]
    products = [event for event in events(folder / "trace.json.gz") if event["name"] == "aten::mm"]
    assert len(products) == 2  # one per step
    assert "aten::mm" in (folder / "trace.txt").read_text()
    assert "perfetto" in caplog.text
    assert "no trace" not in caplog.text


def test_trace_of_a_run_that_ends_while_recording_has_shapes_and_memory_and_one_that_never_begins_warns(
    tmp_path, caplog
):
    train(Trace(wait=5, warmup=2, active=1), tmp_path, 3)
    assert list((tmp_path / "profile").iterdir()) == []
    assert "no trace" in caplog.text
    assert "profiler.wait + profiler.warmup = 7" in caplog.text
    train(Trace(wait=0, warmup=1, active=5, record_shapes=True, profile_memory=True), tmp_path, 3)
    assert "ProfilerStep#2" in profiled_steps(tmp_path / "profile" / "trace.json.gz")
    text = (tmp_path / "profile" / "trace.txt").read_text()
    assert "[[50, 50], [50, 50]]" in text
    assert "Self CPU Mem" in text


def test_each_rank_except_rank_0_has_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in (3, 0):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        train(Simple(), tmp_path, 1)
    assert {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("*.txt")} == {"profile", "profile/rank_3"}


@pytest.mark.gpu
def test_trace_on_cuda_holds_kernels(tmp_path):
    profiler, device = Trace(wait=1, warmup=1, active=1), torch.device("cuda")
    with profiler.profile(tmp_path, device):
        for step in range(1, 5):
            torch.ones(64, 64, device=device).mm(torch.ones(64, 64, device=device))
            profiler.after_step(step)
    assert any(event.get("cat") == "kernel" for event in events(tmp_path / "profile" / "trace.json.gz"))
    assert "Self CUDA" in (tmp_path / "profile" / "trace.txt").read_text()
