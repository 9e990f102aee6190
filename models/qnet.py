"""Action values: a multi-layer perceptron, and the frozen copy of a network that deep Q-learning bootstraps from."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from models.recompute import recomputable


class QNet(nn.Sequential):
    """Linear layers with rectifiers between them; the last one tells the value of each action.

    Args:
        num_inputs: components of an observation; inputs [n, …] are flattened to [n, num_inputs].
        num_actions: outputs [n, num_actions].
        hidden: widths of the layers between them; none: a linear function.
        duelling: two heads, one for the state's value and one for the actions' advantages.
        checkpoint_activations: keep only the layers' inputs for the backward pass.
    """

    def __init__(
        self,
        num_inputs: int,
        num_actions: int,
        hidden: Sequence[int] = (128, 128),
        duelling: bool = False,
        checkpoint_activations: bool = False,
    ):
        blocks: OrderedDict[str, nn.Module] = OrderedDict() if hidden else OrderedDict(flatten=nn.Flatten())
        for i, (inputs, outputs) in enumerate(pairwise((num_inputs, *hidden)), start=1):
            blocks[f"hidden{i}"] = Rectified(inputs, outputs, checkpoint_activations)
        width = (num_inputs, *hidden)[-1]
        blocks["head"] = Duelling(width, num_actions) if duelling else nn.Linear(width, num_actions)
        super().__init__(blocks)

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """The places where the network can be cut, in the order of the forward pass: hidden1, hidden2, …, head."""
        return list(self.named_children())


class Rectified(nn.Linear):
    """A linear layer of flattened inputs and its rectifier in one module: at these sizes each call tells."""

    def __init__(self, in_features: int, out_features: int, checkpoint_activations: bool = False):
        super().__init__(in_features, out_features)
        self.checkpoint_activations = checkpoint_activations

    @recomputable
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        flat = input if input.ndim == 2 else input.flatten(1)
        return nn.functional.linear(flat, self.weight, self.bias).relu_()


class Duelling(nn.Module):
    """Q = V + A − mean A (Wang et al., Dueling Network Architectures, 2016, equation 9)."""

    def __init__(self, width: int, num_actions: int):
        super().__init__()
        self.value = nn.Linear(width, 1)
        self.advantage = nn.Linear(width, num_actions)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        advantages = self.advantage(features)
        return self.value(features) + advantages - advantages.mean(1, keepdim=True)


class WithTarget(nn.Module):
    """A network of action values, and a frozen copy of it (Mnih et al., Human-level control, 2015).

    One call computes all that a loss needs of both, so that whatever wraps the module (gathers its weights, splits its
    batch, synchronises its gradients) sees one forward pass a batch, and need not know of the copy.

    Args:
        online: the network that is trained.
        shift, scale: observations are (o − shift) · scale to both, [num_inputs]; None: as they come.
    """

    def __init__(self, online: nn.Module, shift: torch.Tensor | None = None, scale: torch.Tensor | None = None):
        super().__init__()
        self.online = online
        self.target = copy.deepcopy(online).requires_grad_(False)
        self.shift: torch.Tensor | None
        self.scale: torch.Tensor | None
        self.register_buffer("shift", shift)
        self.register_buffer("scale", scale)

    def forward(
        self, observations: torch.Tensor, next_observations: torch.Tensor | None = None, double: bool = True
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The values of all actions; with `next_observations` also the values to bootstrap from.

        Args:
            observations: [n, …].
            next_observations: [n, …].
            double: let the online network choose the action that the target network judges (van Hasselt, Guez and
                Silver, Deep Reinforcement Learning with Double Q-learning, 2016); else the target does both.

        Returns:
            Q [n, num_actions]; or Q and, without gradient, the value of each next observation's best action [n, 1].
        """
        values = self.online(self._normalized(observations))
        if next_observations is None:
            return values
        with torch.no_grad():
            following = self._normalized(next_observations)
            judged = self.target(following)
            if not double:
                return values, judged.amax(1, keepdim=True)
            return values, judged.gather(1, self.online(following).argmax(1, keepdim=True))

    def _normalized(self, observations: torch.Tensor) -> torch.Tensor:
        if self.shift is None or self.scale is None:
            return observations
        return (observations - self.shift) * self.scale

    @torch.no_grad()
    def update_target(self, tau: float) -> None:
        """Move the target's weights by `tau` of the way to the online network's; 1: copy them."""
        target, online = (list(map(_local, net.parameters())) for net in (self.target, self.online))
        if tau == 1:
            torch._foreach_copy_(target, online)  # pyright: ignore[reportPrivateImportUsage]
        else:
            torch._foreach_lerp_(target, online, tau)  # pyright: ignore[reportPrivateImportUsage]


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """The part of a sharded parameter that lies here: both networks are cut alike, and the update is elementwise."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()
