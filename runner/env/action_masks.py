"""Masks of the actions that are allowed, which environments give as `info["action_mask"]`: one value an action."""

from __future__ import annotations

from typing import Any

import numpy as np

from runner.env import EnvironmentBrokenError


def allowed_actions(infos: dict[str, Any], ended: np.ndarray, num_actions: int, name: str) -> np.ndarray:
    """Return which actions are allowed in each environment, bool [n, num_actions], given the `infos` of all.

    Where an episode has `ended`, bool [n], a mask may be missing. Raises `EnvironmentBrokenError` if another one is, or
    allows nothing, or has another size.
    """
    given = infos.get("action_mask", np.zeros(0))
    present = infos.get("_action_mask", np.full(len(ended), "action_mask" in infos))
    masks = np.ones((len(ended), num_actions), bool)
    if present.any():
        found = np.array([*given[present]])
        if found.shape != (int(present.sum()), num_actions):
            what = f"has the shape {found.shape[1:]}, and there are {num_actions} actions"
            raise EnvironmentBrokenError(f'{name}: info["action_mask"] {what}')
        masks[present] = found != 0
    missing, closed = ~(present | ended), ~(masks.any(1) | ended)
    if missing.any() or closed.any():
        index, what = (missing.argmax(), "is missing") if missing.any() else (closed.argmax(), "allows no action")
        raise EnvironmentBrokenError(f'{name}: info["action_mask"] of environment {index} {what}')
    return masks


def random_actions(uniforms: np.ndarray, num_actions: int, masks: np.ndarray | None) -> np.ndarray:
    """Return an allowed action for each of the `uniforms`, random numbers in [0, 1): int64 [n]."""
    if masks is None:
        return (uniforms * num_actions).astype(np.int64)
    places = (uniforms * masks.sum(1)).astype(np.int64)
    return (masks.cumsum(1) > places[:, None]).argmax(1)
