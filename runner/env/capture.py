"""The state of gymnasium's classic control environments, taken out and put back: for a resume that is exact.

Other environments (physics engines, processes of their own) hold state that cannot be read, and say so here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv

_KNOWN = ("gymnasium.envs.classic_control.", "gymnasium.envs.toy_text.")
_PLAIN = (bool, int, float, str, type(None), np.ndarray, np.number, np.bool_)


def state_of(envs: VectorEnv) -> dict[str, Any] | None:
    """The state of `envs` as plain values and tensors; None where it cannot be had."""
    if isinstance(envs, SyncVectorEnv):
        if not all(_known(env.unwrapped) for env in envs.envs):
            return None
        layers = [[_attributes(layer) for layer in _layers(env)] for env in envs.envs]
        return {"vector": _attributes(envs), "layers": layers}
    return {"vector": _attributes(envs)} if _known(envs) else None


def restore(envs: VectorEnv, state: dict[str, Any]) -> None:
    """Put `state_of` an equal `envs` back."""
    _put(envs, state["vector"])
    if isinstance(envs, SyncVectorEnv):
        for env, layers in zip(envs.envs, state["layers"], strict=True):
            for layer, attributes in zip(_layers(env), layers, strict=True):
                _put(layer, attributes)


def _known(env: object) -> bool:
    return type(env).__module__.startswith(_KNOWN)


def _layers(env: Any) -> list[Any]:
    """An environment's wrappers, from the outside in, and itself: a time limit counts its steps in a wrapper."""
    layers = [env]
    while layers[-1] is not env.unwrapped:
        layers.append(layers[-1].env)
    return layers


def _attributes(layer: Any) -> dict[str, Any]:
    """What an object's attributes hold, where it is plain; pictures, spaces and functions do not change."""
    kept = {name: plain(value) for name, value in vars(layer).items() if _is_plain(value)}
    generator = vars(layer).get("_np_random")
    return kept if generator is None else kept | {"_np_random": {"random": generator.bit_generator.state}}


def _put(layer: Any, attributes: dict[str, Any]) -> None:
    for name, kept in attributes.items():
        if isinstance(kept, dict) and "random" in kept:
            generator = np.random.Generator(np.random.PCG64())
            generator.bit_generator.state = kept["random"]
            kept = generator
        else:
            kept = value(kept)
        setattr(layer, name, kept)


def _is_plain(kept: Any) -> bool:
    if isinstance(kept, tuple | list):
        return all(_is_plain(part) for part in kept)
    return isinstance(kept, _PLAIN) and (not isinstance(kept, np.ndarray) or kept.dtype.kind in "biuf")


def plain(kept: Any) -> Any:
    """`kept` as a checkpoint may hold it: arrays become tensors, and numpy's numbers {"number": tensor}."""
    if isinstance(kept, np.ndarray):
        return torch.from_numpy(kept.copy())
    if isinstance(kept, str):
        return str(kept)  # numpy has texts of its own
    if isinstance(kept, np.generic):
        return {"number": torch.from_numpy(np.array(kept))}
    return type(kept)(map(plain, kept)) if isinstance(kept, tuple | list) else kept


def value(kept: Any) -> Any:
    """What `plain` was made of."""
    if isinstance(kept, torch.Tensor):
        return kept.numpy().copy()
    if isinstance(kept, dict):
        return kept["number"].numpy()[()]
    return type(kept)(map(value, kept)) if isinstance(kept, tuple | list) else kept
