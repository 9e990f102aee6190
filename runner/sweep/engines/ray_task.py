"""The Ray actor that starts, stops and kills the command of a job. The actor may run on another machine.

At the top, this module imports no third-party packages, because the process of the actor does not need torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from runner.sweep.engines.child import Child, Task


def import_ray() -> Any:
    """Import and return the package `ray`, which is optional and slow to import.

    The return type is `Any`: if the package is not installed, type checkers would resolve its name to the module
    `runner.sweep.engines.ray`.
    """
    return import_module("ray")


class RayTask:
    """The Ray actor that runs a job. It gets those `variables` of the scheduler that are not set here."""

    def __init__(self, task: Task, variables: dict[str, str]):
        self._child, self._variables = Child(task), variables

    def run(self) -> int:
        """Run the task until it ends, and return its exit code."""
        os.environ.update({key: value for key, value in self._variables.items() if key not in os.environ})
        return self._child.run({"CUDA_VISIBLE_DEVICES": ",".join(map(str, import_ray().get_gpu_ids()))})

    def ready(self) -> None:
        """Do nothing. Ray completes this call only after the actor has received its CPU cores and GPUs."""

    def stop(self) -> None:
        """Ask the task to save a checkpoint and to exit."""
        self._child.stop()

    def kill(self) -> None:
        """Kill the task immediately."""
        self._child.kill()
