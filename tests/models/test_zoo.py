"""Every network of torchvision trains in every mode as in a plain loop in float64."""

import inspect
from typing import Any

import pytest
from helpers.zoo import CLASSES, MODES, Plain, check_mode
from torch import nn
from torchvision import models

LARGE = 150e6
"""With more parameters, several copies in float64 do not fit a small machine; each class has smaller networks."""

SIZES = {"inception_v3": 96, "maxvit_t": 224, "vit_b_16": 32, "vit_b_32": 32}
"""Sizes of images; 64 if there is none. With smaller ones, batch normalization of few values amplifies rounding."""


def torchvision_network(name: str) -> nn.Module:
    cls: Any = inspect.signature(models.get_model_builder(name)).return_annotation
    options: dict[str, Any] = {}
    if cls in (models.GoogLeNet, models.Inception3):
        options = {"aux_logits": False, "init_weights": True}
    elif cls is models.VisionTransformer:
        options = {"image_size": SIZES.get(name, 64)}
    return models.get_model(name, weights=None, num_classes=CLASSES, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", models.list_models(module=models))
def test_every_network_of_torchvision_trains_as_in_a_plain_loop(name, ranks, tmp_path):
    weights: Any = models.get_model_weights(name)
    if weights.DEFAULT.meta["num_params"] > LARGE:
        pytest.skip("too large for several copies in float64")
    size = SIZES.get(name, 64)
    plain = Plain(size, ("model=torchvision", f"model.name={name}"), torchvision_network(name))
    for mode in MODES:
        check_mode(plain, mode, ranks, tmp_path)
