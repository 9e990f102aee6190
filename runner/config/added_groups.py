"""Config groups that earlier versions did not have.

A config that an earlier version has saved lacks these groups. For each missing group, `with_added_groups` adds the
component in `ADDED_GROUPS` to the saved config, so that `resume` finds and accepts the run.
"""

from __future__ import annotations

import copy
from typing import Any

ADDED_GROUPS: dict[str, dict[str, Any]] = {
    "ema": {"_target_": "runner.ema.Ema", "decay": None},
    "stop": {
        "_target_": "runner.stop.Stop",
        "metric": None,
        "patience": None,
        "min_delta": 0.0,
        "target": None,
        "max_time": None,
    },
}
"""For each added group, the component that makes a run train as it did in the earlier versions."""


def with_added_groups(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config`, the saved config of a run, with the `ADDED_GROUPS` that it lacks.

    A mapping without a workload is not the config of a run, and is returned unchanged.
    """
    missing = [group for group in ADDED_GROUPS if "workload" in config and group not in config]
    return config | {group: copy.deepcopy(ADDED_GROUPS[group]) for group in missing}
