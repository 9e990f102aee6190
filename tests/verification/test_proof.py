"""Tests of the proof at the start: what a mode would compute differently is refused, and what it computes is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import incorrect_modes
from helpers.plain_loop import largest_difference, weights_at
from helpers.ranks import Ranks
from helpers.strange_networks import CASES, PLAIN, config_of, trained
from helpers.tensor_memory import peak_of
from torch.nn.functional import cross_entropy

from runner.model.base import copied_module
from runner.seeds import derive
from runner.system import memory

MODE = "parallel._target_=helpers.incorrect_modes."
PLANTED_MISTAKES: dict[str, tuple[str, list[str], str]] = {
    # in modes
    "no all-reduce": ("plain", [f"{MODE}NoAllReduce"], "gradients"),
    "mean of means": ("plain", [f"{MODE}UnequalShards"], "gradients"),
    "clipping by local norms": ("plain", [f"{MODE}ClipsLocally", "max_grad_norm=0.1"], "gradients"),
    "rounded gradients": ("plain", [f"{MODE}RoundsGradients"], "gradients"),
    "rounded buffers": ("assigns_buffer", [f"{MODE}SavesRoundedBuffers"], "buffers"),
    "evaluation of one shard": ("plain", [f"{MODE}EvaluatesOneShard"], "outputs in evaluations"),
    "a micro-batch dropped": ("plain", [f"{MODE}DropsLastMicroBatch", "accumulation=2"], "gradients"),
    "permuted targets": ("plain", [f"{MODE}PermutesTargets", "accumulation=2"], "loss"),
    # in networks
    "hook before the network": ("hook_before", ["parallel=pipeline"], "loss"),
    "hook after the network": ("hook_after", ["parallel=pipeline", "parallel.engine=streams"], "loss"),
    "hook of its backward pass": ("hook_backward", ["parallel=pipeline"], "gradients"),
    "blocks in another order": ("wrong_order", ["parallel=pipeline"], "loss"),
    "another forward pass in evaluations": ("scales_in_evaluation", ["parallel=pipeline"], "outputs in evaluations"),
    "statistics of the batch": ("centers", ["accumulation=2"], "depends on how it is divided"),
    "statistics of the batch in ddp": ("centers", ["parallel=ddp"], "depends on how it is divided"),
    "running statistics in training": ("assigned_buffer_in_training", ["parallel=ddp"], "later steps compute with"),
    "the last batch of a process": ("recurrent", ["parallel=ddp"], "later steps compute with"),
    "the last micro-batch": ("recurrent", ["accumulation=2"], "each forward pass changes last, with which"),
    "parameters made in forward": ("makes_parameters", ["accumulation=2"], "makes or removes scale"),
    "buffers made in forward": ("registers_buffer", ["parallel=single"], "makes or removes last"),
    "buffers removed in forward": ("removes_buffer", ["parallel=single"], "makes or removes start"),
    "a stage without gradients": ("detached", ["parallel=pipeline", "parallel.cuts=[1]", "precision=64"], "gradients"),
    "power iterations": ("spectral_norm", ["accumulation=2"], "changes 2.parametrizations.weight.0._u, with which"),
    "power iterations of chunks": (
        "spectral_norm",
        ["parallel=pipeline"],
        "2.parametrizations.weight.0._u, with which",
    ),
    "a counter of passes": ("counts_passes", ["accumulation=2"], "each forward pass changes count, with which"),
    "a counter that matters later": (
        "counts_to_four",
        ["accumulation=2"],
        "each forward pass changes count, with which",
    ),
    "weights written in forward": ("writes_weights", ["parallel=ddp"], "writes weights (table.weight)"),
    "weights written in fsdp": ("writes_weights", ["parallel=fsdp"], "writes weights (table.weight)"),
    "the rank in the network": ("knows_its_rank", ["parallel=ddp"], "loss"),
    "the order in memory": ("memory_order", ["channels_last=true"], "loss"),
    "weights replaced in fsdp": ("teacher", ["parallel=fsdp"], "replaces (teacher.0.bias)"),
    "weights of a limited norm in fsdp": ("limited_norm", ["parallel=fsdp"], "replaces (1.weight)"),
    "weights replaced in each micro-batch": ("teacher", ["accumulation=2"], "writes weights (teacher.0.bias)"),
    "an average in each micro-batch": ("teacher_in_place", ["accumulation=2"], "writes weights (teacher.0.bias)"),
    "a parameter without dimensions": ("temperature", ["parallel=fsdp"], "has no dimensions"),
    "parameters of several dtypes": ("complex", ["parallel=fsdp"], "have several dtypes"),
    "a sparse parameter": ("sparse_parameter", ["parallel=ddp"], "parameter graph is sparse"),
    "a sparse gradient": (
        "sparse_gradient",
        ["parallel=fsdp", *PLAIN, "optimizer.fused=false"],
        "FSDP takes no sparse gradients",
    ),
    "lazy layers": ("lazy", ["accumulation=2"], "its lazy layers have no sizes yet"),
    "a parameter of another block": ("of_attribute", ["parallel=fsdp"], "reads a parameter that FSDP has divided"),
    "a backward pass in another one": ("checkpointed", ["parallel=ddp"], "parallel.find_unused=false"),
    "gradients that a hook limits": ("limited", ["parallel=ddp"], "as of a hook that limits it"),
    "accumulated gradients that a hook limits": ("limited_after", ["accumulation=2"], "as of a hook that limits it"),
    "gradients limited inside": ("limits_inside", ["parallel=fsdp"], "the gradient of 0."),
    "hook of a weight": ("masked", ["compile=step"], "hooks of parameters (0.weight)"),
    # in losses and data
    "a sum": ("summed", ["accumulation=2"], 'loss.reduction = "sum"'),
    "a mean over some samples": ("of_first_class", ["parallel=ddp", "accumulation=2"], "depends on how it is divided"),
    "a mean over boxes": ("detector", ["parallel=ddp", "accumulation=2"], "depends on how it is divided"),
    "a small part of the loss": ("off", ["accumulation=2"], "depends on how it is divided"),
    "samples of the process": ("of_process", ["parallel=ddp"], "other samples"),
    "samples of the past": ("counts", ["accumulation=2"], "other samples"),
}
"""The case and the overrides of each mistake, and words that must be in the refusal."""


NOT_BEFORE_2_14 = {
    **dict.fromkeys(("experts", "rare", "frozen_integers", "sparse_gradient"), "parallel=fsdp"),
    "detached": "parallel.cuts=[1]",
}


def train(ranks: Ranks, name: str, overrides: list[str], directory: Path) -> Any:
    """Return the result of a run in two processes, or in one if the mode has one; or why it is refused."""
    alone = (
        "compile",
        "parallel=single",
        "channels_last",
        f"{MODE}Drops",
        f"{MODE}Permutes",
        "parallel.engine=streams",
    )
    if torch.__version__ < "2.14" and NOT_BEFORE_2_14.get(name, "nothing") in overrides:
        pytest.skip("torch before 2.14 refuses it in words of its own, or mixes up gradients, and says so")
    several = any(word.startswith(("parallel=", MODE)) for word in overrides)
    count = 2 if several and not any(word.startswith(alone) for word in overrides) else 1
    return ranks(count).call_on_all(trained, name, config_of(name, *overrides), directory)[0]


@pytest.mark.parametrize("name", PLANTED_MISTAKES)
def test_a_planted_mistake_is_refused_before_the_first_step(name, ranks, tmp_path, monkeypatch):
    incorrect_modes.declare(tmp_path, monkeypatch)
    case, overrides, words = PLANTED_MISTAKES[name]
    refusal = train(ranks, case, overrides, tmp_path)
    assert isinstance(refusal, str), refusal
    assert words in refusal
    assert not (tmp_path / "checkpoints").exists()


RIGHT: dict[str, list[str]] = {
    "reused": ["parallel=pipeline", "parallel=pipeline parallel.engine=streams", "parallel=fsdp"],
    "in_place": [
        "parallel=pipeline",
        "parallel=pipeline parallel.engine=streams",
        "parallel=pipeline parallel.schedule=zero_bubble",
    ],
    "experts": ["parallel=ddp accumulation=2", "parallel=fsdp accumulation=2"],
    "centers_all": ["parallel=ddp", "parallel=fsdp"],
    "other_blocks": ["parallel=fsdp"],
    "never_used": ["parallel=ddp optimizer.weight_decay=0.1", "parallel=fsdp optimizer.weight_decay=0.1"],
    "masked": ["parallel=ddp", "parallel=fsdp accumulation=2", "parallel=pipeline"],
    "masked_object": ["parallel=single"],
    "limited": ["parallel=single"],
    "limited_and_ignored": ["parallel=single"],
    "assigns_buffer": ["parallel=ddp", "parallel=fsdp"],
    "old_weight_norm": ["parallel=ddp", "parallel=pipeline"],
    "old_weight_norm_object": ["parallel=single"],
    "pruned": ["parallel=fsdp"],
    "pruned_object": ["parallel=single", "parallel=pipeline"],
    "scripted_object": ["parallel=single"],
    "teacher": ["parallel=ddp"],
    "teacher_in_place": ["parallel=ddp"],
    "limited_norm": ["parallel=ddp"],
    "rare": [f"parallel={mode} optimizer.weight_decay=0.1 optimizer.momentum=0.9" for mode in ("ddp", "fsdp")],
    "frozen_norm": ["parallel=ddp", "parallel=pipeline"],
    "gradient": ["parallel=ddp", "parallel=fsdp"],
    "toggles": ["parallel=fsdp accumulation=2"],
    "checkpointed": ["parallel=ddp parallel.find_unused=false"],
    "masked_steps": ["accumulation=2", "parallel=ddp"],
    "steps_first": ["parallel=pipeline parallel.cuts=[1]"],
    "integers": ["parallel=pipeline"],
    "detached": ["parallel=pipeline parallel.engine=streams parallel.cuts=[1]"],
    "vectorized": ["parallel=single", "parallel=fsdp"],
    "own_linear": ["parallel=fsdp", "parallel=pipeline"],
    "temperature": ["parallel=ddp"],
    "orthogonal": ["parallel=pipeline"],
    "spectral_norm": ["parallel=ddp", "parallel=fsdp", "compile=step"],
    "fills_table": ["accumulation=2", "parallel=ddp"],
    "frozen_integers": ["parallel=fsdp"],
}
"""The modes in which a network of `CASES` trains to the weights of a plain loop."""


@pytest.mark.parametrize("mode", ["ddp", "pipeline parallel.batch_norm=defer", "ddp parallel.sync_batch_norm=true"])
def test_batch_normalization_of_parts_of_a_batch_is_no_mistake(mode, ranks, tmp_path):
    assert train(ranks, "batch_norm", f"parallel={mode}".split(), tmp_path).steps == 4


def plain_weights(name: str, weight_decay: float, momentum: float) -> dict[str, torch.Tensor]:
    """Train for four steps in plain PyTorch, in float64."""
    inputs, targets = CASES[name]["data"][0]
    make = CASES[name]["model"]
    torch.manual_seed(derive(0, "weights"))
    model = (make() if not isinstance(make, torch.nn.Module) else copied_module(make)).double()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay)
    stream = torch.randperm(48, generator=torch.Generator().manual_seed(derive(0, "order", 0)))
    for rows in stream.split(12):
        optimizer.zero_grad()
        batch = inputs[rows]
        cross_entropy(model(batch.double() if batch.is_floating_point() else batch), targets[rows]).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, modes in RIGHT.items() for mode in modes])
def test_a_strange_network_trains_to_the_weights_of_a_plain_loop(name, mode, ranks, tmp_path):
    result = train(ranks, name, [*PLAIN, *mode.split()], tmp_path)
    assert not isinstance(result, str), result
    decay, momentum = 0.1 if "weight_decay" in mode else 0.0, 0.9 if "momentum" in mode else 0.0
    assert largest_difference(weights_at(tmp_path, 4), plain_weights(name, decay, momentum)) < 1e-12


@pytest.mark.parametrize("mode", ["accumulation=2", "parallel=ddp", "parallel=fsdp"])
def test_what_comes_before_the_first_step_takes_no_more_memory_than_a_checkpoint(mode, ranks, tmp_path):
    """Weights, gradients and two moments are four copies of the weights; a checkpoint takes three more."""
    weights = sum(each.nbytes for each in CASES["wide"]["model"]().parameters())
    config = config_of("wide", *mode.split(), "steps=1", "eval_every=0", "save_every=0")
    peaks = ranks(1 if "accumulation" in mode else 2).call_on_all(peak_of, trained, "wide", config, tmp_path)
    assert max(peaks) < 7.3 * weights, [peak / weights for peak in peaks]


def test_without_memory_for_the_whole_batch_at_once_the_proof_is_left_out(tmp_path, monkeypatch, caplog):
    """Micro-batches are for those who have none. Linux would kill the process."""
    left = {"total_bytes": 1000, "available_bytes": 49, "limit_bytes": None}
    monkeypatch.setattr(memory, "host_memory", lambda: left)
    caplog.set_level("INFO")
    trained("plain", config_of("plain", *PLAIN, "accumulation=2"), tmp_path)
    assert "proof: left out, as a single device has no memory for it" in caplog.text
    assert largest_difference(weights_at(tmp_path, 4), plain_weights("plain", 0.0, 0.0)) < 1e-12
