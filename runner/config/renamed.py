"""Classes that have moved: a run directory that an earlier version wrote names them as they were then."""

from __future__ import annotations

from typing import Any

RENAMED = {
    "runner.model.ConvNet": "runner.model.convnet.ConvNet",
    "runner.model.ResNet": "runner.model.resnet.ResNet",
    "runner.qnet.QNet": "runner.model.qnet.QNet",
    "runner.workloads.dqn.DQN": "runner.workloads.dqn.workload.DQN",
}


def with_current_names(config: Any) -> Any:
    """A saved config whose `_target_`s are today's names."""
    if isinstance(config, dict):
        renamed = {key: with_current_names(value) for key, value in config.items()}
        if "_target_" in config:
            renamed["_target_"] = RENAMED.get(config["_target_"], config["_target_"])
        return renamed
    return config
