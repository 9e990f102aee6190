"""A residual network of an eighth of the width, equally deep, with fewer parameters to compute, send and save."""

import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from runner.models.resnet import ResNet
from runner.parallel.session import Session
from runner.run import Run, build_run


class NarrowResNet(ResNet):
    def __init__(self, depth: int, num_classes: int, **options: Any):
        super().__init__(depth, num_classes=num_classes, **options)
        self.fc = torch.nn.Linear(self.inplanes, num_classes)

    def _make_layer(self, block: Any, planes: int, *arguments: Any, **options: Any) -> torch.nn.Sequential:
        if self._norm_layer is not torch.nn.BatchNorm2d:
            self._norm_layer = partial(torch.nn.GroupNorm, 8)  # by default 32, which is more than there are channels
        return super()._make_layer(block, planes // 8, *arguments, **options)


def use_narrow_resnet(run: Run, session: Session | None = None) -> Run:
    """Return `run`, changed to train the narrow network if its model is a residual network; `session` is not used."""
    options: Any = run.workload.model  # pyright: ignore[reportAttributeAccessIssue]
    if hasattr(options, "depth"):

        def network(shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
            chosen = {name: getattr(options, name) for name in ("stem", "norm", "checkpoint_activations")}
            return NarrowResNet(options.depth, num_classes, in_channels=shape[0], **chosen)

        options.network = network
    return run


def record_first_steps(configs: list[dict[str, Any]], directory: Path) -> list[Any] | None:
    """Record the first steps of the runs of `configs`, with narrow networks; called in each process of the runs."""
    from runner.verification import steps

    with (
        mock.patch.object(steps, "build_run", lambda config: use_narrow_resnet(build_run(config))),
        mock.patch.object(sys, "path", [str(directory), *sys.path]),
    ):
        run = build_run(configs[0])
        with run.parallel.launcher(run.device).connect() as process:
            steps.record_runs(configs, directory, process)
            if process.rank > 0:
                return None
            saved = [torch.load(directory / f"{number}.pt", weights_only=True) for number in range(len(configs))]
            return [steps.Steps(**each) for each in saved]
