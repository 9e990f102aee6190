"""A check of an agent's state in a checkpoint: its keys, types, sizes and ranges of values."""

from __future__ import annotations

from typing import Any

import torch

from runner.storage.content_checks import TensorSpec, UnexpectedContentError, check_count, check_like
from runner.workloads.dqn.replay import row_width


def check(state: dict[str, Any], observation_size: int, num_actions: int, n_step: int, longest_repeat: int) -> None:
    """Check what `DQN.state_dict` returned, except the state of the environments, which is checked when it is loaded.

    Raises `UnexpectedContentError` if it cannot have been saved by an agent with these sizes.
    """
    width = row_width(observation_size)
    replay = {"rows": TensorSpec(torch.float32, (None, width)), "cursor": int}
    windows = {
        "time": int,
        "rows": TensorSpec(torch.float32, (n_step, None, width)),
        "returns": TensorSpec(torch.float64, (n_step, None)),
        "open": TensorSpec(torch.bool, (n_step, None)),
    }
    like = {
        "replay": replay,
        "num_episodes": int,
        "random": {"bit_generator": str, "state": {"state": int, "inc": int}, "has_uint32": int, "uinteger": int},
        "environments": object,
        "windows": windows,
        "returns": [float],
        "lengths": [int],
        "ended": [(float, int)],
        "rewards": (float, float),
        "best": float,
    }
    repeats = {"repeats": {"actions": [int], "left": [int]}} if longest_repeat > 1 else {}
    check_like(state, like | repeats, "the agent")
    rows, windows = state["replay"]["rows"], state["windows"]
    check_count(state["replay"]["cursor"], "the agent, replay, cursor", most=len(rows))
    per_env = (state["returns"], state["lengths"], *state.get("repeats", {}).values())
    sizes = {*map(len, per_env), *(windows[key].shape[1] for key in ("rows", "returns", "open"))}
    if len(rows) == 0 or len(sizes) > 1:
        raise UnexpectedContentError("the agent: an empty replay buffer, or different numbers of environments")
    for name, packed in (("replay", rows), ("windows", windows["rows"])):
        actions = packed[..., -3]
        if not ((actions >= 0) & (actions < num_actions) & (actions == actions.floor())).all():
            raise UnexpectedContentError(f"the agent, {name}: an action is not from 0 to {num_actions - 1}")
