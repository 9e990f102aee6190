"""Tests of `runner.data.base`, the base classes of data sets."""

import itertools

import pytest
import torch
from helpers.compose import option_content
from PIL import Image

from runner.batching import Plan
from runner.config.schema import build
from runner.data.augment import Mixing
from runner.data.base import Data, LabeledSamples, shard_bounds

META = torch.device("meta")


@pytest.mark.parametrize(("length", "count"), [(0, 2), (1, 3), (12, 8), (1797, 3)])
def test_shards_cover_all_samples_evenly(length, count):
    parts = [range(length)[slice(*shard_bounds(length, (index, count)))] for index in range(count)]
    assert [i for part in parts for i in part] == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("option", "changed"),
    [
        ("synthetic", {"num_samples": 20, "size": 8, "num_classes": 3}),
        ("digits", {"crop": 2}),
        ("tabular", {"num_samples": 20}),
        ("imagefolder", {"workers": 0, "size": 8, "holdout": 0.5}),
    ],
)
@pytest.mark.parametrize("first_use", ["training", "evaluation"])
def test_inputs_and_targets_are_on_the_device_of_the_batches(option, changed, first_use, tmp_path):
    for name in ("cats/a.png", "cats/b.png", "dogs/a.png", "dogs/b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (9, 9)).save(tmp_path / name)
    node = option_content("data", option) | changed | ({"root": str(tmp_path)} if option == "imagefolder" else {})
    train, held_out = build(node, Data, "data").load()
    micros = list(itertools.islice(Plan(4).stream(0), 3))
    if first_use == "evaluation":
        list(train.in_order(4, (0, 1), META))
    batches = [*train.batches(micros, 0, META), *held_out.in_order(4, (0, 1), META)]
    if isinstance(train, LabeledSamples):
        batches += Mixing(mixup=0.2, cutmix=1.0).batches(train, micros, 4, 0, META)
    assert {tensor.device for batch in batches for tensor in batch} == {META}
