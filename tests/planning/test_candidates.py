"""Tests of `runner.planning.candidates`: the candidates of a run, and their effects on the results."""

import functools
from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from helpers.compose import build_composed_run

from runner.planning import candidates as module
from runner.planning.candidates import Candidates
from runner.run import Run

RESNET = ("model=resnet18", "data=synthetic", "data.size=8", "data.num_samples=64", "device=cpu")
CONVNET, AGENT = ("model=convnet", "device=cpu"), ("workload=dqn", "device=cpu")


@functools.cache
def of(*typed: str) -> Candidates:
    def compose(more: Sequence[str]) -> Run:
        return build_composed_run(*typed, *more)

    return Candidates(compose, typed)


def options(candidates: Candidates, cores: int = 2) -> dict[str, list[str]]:
    """Return the overrides of each group that has any, for the run without further overrides."""
    threads = patch.object(torch, "get_num_threads", lambda: cores)
    with threads, patch.object(module, "usable_core_numbers", lambda: list(range(cores))):
        found = {group.name: group.options(candidates.base) for group in candidates.groups()}
    return {name: [" ".join(words) for words in each] for name, each in found.items() if each}


def test_groups_change_one_option_and_compiled_candidates_come_last():
    found = options(of(*CONVNET), cores=4)
    assert found["parallel"] == [
        "parallel=single",
        *(
            f"parallel={mode} parallel.processes={count}"
            for count in (2, 4)
            for mode in ("ddp", "ensemble", "fsdp", "hogwild", "pipeline")
        ),
    ]
    assert found["device.threads"] == [f"device.threads={count}" for count in (2, 1)], "four is the default"
    assert options(of(*CONVNET, "parallel=single", "device.threads=1")) == {
        "precision": ["precision=bf16"],
        "parallel": [""],
        "channels_last": ["channels_last=false"],
        "accumulation": [f"accumulation={count}" for count in (1, 2, 4)],
        "compile": ["compile=false", "compile=true", "compile=blocks", "compile=step"],
    }
    assert "parallel=ddp parallel.processes=2 parallel.sync_batch_norm=true" in options(of(*RESNET))["parallel"]
    [*_, compiled] = of(*AGENT).groups()
    assert compiled.options(of(*AGENT).base) == [("compile=false",), ("compile=true",), ("compile=step",)], "no blocks"


@pytest.mark.cases(
    ("parallel=ddp parallel.processes=2", []),
    ("parallel=ddp", ["parallel.processes=2", "parallel.processes=4"]),
    ("parallel=pipeline parallel.engine=streams", []),
)
def test_typed_options_are_not_changed(typed, modes):
    found = options(of(*CONVNET, *typed.split(), "accumulation.steps=2", "compile=false"), cores=4)
    assert found.get("parallel", []) == modes
    assert not {"accumulation", "compile"} & found.keys()


def test_a_pipeline_is_tried_with_other_schedules_and_split_sizes():
    typed = (*CONVNET, "batch_size=64", "parallel=pipeline", "parallel.processes=2", "parallel.num_micro_batches=8")
    schedules = [f"parallel.schedule={name}" for name in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")]
    assert options(of(*typed))["pipeline"] == schedules
    assert options(of(*typed[:-1]))["pipeline"] == [*schedules, "parallel.split_size=16", "parallel.split_size=4"]
    assert options(of(*typed, "parallel.schedule=1f1b")).get("pipeline") is None


@pytest.mark.cases(
    (CONVNET, "", "bitwise"),
    (CONVNET, "device.threads=1", "last bits"),
    (CONVNET, "parallel=ddp", "last bits"),
    (CONVNET, "parallel=pipeline parallel.split_size=8", "last bits"),
    (CONVNET, "accumulation=4", "last bits"),
    (CONVNET, "precision=tf32", "rounding"),
    (CONVNET, "precision=bf16", "16bit"),
    (CONVNET, "parallel=hogwild", "asynchronous"),
    (CONVNET, "parallel=ensemble", "other"),
    (RESNET, "channels_last=false", "last bits"),
    (RESNET, "accumulation=2", "statistics"),
    (RESNET, "parallel=ddp", "statistics"),
    (RESNET, "parallel=ddp parallel.sync_batch_norm=true", "last bits"),
    (RESNET, "parallel=ddp parallel.sync_batch_norm=true accumulation=2", "statistics"),
    (RESNET, "parallel=pipeline", "statistics"),
    (AGENT, "parallel=ddp", "other"),
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_effects_on_the_results(typed, words, expected):
    assert of(*typed).judged(tuple(words.split())).results == expected


def test_micro_batches_of_equal_size_do_not_change_batch_normalization():
    def results(accumulation: int, words: str) -> str:
        run = of(*RESNET, "batch_size=32", f"accumulation={accumulation}")
        return run.judged(tuple(words.split())).results

    assert results(4, "accumulation=1 parallel=pipeline parallel.split_size=8") == "last bits"
    assert results(4, "accumulation=1 parallel=pipeline parallel.split_size=4") == "statistics"
    # Every process sees half of each micro-batch: 0 – 7 with 16 – 23, where the config has 0 – 7 with 8 – 15.
    assert results(2, "parallel=ddp parallel.sync_batch_norm=true") == "statistics"
    assert results(2, "accumulation=1 parallel=ddp") == "statistics", "the running statistics are averaged"


def test_a_refused_candidate_has_the_reason():
    assert "workload" in of(*AGENT).judged(("parallel=pipeline",)).reason
    odd = of(*CONVNET, "batch_size=63").judged(("parallel=ddp",))
    assert (odd.run, odd.results) == (None, "")
    assert "batch_size" in odd.reason
