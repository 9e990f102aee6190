"""Networks whose outputs are no tensors, their loss and their metrics; the processes of a run import this file."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Named(NamedTuple):
    logits: torch.Tensor
    extra: Any


@dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    extra: Any


class ModelOutput(OrderedDict):
    """A mapping with attributes, as of Hugging Face."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class Mixed(ModelOutput):
    logits: torch.Tensor
    extra: Any = None

    def __reduce__(self) -> Any:
        return type(self), tuple(self.__dict__[each.name] for each in fields(self))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value

    def __post_init__(self) -> None:
        self.update({each.name: self.__dict__[each.name] for each in fields(self)})


class Structured(nn.Module):
    """Its outputs are `kind(logits=…, extra=…)`; `extra` nests the first layer's values, a number for all, and None."""

    kind: Any = dict

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x).tanh()
        return self.kind(logits=self.last(hidden), extra=[hidden, self.last.bias.sum(), None])


class OfDict(Structured):
    pass


class OfNamed(Structured):
    kind = Named


class OfFrozen(Structured):
    kind = Frozen


class OfMixed(Structured):
    kind = Mixed


class OfTuple(Structured):
    kind = staticmethod(lambda logits, extra: (logits, extra))


NETWORKS = (OfDict, OfNamed, OfFrozen, OfMixed, OfTuple)


def parts(outputs: Any) -> tuple[torch.Tensor, list[Any]]:
    """Return the logits and the extra of outputs, which must have the type that the network returned."""
    if type(outputs) is dict:
        return outputs["logits"], outputs["extra"]
    if type(outputs) is tuple:
        return outputs
    assert type(outputs) in (Named, Frozen, Mixed), type(outputs)
    return outputs.logits, outputs.extra


def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    logits, (hidden, _, nothing) = parts(outputs)
    assert nothing is None
    return cross_entropy(logits, targets) + 0.1 * hidden.square().mean()


def accuracy(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    logits, (hidden, bias, _) = parts(outputs)
    assert len(hidden) == len(targets)
    assert bias.dim() == 0
    return logits.argmax(1) == targets


def squares(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return parts(outputs)[1][0].square().mean()
