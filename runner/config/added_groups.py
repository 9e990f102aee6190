"""Config groups that earlier versions did not have.

A run directory that an earlier version wrote lacks them in its config. With the components below it is the config of
the same run in this version, so that `resume` finds the run and accepts it.
"""

from __future__ import annotations

import copy
from typing import Any

ADDED_GROUPS: dict[str, dict[str, Any]] = {
    "ema": {"_target_": "runner.ema.options.Ema", "decay": None},
    "stop": {
        "_target_": "runner.stop.rules.Stop",
        "metric": None,
        "patience": None,
        "min_delta": 0.0,
        "target": None,
        "max_time": None,
    },
}
"""The component of each group that stands for what earlier versions did."""


def with_added_groups(config: dict[str, Any]) -> dict[str, Any]:
    """Return the saved config of a run, with the groups that the version that saved it did not have.

    Any other mapping, which has no workload, is returned as it is.
    """
    missing = [group for group in ADDED_GROUPS if "workload" in config and group not in config]
    return config | {group: copy.deepcopy(ADDED_GROUPS[group]) for group in missing}
