"""Tests of `runner.planning.candidates`: the candidates of a run, and their effects on the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
from helpers.compose import TINY_CPU, build_composed_run
from hydra.errors import HydraException

from runner.config.errors import ConfigError
from runner.parallel.context import Tuning
from runner.parallel.fsdp import FSDP
from runner.planning import candidates as module
from runner.planning.candidates import Candidates
from runner.run import Run

RESNET = ("model=resnet18", "data=synthetic", "data.size=8", "data.num_samples=64", "device=cpu")


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the default number of threads larger than the number of cores, as in a container with limited cores."""
    monkeypatch.setattr(module, "default_threads", lambda *_: 64)


def of(*typed: str, cores: int = 2) -> Candidates:
    def compose(more: Sequence[str]) -> Run:
        return build_composed_run(*typed, *more)

    with patch.object(module, "usable_core_numbers", lambda: list(range(cores))):
        return Candidates(compose, typed)


def layouts(*typed: str, cores: int = 2) -> list[str]:
    return [" ".join(words) for words in of(*typed, cores=cores).layouts()]


def results(candidates: Candidates, *words: str) -> str:
    judged = candidates.judged(words)
    return judged.results or judged.refusal


def test_layouts_are_modes_processes_and_threads() -> None:
    found = layouts("model=convnet", "device=cpu", cores=4)
    assert found[0] == ""
    assert "device.threads=2" in found
    assert "device.threads=1" in found
    assert {f"parallel={mode} parallel.processes={n}" for mode in ("ddp", "fsdp", "hogwild") for n in (2, 4)} <= {
        *found
    }
    assert sum(text.startswith("parallel=pipeline parallel.processes=2 parallel.split_size=") for text in found) == 3
    assert len({*found}) == len(found)


@pytest.mark.parametrize(("default", "others"), [(64, [4, 2, 1]), (4, [2, 1]), (1, [4, 2]), (2, [4, 1])])
def test_the_default_number_of_threads_is_not_a_candidate(
    default: int, others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "default_threads", lambda *_: default)
    found = [text for text in layouts("model=convnet", "device=cpu", cores=4) if text.startswith("device.threads=")]
    assert found == [f"device.threads={count}" for count in others]


def test_a_user_defined_mode_is_tried_with_its_proposed_options(tmp_path: Path) -> None:
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "mine.yaml").touch()

    class Mine(FSDP):
        speed_options: ClassVar[dict[str, Any]] = {"timeout": (60.0, 300.0)}

        def alternatives(self, tuning: Tuning) -> Iterator[dict[str, Any]]:
            proposals.append(tuning)
            yield {"max_restarts": tuning.samples}

    def compose(more: Sequence[str]) -> Run:
        try:
            run = build_composed_run("model=convnet", "device=cpu", *(text.replace("=mine", "=fsdp") for text in more))
        except HydraException as error:
            raise ConfigError("overrides", more, str(error), "another mode") from error
        if "parallel=mine" in more:
            run.parallel = Mine(run.parallel.processes, run.parallel.timeout)  # pyright: ignore
        return run

    proposals: list[Tuning] = []
    with patch.object(module, "usable_core_numbers", lambda: [0, 1]):
        candidates = Candidates(compose, (), str(tmp_path))
        words = ("parallel=mine", "parallel.processes=2", "parallel.max_restarts=64")
        assert words in [*candidates.layouts()]
    assert [(each.world_size, each.samples, each.normalizes) for each in proposals] == [(2, 64, False)]
    changes = [each.overrides for group in candidates.groups() for each in group(words)]
    assert (*words, "parallel.timeout=60.0") in changes


def test_modes_that_are_never_faster_are_not_tried() -> None:
    found = " ".join(layouts("model=convnet", "device=cpu"))
    assert not any(f"parallel={mode}" in found for mode in ("single", "dp", "model", "ensemble"))


