"""What Ray runs for a job, perhaps on another machine: it starts the command, and stops or kills it.

Only the standard library is imported at the top: the process that looks after a job needs no torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from runner.sweep.engines.child import Child, Task


def import_ray() -> Any:
    """Import the package `ray`: late, as it is an optional dependency and slow.

    It has no type here: where the package is missing, type checkers would take `runner.sweep.engines.ray` for it.
    """
    return import_module("ray")


class RayTask:
    """The actor of a job.

    Args:
        task: what to run.
        variables: the environment variables of the scheduler; those of the machine of the job take precedence.
    """

    def __init__(self, task: Task, variables: dict[str, str]):
        self._child, self._variables = Child(task), variables

    def run(self) -> int:
        """Run the task to its end, and return its exit code."""
        os.environ.update({key: value for key, value in self._variables.items() if key not in os.environ})
        return self._child.run({"CUDA_VISIBLE_DEVICES": ",".join(map(str, import_ray().get_gpu_ids()))})

    def ready(self) -> None:
        """Return when the actor has its cores and GPUs."""

    def stop(self) -> None:
        """Ask the task to save and to exit."""
        self._child.stop()

    def kill(self) -> None:
        """End the task at once."""
        self._child.kill()
