"""Networks for deep Q-learning: a multi-layer perceptron, and the pair of an online and a target network."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from runner.models.layers import recomputable


class QNet(nn.Sequential):
    """A multi-layer perceptron with ReLU that returns the values of all actions.

    Inputs [n, …] are flattened to [n, num_inputs]; the outputs are [n, num_actions]. There is a layer of each number of
    `hidden` units; without any, the network is linear. With `dueling`, separate heads compute the state value and the
    advantages. With `checkpoint_activations`, activations are recomputed in the backward pass.
    """

    def __init__(
        self,
        num_inputs: int,
        num_actions: int,
        hidden: Sequence[int] = (128, 128),
        dueling: bool = False,
        checkpoint_activations: bool = False,
    ):
        blocks: OrderedDict[str, nn.Module] = OrderedDict() if hidden else OrderedDict(flatten=nn.Flatten())
        for i, (inputs, outputs) in enumerate(pairwise((num_inputs, *hidden)), start=1):
            blocks[f"hidden{i}"] = Rectified(inputs, outputs, checkpoint_activations)
        width = (num_inputs, *hidden)[-1]
        blocks["head"] = Dueling(width, num_actions) if dueling else nn.Linear(width, num_actions)
        super().__init__(blocks)


class Rectified(nn.Linear):
    """Flattening, a linear layer and ReLU in one module, because each module call costs time in a small network."""

    def __init__(self, in_features: int, out_features: int, checkpoint_activations: bool = False):
        super().__init__(in_features, out_features)
        self.checkpoint_activations = checkpoint_activations

    @recomputable
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        flat = input if input.ndim == 2 else input.flatten(1)
        return nn.functional.linear(flat, self.weight, self.bias).relu_()


class Dueling(nn.Module):
    """Heads for the state value V and the advantages A, combined into the action values Q = V + A − mean(A).

    Wang et al., Dueling Network Architectures (2016), equation 9.
    """

    def __init__(self, width: int, num_actions: int):
        super().__init__()
        self.value = nn.Linear(width, 1)
        self.advantage = nn.Linear(width, num_actions)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        advantages = self.advantage(features)
        return self.value(features) + advantages - advantages.mean(1, keepdim=True)


Observations = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Observations, or these and a mask of the actions that are allowed."""


class WithTarget(nn.Module):
    """An online network, which computes action values, and its target network (Mnih et al., 2015), first a copy of it.

    One forward pass computes everything that the loss needs from both, so that wrappers which gather parameters, split
    batches or synchronize gradients see one call per batch. `shift` is subtracted from the observations before both
    networks, and `scale` multiplies them, [num_inputs] each. With `pixel_scale`, they are images of any dtype, such as
    uint8, which are converted to that of the parameters and multiplied by it.
    """

    def __init__(
        self,
        online: nn.Module,
        shift: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        pixel_scale: float | None = None,
    ):
        super().__init__()
        self.pixel_scale = pixel_scale
        self.online = online
        self.target = copy.deepcopy(online).requires_grad_(False)
        self.shift: torch.Tensor | None
        self.scale: torch.Tensor | None
        self.register_buffer("shift", shift)
        self.register_buffer("scale", scale)

    def forward(
        self, observations: Observations, next_observations: Observations | None = None, double: bool = True
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the values of all actions, [n, num_actions]; with `next_observations`, and the best next value.

        The latter is a detached tensor [n, 1]. If `double`, the online network selects the next action and the target
        network evaluates it (van Hasselt et al., 2016); otherwise, the target network does both. Observations may come
        with masks, bool [n, num_actions]: the value of an action that is not allowed is minus infinity.
        """
        observations, allowed = observations if isinstance(observations, tuple) else (observations, None)
        values = _masked(self.online(self._normalized(observations)), allowed)
        if next_observations is None:
            return values
        following, allowed = next_observations if isinstance(next_observations, tuple) else (next_observations, None)
        with torch.no_grad():
            normalized = self._normalized(following)
            target_values = self.target(normalized.clone())  # a network may change its inputs in place
            if not double:
                return values, _masked(target_values, allowed).amax(1, keepdim=True)
            best = _masked(self.online(normalized), allowed).argmax(1, keepdim=True)
            return values, target_values.gather(1, best)

    def _normalized(self, observations: torch.Tensor) -> torch.Tensor:
        if self.pixel_scale is not None:
            return observations.to(next(self.online.parameters()).dtype) * self.pixel_scale
        if self.shift is None or self.scale is None:
            return observations
        flat = (observations.flatten(1) - self.shift) * self.scale
        return flat.view_as(observations)

    @torch.no_grad()
    def update_target(self, tau: float) -> None:
        """Move the target parameters towards the online parameters by the fraction `tau`; `tau=1` copies them."""
        target, online = (list(map(_local, net.parameters())) for net in (self.target, self.online))
        get_ema_multi_avg_fn(1 - tau)(target, online, None)


def _masked(values: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    return values if allowed is None else values.masked_fill(~allowed, -math.inf)


def online_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state dict of the online network if `tensors` is one of `WithTarget`; otherwise, return `tensors`."""
    of_agent = all(name.startswith(("online.", "target.")) or name in ("shift", "scale") for name in tensors)
    online = {name.removeprefix("online."): each for name, each in tensors.items() if name.startswith("online.")}
    return online if of_agent and online else tensors


def _local(parameter: Any) -> torch.Tensor:
    """Return the shard of a DTensor: both networks are sharded in the same way."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
