"""The base class for the options of a network: initial weights and frozen parameters. `models/` has the layers."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from runner.config.errors import ConfigError, check
from runner.config.name_patterns import matching, names_to_match
from runner.config.options import chosen_option
from runner.model.weights import check_available, load_weights


def copied_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of `module`, with the hooks of its parameters.

    A tensor that it computes of its parameters and keeps, as pruning and weight normalization do, is copied as a value;
    parameters of TorchScript, of which `deepcopy` makes results of an operation, as parameters.
    """
    kept = (value for each in module.modules() for value in vars(each).values() if isinstance(value, torch.Tensor))
    copies: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in kept if not tensor.is_leaf}
    copied = copy.deepcopy(module, copies)
    for one, other in zip(module.parameters(), copied.parameters(), strict=True):
        if not other.is_leaf:
            other.detach_().requires_grad_(one.requires_grad)
        for hook in (one._backward_hooks or {}).values():  # `deepcopy` leaves them out
            other.register_hook(hook)
    return copied


@dataclass
class Model(ABC):
    """The options of a network, explained in `conf/model/_model.yaml`; `build` creates the network."""

    checkpoint_activations: bool = False
    weights: str | None = None
    reset_head: bool = False
    download: bool = False
    freeze: tuple[str, ...] = ()
    unfreeze: tuple[str, ...] = ()

    may_change_on_resume: ClassVar[tuple[str, ...]] = ("checkpoint_activations", "weights", "reset_head", "download")
    num_dims: ClassVar[int | None] = 3
    """Number of dimensions of one input: 3 for images; None if the network flattens inputs of any shape."""
    takes_tokens: ClassVar[bool | None] = False
    """Whether an input is the indices of tokens; None if it is not known."""

    def __post_init__(self) -> None:
        why = "nothing is frozen that it could be an exception from"
        check(bool(self.freeze) or not self.unfreeze, "unfreeze", list(self.unfreeze), why, "\"model.freeze=['*']\"")
        if self.reset_head and self.weights is None:
            raise ConfigError("reset_head", True, "there are no weights to load", "model.weights=FILE loads some")
        why = "no weights are named"
        check(not self.download or self.weights is not None, "download", True, why, "model.weights=NAME")
        if self.weights is not None:
            check_available(self.weights, self.download)

    @classmethod
    def untrusted_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return new values for saved options that were not typed again: a saved config starts no download."""
        return {"download": False} if "download" in values else {}

    def refused(self, why: str, remedy: str) -> ConfigError:
        return ConfigError("model", chosen_option("model", self), why, remedy)

    def build(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """Create the network for inputs of `shape`, with random weights or those that are named, and freeze parameters.

        Raises `ConfigError` if the network cannot process inputs of this shape, or an option does not fit it.
        """
        model = self.network(shape, num_classes)
        if self.weights is not None:
            load_weights(model, self.weights, self.reset_head)
        if self.freeze:
            freeze(model, self.freeze, self.unfreeze)
        return model

    @abstractmethod
    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """Create the network with random weights; arguments and errors are those of `build`.

        A network that can be split into stages has a method `blocks()`, which returns a list of (name, module) in the
        order of the forward pass. The last module is the head.
        """


def freeze(model: torch.nn.Module, patterns: Iterable[str], exceptions: Iterable[str]) -> None:
    """Set `requires_grad=False` for the parameters of `model` that match one of `patterns` and none of `exceptions`.

    Batch normalization in a module whose parameters are all frozen normalizes with its running statistics, which no
    longer change (see `runner.models.layers`). Dropout in frozen layers works as before.
    """
    from runner.models.layers import freeze_statistics

    names = names_to_match(model)
    frozen = {name: names[name] for pattern in patterns for name in matching("freeze", pattern, names)}
    trained = {name for pattern in exceptions for name in matching("unfreeze", pattern, frozen, "frozen parameter")}
    left = names.keys() - (frozen.keys() - trained)
    check(bool(left), "freeze", list(patterns), "nothing is left to train", "for example model.unfreeze=[head]")
    for name in frozen.keys() - trained:
        model.get_parameter(name).requires_grad_(False)
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            freeze_statistics(module)


def structure(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return the network that `build` creates, without memory for its tensors unless it computes with their values.

    The generators of random numbers go on as before.
    """
    try:
        return without_memory(build)
    except Exception:  # of any type, as from the code of a user: an orthogonal weight is made by a decomposition
        with torch.random.fork_rng(devices=[]):
            return build()


def without_memory(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return the network that `build` creates, on the meta device: its tensors have no values."""
    # Torch warns that loading weights into meta tensors has no effect.
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        return build()
