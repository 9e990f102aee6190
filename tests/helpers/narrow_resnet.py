"""A residual network of half the width: equally deep, with a quarter of the parameters to compute, send and save."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from models.resnet import ResNet
from runner.run import Run
from runner.session import Session


class NarrowResNet(ResNet):
    def __init__(self, depth: int, num_classes: int, **options: Any):
        super().__init__(depth, num_classes=num_classes, **options)
        self.fc = torch.nn.Linear(self.inplanes, num_classes)

    def _make_layer(self, block: Any, planes: int, *arguments: Any, **options: Any) -> torch.nn.Sequential:
        return super()._make_layer(block, planes // 2, *arguments, **options)


def use_narrow_resnet(run: Run) -> Run:
    """Return `run`, changed to train the narrow network if its model is a residual network."""
    options: Any = run.workload.model  # pyright: ignore[reportAttributeAccessIssue]
    if hasattr(options, "depth"):

        def network(shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
            chosen = {name: getattr(options, name) for name in ("stem", "norm", "checkpoint_activations")}
            return NarrowResNet(options.depth, num_classes, in_channels=shape[0], **chosen)

        options.network = network
    return run


def narrow_session(run: Run, session: Session) -> None:
    """Apply `use_narrow_resnet` to the run of a session, for functions that take a `change` of the session."""
    use_narrow_resnet(run)


def narrow_session_without_codegen(run: Run, session: Session) -> None:
    """Like `narrow_session`, for `compile=true`: the graph is captured, but no code is generated, to save a minute."""
    options: Any = use_narrow_resnet(run).workload.model  # pyright: ignore[reportAttributeAccessIssue]
    build = options.network

    def network(shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        model = build(shape, num_classes)
        model.compile = partial(model.compile, backend="eager")
        return model

    options.network = network
