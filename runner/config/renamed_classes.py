"""New names of classes that have moved, so that run directories written by an earlier version can be resumed."""

from __future__ import annotations

from typing import Any

RENAMED = {
    "runner.data.vision.Cifar10": "runner.data.torchvision_data.Cifar10",
    "runner.data.vision.FashionMnist": "runner.data.torchvision_data.FashionMnist",
    "runner.data.vision.Mnist": "runner.data.torchvision_data.Mnist",
    "runner.model.ConvNet": "runner.model.convnet.ConvNet",
    "runner.model.ResNet": "runner.model.resnet.ResNet",
    "runner.qnet.QNet": "runner.model.qnet.QNet",
    "runner.workloads.dqn.DQN": "runner.workloads.dqn.workload.DQN",
}


def with_current_names(config: Any) -> Any:
    """Return a copy of a saved config, in which each `_target_` is the current name of the class."""
    if isinstance(config, dict):
        renamed = {key: with_current_names(value) for key, value in config.items()}
        if isinstance(config.get("_target_"), str):
            renamed["_target_"] = RENAMED.get(config["_target_"], config["_target_"])
        return renamed
    return config
