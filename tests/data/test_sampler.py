"""Tests of `data.sampler=weighted`: all classes are drawn equally often, the same samples in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.compose import compose_config
from helpers.plain_loop import largest_difference, weights_at
from helpers.strange_networks import CPU, PLAIN, numbers, trained_with
from helpers.streams import Rows
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, TensorDataset, WeightedRandomSampler

import runner
from runner.batching import Plan, SampleOrder
from runner.config import user_code
from runner.config.errors import ConfigError
from runner.data.base import class_weights
from runner.data.memory import TensorSamples
from runner.run import build_run
from runner.seeds import derive

LABELS = torch.tensor([0] * 30 + [1] * 12 + [3] * 6)
INPUTS, _ = numbers(48)
DATA = (INPUTS, LABELS), (INPUTS, LABELS)


def wanted(epochs: int, seed: int = 0) -> torch.Tensor:
    """Return the indices of some epochs, as torch's sampler draws them."""
    counts, drawn = np.bincount(LABELS.numpy()).tolist(), list[int]()
    weights = [1 / counts[label] for label in LABELS.tolist()]
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
        drawn += WeightedRandomSampler(weights, len(LABELS), generator=generator)
    return torch.tensor(drawn)


def test_samples_are_those_of_a_sampler_of_torch_and_classes_are_equally_frequent():
    order = SampleOrder(48, seed=3, weights=class_weights(LABELS))
    indices = wanted(200, seed=3)
    assert order.indices(0, 100).equal(indices[:100])
    assert order.indices(77, 250).equal(indices[77:250])
    drawn = LABELS[order.indices(0, 48 * 200)].bincount(minlength=4).double()
    expected = torch.tensor([1.0, 1.0, 0.0, 1.0]) * 48 * 200 / 3
    assert drawn[2] == 0
    assert ((drawn - expected).square()[expected > 0] / expected[expected > 0]).sum() < 13.8  # of 1,000, one exceeds it


def test_a_sample_that_is_drawn_twice_is_augmented_twice():
    images = torch.arange(4 * 64, dtype=torch.float32).view(4, 1, 8, 8)
    samples = TensorSamples(images, torch.tensor([0, 1, 1, 1]), ["a", "b"], (0.0,), (1.0,), crop=4)
    samples.weights = class_weights(samples.labels())
    batches = samples.batches(Plan(4).stream(0), 0, torch.device("cpu"))
    of_first = [image for _ in range(20) for image, target in zip(*next(batches), strict=True) if target == 0]
    assert len({*map(bytes, (image.numpy() for image in of_first))}) > len(of_first) // 2


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))


def step(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch["x"]), batch["label"])


STEP = {"data": ({"x": INPUTS, "label": LABELS},) * 2, "training_step": step}


def trained(mode: list[str], directory: Path, given: Any = None) -> Any:
    parts = {"model": network, **(given or {"data": DATA})}
    words = [*CPU, *PLAIN, "data.sampler=weighted", "eval_every=0", *mode]
    return trained_with(parts, compose_config(*user_code.passed(**parts).added_to(words)), directory)


def plain() -> dict[str, torch.Tensor]:
    """Return the weights after six steps in plain PyTorch."""
    torch.manual_seed(derive(0, "weights"))
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in wanted(2)[: 12 * 6].split(12):
        optimizer.zero_grad()
        cross_entropy(model(INPUTS[rows].double()), LABELS[rows]).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    "mode",
    ["accumulation=4", "parallel=ddp", "parallel=fsdp accumulation=2", "parallel=pipeline parallel.split_size=3"],
)
def test_weights_are_those_of_a_plain_loop_in_every_mode_and_after_a_resume(mode, ranks, tmp_path):
    count = 1 if mode.startswith("accumulation") else 2
    assert not isinstance(ranks(count).call_on_all(trained, [*mode.split(), "steps=3"], tmp_path)[0], str)
    trained(["steps=6"], tmp_path)
    assert largest_difference(weights_at(tmp_path, 6), plain()) < 1e-12


@pytest.mark.parametrize("mode", ["parallel=single", "parallel=ddp"])
def test_arrays_in_a_dict_are_drawn_by_their_label_also_for_a_training_step(mode, ranks, tmp_path):
    words = [mode, "steps=6"]
    result = ranks(1 + ("ddp" in mode)).call_on_all(trained, words, tmp_path, STEP)[0]
    assert not isinstance(result, str), result
    assert largest_difference(weights_at(tmp_path, 6), plain()) < 1e-12


class WithTargets(TensorDataset):
    """A data set with the classes of its samples, as those of torchvision."""

    targets = LABELS.tolist()


def test_classes_of_a_data_set_are_those_that_it_lists():
    for data in (
        DATA[0],
        WithTargets(INPUTS, LABELS),
        Subset(Subset(WithTargets(INPUTS, LABELS), range(47, -1, -1)), range(47, -1, -1)),
    ):
        with user_code.using(user_code.passed(data=(data, [*Rows(9)]), model=network)) as code:
            workload: Any = build_run(compose_config(*code.added_to(["data.sampler=weighted", *CPU]))).workload
            workload.prepare()
        found = next(workload.batches(network(), Plan(48), 0, torch.device("cpu")))
        assert found.inputs.equal(INPUTS[wanted(1)])
        assert len([*workload.held_out.in_order(5, (0, 1), torch.device("cpu"))]) == 2


@pytest.mark.parametrize("sampler", ["uniform", "weighted"])
def test_digits_are_drawn_by_their_classes(sampler):
    workload: Any = build_run(compose_config("data=digits", f"data.sampler={sampler}", "data.crop=0")).workload
    workload.prepare()
    samples = workload.train
    weights = None if sampler == "uniform" else 1 / samples.targets.bincount().double()[samples.targets]
    first = next(workload.batches(network(), Plan(64), 0, torch.device("cpu")))
    indices = SampleOrder(len(samples), 0, weights=weights).indices(0, 64)
    assert first.targets.equal(samples.targets[indices])
    assert first.inputs.equal(samples.inputs[indices])


@pytest.mark.cases(
    ({"data": ((INPUTS, INPUTS[:, :4]),) * 2}, "no class of each sample"),
    ({"data": (Rows(), Rows())}, "no class of each sample"),
    ({"data": [*Rows()]}, "no class of each sample"),
    ({"data": ((INPUTS, LABELS - 1),) * 2, "loss": torch.nn.CrossEntropyLoss(ignore_index=-1)}, "-1 is the target"),
)
def test_samples_without_classes_are_refused(code, text, elsewhere):
    with pytest.raises(ConfigError, match=text) as refused:
        runner.train([*CPU, "data.sampler=weighted"], model=network, **code)
    assert refused.value.key == "data.sampler"


def test_classes_are_balanced_once(elsewhere):
    with pytest.raises(ConfigError, match="equally often"):
        runner.train(["data=digits", "data.sampler=weighted", "workload.balance_classes=true", "device=cpu", "steps=1"])
