"""Tests of the order of layers in networks that list no blocks, and of the learning rates by layer that follow."""

import pytest
import torch
from torch import nn

from runner.config.errors import ConfigError
from runner.models.depth import layers_of
from runner.optimizer import SGD
from runner.torch_optimizer import learning_rates

SIZE = 4


class Layer(nn.Module):
    """With a list of modules inside, as attention with several heads has."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Part() for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE))
        self.norm = nn.LayerNorm(SIZE)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(SIZE, SIZE)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer() for _ in range(3))


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings, self.embedding_norm = nn.Embedding(9, SIZE), nn.LayerNorm(SIZE)
        self.encoder, self.pooler = Encoder(), nn.Linear(SIZE, SIZE)


class BertClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert, self.classifier = Bert(), nn.Linear(SIZE, 2)


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_first = nn.Identity()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, SIZE))
        self.patch_embed = nn.Conv2d(1, SIZE, 2)
        self.blocks = nn.Sequential(*(Layer() for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(SIZE), nn.Linear(SIZE, 2)


class Stage(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks, self.downsample = nn.ModuleList(Layer() for _ in range(depth)), nn.Linear(SIZE, SIZE)


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, SIZE, 2)
        self.stages, self.fc = nn.ModuleList(map(Stage, (2, 1))), nn.Linear(SIZE, 2)


class Plain(nn.Module):
    """Layers without modules inside, in two lists of which one follows the other."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 3, 3))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.h = nn.Embedding(9, SIZE), nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(SIZE, 9, bias=False)
        self.lm_head.weight = self.wte.weight


class TiedBlocks(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(SIZE, 9)
        self.lm_head.weight = self.wte.weight

    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [("wte", self.wte), ("h.0", self.h[0]), ("h.1", self.h[1]), ("lm_head", self.lm_head)]


RATES = {
    BertClassifier: {
        "bert.word_embeddings": 0.0625, "bert.embedding_norm": 0.0625, "bert.encoder.layer.0": 0.125,
        "bert.encoder.layer.1": 0.25, "bert.encoder.layer.2": 0.5, "bert.pooler": 1.0, "classifier": 1.0,
    },
    Vit: {
        "cls_token": 0.0625, "patch_embed": 0.0625, "blocks.0": 0.125, "blocks.1": 0.25, "blocks.2": 0.5,
        "norm": 1.0, "head": 1.0,
    },
    Stages: {
        "stem": 0.0625, "stages.0.blocks.0": 0.125, "stages.0.blocks.1": 0.25, "stages.0.downsample": 0.5,
        "stages.1.blocks.0": 0.5, "stages.1.downsample": 0.5, "fc": 1.0,
    },
    Plain: {"features.0": 0.125, "features.1": 0.125, "features.3": 0.25, "classifier.1": 0.5, "classifier.3": 1.0},
    Tied: {"wte": 0.25, "h.0": 0.5, "h.1": 1.0},
    TiedBlocks: {"wte": 0.125, "h.0": 0.25, "h.1": 0.5, "lm_head": 1.0},
}  # fmt: skip
"""The factors of the learning rate for `layer_decay=0.5`, by the beginnings of the names of parameters."""


@pytest.mark.parametrize("network", RATES)
def test_rates_fall_from_the_head_to_the_embeddings(network):
    model = network()
    optimizer = SGD(lr=0.5, layer_decay=0.5, groups=None).build(model)
    rate_of = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        [wanted] = [rate for start, rate in RATES[network].items() if f"{name}.".startswith(f"{start}.")]
        assert rate_of[id(parameter)] == pytest.approx(0.5 * wanted), name
    tags = learning_rates(optimizer)
    assert sorted(tags.values()) == pytest.approx(sorted({0.5 * rate for rate in RATES[network].values()}))


def test_a_group_with_a_rate_of_its_own_is_left_out():
    optimizer = SGD(lr=0.5, layer_decay=0.5, groups={"classifier": {"lr": 0.3}, "*.2": {"momentum": 0.5}})
    rates = learning_rates(optimizer.build(BertClassifier()))
    layer = "lr/bert.encoder.layer."
    wanted = {"lr": 0.5, "lr/classifier": 0.3, f"{layer}2": 0.25, f"{layer}1": 0.125, f"{layer}0": 0.0625}
    assert rates == pytest.approx(wanted | {"lr/bert.word_embeddings": 0.03125})


@pytest.mark.parametrize("network", [Tied, TiedBlocks])
@pytest.mark.parametrize("pattern", ["wte", "lm_head", "lm_head.weight"])
def test_a_tied_parameter_has_the_names_of_all_its_uses(network, pattern):
    model = network()
    groups = SGD(lr=0.5, groups={pattern: {"lr": 0.3}}).build(model).param_groups
    assert [group["lr"] for group in groups if any(p is model.wte.weight for p in group["params"])] == [0.3]


class Both(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = parts


class Part3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.then, self.last = (nn.Linear(2, 2) for _ in range(3))


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 5), nn.ReLU(), nn.Linear(5, outputs))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Both(Encoder(), Encoder()), "no order: encoder, decoder"),
        (Both(mlp(7, 4), mlp(3, 4)), "no order: encoder, decoder"),
        (Both(nn.ModuleList(Layer() for _ in range(2)), nn.ModuleList(Layer() for _ in range(2))), "no order"),
        (Both(nn.Linear(2, 2), nn.Linear(2, 2)), "no list of layers"),
        (Both(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), Part3()), "come after encoder.1, the last layer"),
        (nn.LSTM(3, 4, num_layers=3), "no list of layers"),
    ],
)
def test_a_network_without_an_order_of_layers_is_refused(model, why):
    with pytest.raises(ConfigError) as refused:
        SGD(lr=0.1, layer_decay=0.5).parameter_groups(model)
    assert refused.value.key == "optimizer.layer_decay"
    assert why in refused.value.why


def test_an_encoder_and_a_decoder_that_fit_together_have_an_order():
    assert layers_of(Both(mlp(7, 3), mlp(3, 7))).names == ["encoder.0", "encoder.2", "decoder.0", "decoder.2"]
