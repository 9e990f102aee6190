"""Save and restore the state of gymnasium's classic control and toy text environments, for an exact resume.

The state of other environments (physics engines, environments in other processes) cannot be read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv

_SUPPORTED = ("gymnasium.envs.classic_control.", "gymnasium.envs.toy_text.")
_PLAIN_TYPES = (bool, int, float, str, type(None), np.ndarray, np.number, np.bool_)


def state_of(envs: VectorEnv) -> dict[str, Any] | None:
    """Return the state of `envs` as plain values and tensors; None for environments whose state cannot be read."""
    if isinstance(envs, SyncVectorEnv):
        if not all(_is_supported(env.unwrapped) for env in envs.envs):
            return None
        layers = [[_attributes(layer) for layer in _layers(env)] for env in envs.envs]
        return {"vector": _attributes(envs), "layers": layers}
    return {"vector": _attributes(envs)} if _is_supported(envs) else None


def restore(envs: VectorEnv, state: dict[str, Any]) -> None:
    """Set the state of `envs` to `state`; if it does not fit and an error is raised, a part may have been replaced."""
    _set_attributes(envs, state["vector"])
    if isinstance(envs, SyncVectorEnv):
        for env, layers in zip(envs.envs, state["layers"], strict=True):
            for layer, attributes in zip(_layers(env), layers, strict=True):
                _set_attributes(layer, attributes)


def _is_supported(env: object) -> bool:
    return type(env).__module__.startswith(_SUPPORTED)


def _layers(env: Any) -> list[Any]:
    """Return the wrappers of `env`, which have state too, such as a time limit, outermost first, and `env` itself."""
    layers = [env]
    while layers[-1] is not env.unwrapped:
        layers.append(layers[-1].env)
    return layers


def _attributes(layer: Any) -> dict[str, Any]:
    """Return the attributes with plain values, and the random generator; others, as spaces, do not change."""
    kept = {name: plain(value) for name, value in vars(layer).items() if _is_plain(value)}
    generator = vars(layer).get("_np_random")
    return kept if generator is None else kept | {"_np_random": {"random": generator.bit_generator.state}}


def _set_attributes(layer: Any, attributes: dict[str, Any]) -> None:
    for name, kept in attributes.items():
        if name not in vars(layer):  # it would hide a method
            raise AttributeError(f"{type(layer).__name__} has no {name}")
        if isinstance(kept, dict) and "random" in kept:
            generator = np.random.Generator(np.random.PCG64())
            generator.bit_generator.state = kept["random"]
            kept = generator
        else:
            kept = value(kept)
        setattr(layer, name, kept)


def _is_plain(kept: Any) -> bool:
    if isinstance(kept, tuple | list):
        return all(_is_plain(item) for item in kept)
    return isinstance(kept, _PLAIN_TYPES) and (not isinstance(kept, np.ndarray) or kept.dtype.kind in "biuf")


def plain(kept: Any) -> Any:
    """Convert a value so that it can be saved: NumPy arrays to tensors, and NumPy scalars to `{"number": tensor}`."""
    if isinstance(kept, np.ndarray):
        return torch.from_numpy(kept.copy())
    if isinstance(kept, str):
        return str(kept)  # a numpy string is also a str
    if isinstance(kept, np.generic):
        return {"number": torch.from_numpy(np.array(kept))}
    return type(kept)(map(plain, kept)) if isinstance(kept, tuple | list) else kept


def value(kept: Any) -> Any:
    """Convert a result of `plain` back to the original value."""
    if isinstance(kept, torch.Tensor):
        return kept.numpy().copy()
    if isinstance(kept, dict):
        return kept["number"].numpy()[()]
    return type(kept)(map(value, kept)) if isinstance(kept, tuple | list) else kept
