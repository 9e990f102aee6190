"""Functions of the user that the training loop calls."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from runner.config.errors import ABSENT, ConfigError

log = logging.getLogger(__name__)


class Hooks(NamedTuple):
    """Functions of the user that the training loop calls on every rank; by default, they do nothing.

    `after_step(state)` is called after each optimizer step, `after_evaluation(state, metrics)` with the metrics by tag,
    and `before_save(state)` before each checkpoint. `state` is the `State` of the run: its methods `log`, `stop` and
    `save_soon`, and its attributes `step`, `model`, `optimizer` and `metrics`, are made for them.
    """

    after_step: Callable[[Any], object] = lambda state: None
    after_evaluation: Callable[[Any, Mapping[str, float]], object] = lambda state, metrics: None
    before_save: Callable[[Any], object] = lambda state: None


def watched(name: str, hook: Callable[..., object]) -> Callable[..., object]:
    """Return `hook`, with a warning once it sets a learning rate, which the next step would undo in silence.

    A `ConfigError` is raised if it changes which parameters are trained, which neither optimizers nor modes follow.
    """
    warn = functools.cache(log.warning)  # once

    def rates(state: Any) -> list[Any]:  # of tensors, what tells a change without waiting for the device
        found = [group["lr"] for group in state.optimizer.param_groups]
        return [(id(rate), rate._version) if hasattr(rate, "_version") else rate for rate in found]

    def names(model: Any) -> set[str]:
        return {key for key, parameter in model.named_parameters() if parameter.requires_grad}

    def copies(state: Any) -> dict[str, Any]:  # of data in workers
        return state.copied_data_values() if hasattr(state, "copied_data_values") else {}

    modules, at_first = functools.cache(lambda model: [*model.modules()]), functools.cache(names)

    def trained(model: Any) -> list[Any]:  # whole names take longer to find than a small step
        found = [(k, p is not None and p.requires_grad) for each in modules(model) for k, p in each._parameters.items()]
        return found + [id(child) for each in modules(model) for child in each._modules.values()]

    def called(state: Any, *more: Any) -> None:
        at_first(state.model)
        before, trained_before, data_before = rates(state), trained(state.model), copies(state)
        hook(state, *more)
        if changed := [key for key, value in copies(state).items() if data_before.get(key) != value]:
            why = f"{name} changes {changed[0]}, and workers read samples of copies that have the value of before"
            raise ConfigError("data.workers", ABSENT, why, "data.workers=0")
        if trained(state.model) != trained_before:
            modules.cache_clear()  # some may have been replaced
            if changed := sorted(at_first(state.model) ^ names(state.model)):
                why = f"it changes what is trained ({changed[0]}), which is decided before the first step"
                remedy = "model.freeze=[…] in a first run, and model.weights=FILE, a checkpoint of it, in a second one"
                raise ConfigError(name, ABSENT, why, remedy)
        if rates(state) != before:
            warn("%s has set the learning rate: no effect, use optimizer.lr=… and schedule=…, which set it", name)

    return called
