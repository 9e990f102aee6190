"""Streams train on the same samples in every mode, and after a resume in another one, as a plain loop does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.events import scalar_curves
from helpers.plain_loop import largest_difference, weights_at
from helpers.streams import Rows, Stateful, network, plain_weights, trained

import runner

reference = functools.cache(plain_weights)


def train(kind: str, mode: str, ranks: Any, directory: Path) -> Any:
    several = any(word in mode for word in ("ddp", "fsdp", "pipeline", "ensemble")) and "streams" not in mode
    result = ranks(2 if several else 1).call_on_all(trained, kind, ["log_every=1", *mode.split()], directory)[0]
    assert not isinstance(result, str), result
    return result


MODES = [
    "accumulation=4",
    "data.workers=1",
    "parallel=ddp accumulation.steps=3",
    "parallel=fsdp accumulation=2",
    "parallel=pipeline parallel.split_size=3",
    "parallel=pipeline parallel.split_size=3 parallel.engine=streams",
    "parallel=ensemble",
]


@pytest.mark.parametrize("mode", MODES)
def test_the_samples_of_a_stream_are_those_of_a_plain_loop_in_every_mode(mode, ranks, tmp_path):
    train("Noisy", mode, ranks, tmp_path)
    assert largest_difference(weights_at(tmp_path, 4), reference("Noisy")) < 1e-12
    if "ensemble" in mode:
        return
    model, rows = network().double(), Rows(43)
    model.load_state_dict(reference("Noisy"))
    loss = torch.nn.functional.cross_entropy(model(rows.inputs.double()), rows.targets).item()
    assert scalar_curves(tmp_path)["eval/loss"][-1][1] == pytest.approx(loss, rel=1e-6)


def test_a_worker_of_hogwild_trains_on_the_samples_of_a_plain_loop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["device=cpu", "device.threads=1", "batch_size=12", "steps=4", "optimizer=sgd", "optimizer.lr=0.1"]
    words += ["optimizer.momentum=0", "optimizer.weight_decay=0", "schedule=constant", "precision=64"]
    result = runner.train(
        [*words, "parallel=hogwild", "parallel.processes=1"], model=network, data=(Stateful(), Rows())
    )
    assert result.directory is not None
    assert largest_difference(weights_at(result.directory, 4), reference("Stateful")) < 1e-12


RESUMED = [
    ("Noisy", "parallel=single", "parallel=ddp", 2),
    ("Noisy", "parallel=ddp accumulation=2", "data.workers=1", 5),
    ("Stateful", "parallel=ddp", "accumulation=2", 5),
    ("Stateful", "data.workers=1", "parallel=fsdp", 2),
    ("Stateful", "data.workers=1", "parallel=single", 5),
    ("Stateful", "parallel=pipeline parallel.split_size=3", "data.workers=1", 2),
    ("Stateful", "parallel=ensemble", "parallel=ensemble", 5),
    *[(kind, "parallel=single", "parallel=single", step) for kind in ("Late", "Unsaved") for step in (2, 5)],
]
"""The stream, the modes before and after the resume, and its step: in the first pass or in the second."""


@pytest.mark.parametrize(("kind", "before", "after", "step"), RESUMED)
def test_a_stream_goes_on_in_another_mode_where_it_was(kind, before, after, step, ranks, tmp_path):
    train(kind, f"{before} steps={step} eval_every=1", ranks, tmp_path)
    train(kind, f"{after} steps=6", ranks, tmp_path)
    assert largest_difference(weights_at(tmp_path, 6), reference(kind, 6)) < 1e-12
