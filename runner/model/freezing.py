"""Freezing: parameters of a network that are not trained."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from runner.config.errors import check
from runner.config.name_patterns import matching, names_to_match


def freeze(model: torch.nn.Module, patterns: Iterable[str], exceptions: Iterable[str]) -> None:
    """Set `requires_grad=False` for the parameters of `model` that match one of `patterns` and none of `exceptions`.

    A batch normalization layer whose weight and bias are frozen normalizes with its running statistics, which no longer
    change (see `models.frozen_batch_norm`). Dropout in frozen layers works as before.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    from models.frozen_batch_norm import FrozenBatchNorm

    names = names_to_match(model)
    frozen = {name: names[name] for pattern in patterns for name in matching("freeze", pattern, names)}
    others = {name: own for name, own in names.items() if name not in frozen}
    why_not = "model.freeze matches none of its parameters"
    trained = {name for pattern in exceptions for name in matching("unfreeze", pattern, frozen, others, why_not)}
    left = names.keys() - (frozen.keys() - trained)
    check(bool(left), "freeze", list(patterns), "nothing is left to train", "for example model.unfreeze=[head]")
    for name in frozen.keys() - trained:
        model.get_parameter(name).requires_grad_(False)
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        fixed = bool(own) and not any(parameter.requires_grad for parameter in own)
        if fixed and isinstance(module, _BatchNorm) and module.track_running_stats:
            module.__class__ = FrozenBatchNorm  # pyright: ignore[reportAttributeAccessIssue]
