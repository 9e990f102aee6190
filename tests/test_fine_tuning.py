"""Fine-tuning: frozen parameters, a fresh head, and learning rates by group, against a plain PyTorch loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from helpers.compose import FAST, built, composed, prepared, train_in
from helpers.events import curves
from helpers.plain_loop import COMMON, Plain, Settings, largest_difference, train_plainly, weights_at
from helpers.rank_work import stop_at
from helpers.ranks import Ranks
from helpers.runs import assert_bitwise, weights

from runner.config.errors import ConfigError
from runner.seeds import derive
from runner.training import prepare

STEPS = 3
FROZEN = "model.freeze=[stem,layer1,'*.bn?','*.downsample']"
GROUPS = "optimizer.groups={head:{lr:0.02},layer4.1.conv?:{weight_decay:0.5}}"
TUNED = ("model.reset_head=true", FROZEN, GROUPS, "optimizer.layer_decay=0.8", "optimizer.decay_norms=false")
OVERRIDES = (
    *(*FAST, *COMMON, "model=resnet18", "model.stem=imagenet", "data.size=16", "data.holdout=0.02", "batch_size=12"),
    *(f"steps={STEPS}", "precision=64", "optimizer.lr=0.005", "optimizer.weight_decay=0.1", *TUNED),
)
"""All batch normalization is frozen, so that no mode sees other statistics than one device does."""

DEPTHS = {f"layer{i + 2}.{j}": 2 * i + j + 3 for i in range(3) for j in range(2)} | {"fc": 9}
"""The index of each block that has parameters to train: after the stem and two blocks of layer1."""


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An override that names a file of torchvision's weights, for three channels and 7 classes."""
    torch.manual_seed(1)
    network = torchvision.models.resnet18(num_classes=7)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # as after training
            module.running_mean.normal_()  # pyright: ignore
            module.running_var.uniform_(0.5, 2)  # pyright: ignore
    network.conv1.weight.data = network.conv1.weight.data[:, :1]  # the digits are gray
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.save(network.state_dict(), path)
    return f"model.weights={path}"


@functools.cache
def plain(pretrained: str) -> Plain:
    """The same in plain PyTorch, from torchvision's network on."""
    run = built(*OVERRIDES, pretrained)
    run.workload.prepare()
    torch.manual_seed(derive(0, "weights"))
    fresh = run.workload.build_model().get_submodule("fc").state_dict()
    model = torchvision.models.resnet18(num_classes=10)
    model.conv1 = torch.nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
    saved = torch.load(pretrained.partition("=")[2], weights_only=True)
    model.load_state_dict({**saved, **{f"fc.{name}": tensor for name, tensor in fresh.items()}})
    groups = []
    for name, parameter in model.named_parameters():
        block = ".".join(name.split(".")[:2]) if name.startswith("layer") else name.partition(".")[0]
        if block in DEPTHS and "bn" not in name and "downsample" not in name:
            lr = 0.02 if block == "fc" else 0.005 * 0.8 ** (9 - DEPTHS[block])
            decay = 0.5 if block == "layer4.1" else 0.1 * (parameter.dim() > 1)
            groups.append({"params": [parameter], "lr": lr, "weight_decay": decay})
        else:
            parameter.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    settings = Settings(STEPS, torch.float64)
    return train_plainly(run, model.double(), torch.optim.SGD(groups, momentum=0.9), settings)


MODES = {
    "single": ("accumulation=2",),
    "ddp": ("parallel=ddp",),
    "fsdp": ("parallel=fsdp",),
    "pipeline": ("parallel=pipeline", "parallel.cuts=[layer3]", "parallel.split_size=3"),
    "hogwild": ("parallel=hogwild", "parallel.processes=1"),
}


@pytest.mark.parametrize("mode", MODES)
def test_fine_tuning_equals_a_plain_loop(
    mode: str, pretrained: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    overrides = (*OVERRIDES, pretrained, *MODES[mode])
    if mode in ("single", "hogwild"):
        train_in(tmp_path / "run", built(*overrides))
    else:
        ranks(2).train(composed(*overrides), tmp_path / "run")
    wanted, got = plain(pretrained), weights_at(tmp_path / "run", STEPS)
    assert largest_difference(got, wanted.weights) <= 1e-12
    logged = curves(tmp_path / "run")
    assert [value for _, value in logged["train/loss"]] == pytest.approx(wanted.losses, rel=1e-5)
    rates = {tag: values[0][1] for tag, values in logged.items() if tag.partition("/")[0] == "lr"}
    expected = {f"lr/{name}": 0.005 * 0.8 ** (9 - depth) for name, depth in DEPTHS.items() if name != "fc"}
    assert rates == pytest.approx({"lr": 0.005, "lr/head": 0.02} | expected), "in every mode, on rank 0"


@pytest.mark.parametrize("mode", ["single", "fsdp", "pipeline"])
def test_fine_tuning_resumes_bitwise(mode: str, pretrained: str, ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    overrides = (*OVERRIDES, pretrained, *MODES[mode], "save_every=0")

    def do(name: str, change: Any = None) -> Any:
        if mode == "single":
            return train_in(tmp_path / name, built(*overrides), change or (lambda session: None)).result
        return ranks(2).train(composed(*overrides), tmp_path / name, change)

    do("whole")
    assert do("parts", functools.partial(stop_at, 1, -1)).status == "stopped"
    assert do("parts").status == "done"
    assert_bitwise(tmp_path / "parts", weights(tmp_path / "whole"))


def test_a_fresh_head_is_that_of_the_seed(pretrained: str, tmp_path: Path) -> None:
    heads = []
    for seed in (0, 0, 1):
        session = prepared(built(*OVERRIDES, pretrained, f"seed={seed}"))
        heads.append(prepare(session, tmp_path).model.get_parameter("fc.weight"))
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_a_pattern_without_a_parameter_is_refused_with_the_nearest_names(tmp_path: Path) -> None:
    for override, key, got in (
        ("model.freeze=[layr4]", "model.freeze", "layr4"),
        ("optimizer.groups={layr4:{lr:0.1}}", "optimizer.groups", "layr4"),
    ):
        with pytest.raises(ConfigError) as refused:
            prepare(prepared(built(*FAST, "model=resnet18", override)), tmp_path)
        assert (refused.value.key, refused.value.got) == (key, got)
        assert "layer4" in refused.value.remedy