def test_typed_options_are_not_changed() -> None:
    assert layouts("device=cpu", "device.threads=1", "parallel=single") == [""]
    assert layouts("device=cpu", "parallel=ddp", "parallel.processes=2") == [""]
    assert layouts("device=cpu", "parallel=ddp", cores=4) == ["", "parallel.processes=4"]
    refined = [
        change(()) for change in of(*TINY_CPU, "compile=false", "accumulation.steps=2", "parallel=single").groups()
    ]
    found = {text for group in refined for candidate in group for text in candidate.overrides}
    assert found == {"precision=bf16", "channels_last=false"}


def test_a_network_without_blocks_is_only_compiled_as_a_whole() -> None:
    for overrides, expected in ((("workload=dqn",), {"true"}), (("model=convnet",), {"true", "blocks"})):
        groups = [change(()) for change in of(*overrides, "device=cpu", "parallel=single").groups()]
        words = [text for group in groups for candidate in group for text in candidate.overrides]
        assert {text.removeprefix("compile=") for text in words if text.startswith("compile=")} == expected


def test_a_typed_split_size_is_kept() -> None:
    typed = ("device=cpu", "parallel=pipeline", "parallel.split_size=8", "parallel.processes=2")
    assert layouts(*typed) == [""]


def test_a_pipeline_in_one_process_is_tried_with_several_split_sizes() -> None:
    typed = ("model=convnet", "device=cpu", "batch_size=64", "parallel=pipeline", "parallel.engine=streams")
    splits = ["", *(f"parallel.split_size={size}" for size in (16, 8, 4))]  # 4, 8 and 16 micro-batches for two stages
    assert layouts(*typed) == layouts(*typed, "parallel.stages=2") == splits


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "bitwise"),
        ("device.threads=1", "last bits"),
        ("channels_last=false", "last bits"),
        ("parallel=ddp", "last bits"),
        ("parallel=pipeline parallel.split_size=8", "last bits"),
        ("accumulation=4", "last bits"),
        ("precision=tf32", "rounding"),
        ("precision=bf16", "16 bits"),
        ("precision=64", "other"),
        ("parallel=hogwild", "asynchronous"),
        ("parallel=ensemble", "other"),
    ],
)
def test_results_without_batch_normalization(words: str, expected: str) -> None:
    assert results(of("model=convnet", "device=cpu"), *words.split()) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("channels_last=false", "last bits"),
        ("model.checkpoint_activations=true", "bitwise"),
        ("accumulation=2", "statistics"),
        ("parallel=ddp", "statistics"),
        ("parallel=ddp parallel.sync_batch_norm=true", "last bits"),
        ("parallel=ddp parallel.sync_batch_norm=true accumulation=2", "statistics"),
        ("parallel=fsdp", "statistics"),
        ("parallel=pipeline", "statistics"),
    ],
)
def test_results_with_batch_normalization(words: str, expected: str) -> None:
    assert results(of(*RESNET), *words.split()) == expected


def test_micro_batches_of_equal_size_do_not_change_batch_normalization() -> None:
    accumulated = of(*RESNET, "batch_size=32", "accumulation=4")
    assert results(accumulated, "accumulation=1", "parallel=pipeline", "parallel.split_size=8") == "last bits"
    assert results(accumulated, "accumulation=1", "parallel=pipeline", "parallel.split_size=4") == "statistics"


def test_ddp_changes_the_results_of_dqn_and_pipeline_is_refused() -> None:
    agent = of("workload=dqn", "device=cpu")
    assert results(agent, "device.threads=1") == "last bits"
    assert results(agent, "parallel=ddp") == "other"
    assert "workload" in results(agent, "parallel=pipeline")


def test_a_refused_candidate_has_the_reason() -> None:
    odd = of("model=convnet", "device=cpu", "batch_size=63").judged(("parallel=ddp",))
    assert (odd.run, odd.results) == (None, "")
    assert "batch_size" in odd.refusal
