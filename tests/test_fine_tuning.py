"""Tests that fine-tuning with frozen parameters, a new head and learning rates by group equals a plain PyTorch loop."""

import functools
from typing import Any

import pytest
import torch
import torchvision
from helpers import plain_loop
from helpers.compose import TINY_CPU, build_composed_run, compose_config
from helpers.events import scalar_curves
from helpers.rank_functions import sigterm_at
from helpers.runs import assert_checkpoint_bitwise_equal, checkpoint_tensors

from runner.seeds import derive

STEPS = 3
BLOCKS = ("stem", *(f"features.{i}" for i in (3, 4, 6, 7, 9, 10, 11, 12)), "head")
"""The blocks of torchvision's squeezenet1_1. Pooling layers are not blocks of their own."""
GROUPS = (
    "optimizer.groups={head:{lr:0.02},features.9.*:{weight_decay:0.5,momentum:0.6},"
    "features.11:{optimizer:adamw,lr:0.003,betas:[0.8,0.9],eps:0.001}}"
)
FROZEN = ("model.freeze=[stem,features.3,'*.squeeze']", "model.unfreeze=[features.12]")
OVERRIDES = (
    *(*TINY_CPU, *plain_loop.PLAIN_LOOP_OVERRIDES, "data.size=32"),
    *("model=torchvision", "model.name=squeezenet1_1", "model.options={dropout:0.0}"),
    *("data.holdout=0.02", "batch_size=12", f"steps={STEPS}", "precision=64", "model.reset_head=true", *FROZEN),
    *("optimizer.lr=0.005", "optimizer.weight_decay=0.1", GROUPS),
    *("optimizer.layer_decay=0.8", "optimizer.decay_norms=false"),
)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> str:
    """Return an override that names a file with weights of torchvision's network for gray images and 7 classes."""
    torch.manual_seed(1)
    network = torchvision.models.squeezenet1_1(num_classes=7)
    network.features[0] = torch.nn.Conv2d(1, 64, 3, stride=2)
    path = tmp_path_factory.mktemp("weights") / "squeezenet.pth"
    torch.save(network.state_dict(), path)
    return f"model.weights={path}"


@functools.cache
def plain(pretrained: str) -> plain_loop.PlainResult:
    """Train torchvision's network in plain PyTorch, with the settings in `OVERRIDES` and the weights of `pretrained`.

    Args:
        pretrained: the override that names the file with the initial weights.
    """
    run = build_composed_run(*OVERRIDES, pretrained)
    run.workload.prepare()
    torch.manual_seed(derive(0, "weights"))
    fresh = run.workload.build_model().get_submodule("classifier.1").state_dict()
    model = torchvision.models.squeezenet1_1(num_classes=10, dropout=0.0)
    model.features[0] = torch.nn.Conv2d(1, 64, 3, stride=2)
    saved = torch.load(pretrained.partition("=")[2], weights_only=True)
    model.load_state_dict({**saved, **{f"classifier.1.{name}": tensor for name, tensor in fresh.items()}})
    groups = []
    for name, parameter in model.named_parameters():
        block = "head" if name.startswith("classifier") else ".".join(name.split(".")[:2])
        if block in ("features.0", "features.3") or (".squeeze." in name and block != "features.12"):
            parameter.requires_grad_(False)
            continue
        lr = 0.02 if block == "head" else 0.005 * 0.8 ** (9 - BLOCKS.index(block))
        decay = 0.5 if block == "features.9" else 0.1 * (parameter.dim() > 1)
        momentum = 0.6 if block == "features.9" else 0.9
        groups.append({"params": [parameter], "lr": lr, "weight_decay": decay, "momentum": momentum, "block": block})
    settings = plain_loop.PlainSettings(STEPS, torch.float64)
    adam = [parameter for group in groups if group["block"] == "features.11" for parameter in group["params"]]
    decays = [{"params": [p], "weight_decay": 0.01 * (p.dim() > 1)} for p in adam]
    both = plain_loop.together(
        torch.optim.SGD([group for group in groups if group["block"] != "features.11"], momentum=0.9),
        torch.optim.AdamW(decays, 0.003, (0.8, 0.9), 0.001),
    )
    return plain_loop.train_plain_from(run, model.double(), both, settings)


MODES = {
    "single": ("accumulation=2",),
    "ddp": ("parallel=ddp",),
    "fsdp": ("parallel=fsdp",),
    "pipeline": ("parallel=pipeline", "parallel.cuts=[features.7]", "parallel.split_size=3"),
    "hogwild": ("parallel=hogwild", "parallel.processes=1"),
}


@pytest.mark.parametrize("mode", MODES)
def test_fine_tuning_equals_a_plain_loop_and_resumes_bitwise(mode, pretrained, ranks, tmp_path):
    overrides = (*OVERRIDES, pretrained, *MODES[mode], "save_every=0")

    def do(name: str, change: Any = None) -> Any:
        processes = 1 if mode in ("single", "hogwild") else 2
        return ranks(processes).train(compose_config(*overrides), tmp_path / name, change)

    do("whole")
    wanted, got = plain(pretrained), plain_loop.weights_at(tmp_path / "whole", STEPS)
    assert plain_loop.largest_difference(got, wanted.weights) <= 1e-12
    logged = scalar_curves(tmp_path / "whole")
    assert [value for _, value in logged["train/loss"]] == pytest.approx(wanted.losses, rel=1e-5)
    rates = {tag: values[0][1] for tag, values in logged.items() if tag.partition("/")[0] == "lr"}
    expected = {f"lr/{name}": 0.005 * 0.8 ** (9 - index) for index, name in enumerate(BLOCKS[2:-1], start=2)}
    expected |= {"lr/features.11": 0.003}
    assert rates == pytest.approx({"lr": 0.005, "lr/head": 0.02} | expected), "in every mode, on rank 0"
    if mode in ("single", "fsdp", "pipeline"):
        assert do("parts", functools.partial(sigterm_at, 1, -1)).status == "stopped"
        assert do("parts").status == "done"
        assert_checkpoint_bitwise_equal(tmp_path / "parts", checkpoint_tensors(tmp_path / "whole"))
