"""Tests of the files in docs/batches.md and docs/steps.md: each computes the same in every mode."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import ROOT
from helpers.compose import compose_config
from helpers.plain_loop import largest_difference, weights_at
from helpers.strange_networks import trained_with

import runner
from runner.commands import convert

FILES = (
    *("text_classifier", "image_and_table", "multi_task", "character_gpt", "stream"),
    *("autoencoder", "simclr", "detection", "gan"),
)
COMMON = ("device=cpu", "device.threads=1", "precision=64", "optimizer=sgd", "optimizer.lr=0.1", "eval_every=0")


def train(ranks: Any, name: str, overrides: list[str], directory: Path) -> Any:
    file = f"workload={ROOT / 'docs' / 'examples' / name}.py"
    count = 2 if any(word.startswith("parallel=") for word in overrides) else 1
    config = compose_config(file, *COMMON, "batch_size=8", "steps=2", *overrides)
    return ranks(count).call_on_all(trained_with, {}, config, directory, [file])[0]


@pytest.mark.parametrize("mode", ["parallel=ddp", pytest.param("parallel=fsdp accumulation=2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_page_trains_to_the_same_weights_in_every_mode(name, mode, ranks, tmp_path):
    weights = []
    for directory, words in ((tmp_path / "one", []), (tmp_path / "other", mode.split())):
        directory.mkdir()
        result = train(ranks, name, words, directory)
        assert not isinstance(result, str), result
        weights.append(weights_at(directory, 2))
    assert largest_difference(*weights) < 1e-12


def test_the_network_of_a_run_is_exported_with_its_inputs_by_name_for_samples_of_any_length(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = f"workload={ROOT / 'docs' / 'examples' / 'text_classifier.py'}"
    run = runner.train([file, "device=cpu", "device.threads=1", "steps=1", "eval_every=0"]).directory
    assert convert.main([str(run), "program.pt2", file]) == 0
    program, model = torch.export.load("program.pt2").module(), runner.load(run, [file]).model("last")
    for count, length in ((2, 7), (5, 30)):
        inputs = {"ids": torch.randint(256, (count, length)), "mask": torch.ones(count, length)}
        torch.testing.assert_close(program(**inputs), model(**inputs))
