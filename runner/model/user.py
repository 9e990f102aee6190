"""A network of the user: `model=FILE.py:NAME`, or the argument `model` of `runner.train`."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from runner.config import functions, user_code
from runner.config.errors import ABSENT, check
from runner.model.base import Model, copied_module
from runner.system.fake_tensors import build_with_values
from runner.system.generators import seeded

log = logging.getLogger(__name__)


@dataclass
class UserModel(Model):
    """A module, or a class or function that makes one: without arguments, or of `shape` and `num_classes` by name.

    The weights of a module are those with which the training begins; the module itself is not changed.
    """

    num_dims: ClassVar[int | None] = None
    takes_tokens: ClassVar[bool | None] = None

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        why = "the code of the network has to do that itself (torch.utils.checkpoint)"
        check(not self.checkpoint_activations, "checkpoint_activations", True, why, "leave it out")
        given, sizes = user_code.find("model"), {"shape": shape, "num_classes": num_classes}
        check(given is not None, "", ABSENT, "no network is given", "model=FILE.py:NAME, or define model in the file")
        if isinstance(given, torch.nn.Module):
            remedy = "pass a function that makes it: lambda: Net(…); or define __deepcopy__"
            return _checked(functions.own_copy("", given, remedy, copied_module).cpu())
        check(callable(given), "", given, "it is neither a module nor a class or function that makes one", "pass one")
        with user_code.errors_of("model"), seeded(torch.initial_seed()):
            free = required(given)
            remedy = f"write a function without arguments: lambda: {getattr(given, '__name__', 'Net')}(…)"
            why = f"its arguments are not known ({', '.join(free)}): only shape and num_classes are passed"
            check({*free} <= {*sizes}, "", user_code.given().names().get("model"), why, remedy)
            model = build_with_values(lambda: given(**{name: sizes[name] for name in free}))
        check(isinstance(model, torch.nn.Module), "", type(model).__name__, "it is no torch.nn.Module", "return one")
        return _checked(model)

    def needed_sizes(self) -> list[str]:
        """Return the arguments of the network that depend on the data: `shape`, `num_classes`, both or none."""
        given = user_code.find("model")
        return required(given) if callable(given) and not isinstance(given, torch.nn.Module) else []


def _checked(model: torch.nn.Module) -> torch.nn.Module:
    why = "torch.jit has compiled it, so that it takes no hooks"
    remedy = "return the module itself; compile=true compiles it"
    check(not isinstance(model, torch.jit.ScriptModule), "", type(model).__name__, why, remedy)
    has_sizes = not any(map(torch.nn.parameter.is_lazy, [*torch.nn.Module.parameters(model), *model.buffers()]))
    remedy = "let the function that makes the network call it once: net(torch.zeros(1, …))"
    check(has_sizes, "", type(model).__name__, "its lazy layers have no sizes yet", remedy)
    if (plain := getattr(model, "_orig_mod", None)) is None:
        its = {id(parameter) for parameter in model.parameters()}
        with user_code.errors_of("model"):
            model.train(model.training)  # which what `torch.export` returns cannot
        left = [n for n, p in torch.nn.Module.named_parameters(model) if p.requires_grad and id(p) not in its]
        why = f"its method parameters() leaves out {', '.join(left[:1])}, and what requires gradients is trained"
        remedy = "requires_grad_(False) for those that are not, or model.freeze=[…], in place of the method"
        check(not left, "", type(model).__name__, why, remedy)
        return model
    log.warning("model: what torch.compile made is used uncompiled, under its own names of weights; set compile=true")
    return plain


def required(function: Any) -> list[str]:
    """Return the names of the arguments without defaults."""
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]
