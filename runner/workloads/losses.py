"""What a loss returns: a mean over samples, a sum and its count, or a dict of these; torch's losses as sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

import torch

from runner.config import functions
from runner.config.errors import ABSENT, ConfigError
from runner.data.base import IGNORED
from runner.device import sum_dtype
from runner.system import torch_private
from runner.system.torch_errors import NO_GRADIENT
from runner.tracking.metrics import BatchSums

LossForm: TypeAlias = "tuple[tuple[str, ...], bool]"
"""The names of the values of a loss, and whether its count is its own (see `Workload.loss_form`)."""

_REMEDY = "return the mean over the samples, a tensor without dimensions; or (sum, count); or a dict of these"

SUM = 'if it is a sum over samples, write `{}.reduction = "sum"` below the function'


class Losses(NamedTuple):
    """What a loss has returned for some samples.

    Args:
        per_sample: the value to differentiate: the mean over the samples, or the sum divided by their number.
        names: `loss`, and then the names of the other values of a dict.
        sums: the detached sums and counts of all values, as in `BatchSums`.
        has_own_count: whether the loss is a mean over something else than samples.
    """

    per_sample: torch.Tensor
    names: tuple[str, ...]
    sums: BatchSums
    has_own_count: bool

    def checked_form(self, before: LossForm | None, function: Any) -> LossForm:
        """Return the names and whether the count is its own; raise a `ConfigError` if they were others `before`."""
        form = self.names, self.has_own_count
        if before not in (None, form):
            then, now = (f"{', '.join(names)} ({'sums' if own else 'means'})" for names, own in (before, form))
            why = f"it returns {now}, and returned {then} before{functions.place(function)}"
            raise ConfigError("loss", ABSENT, why, "return the same values for each batch")
        return form

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return the sum and the count of each value, [2], by name."""
        return dict(zip(self.names, self.sums.unbind(1), strict=True))


def losses_of(returned: Any, num_samples: int, function: Any, batch_size: int) -> Losses:
    """Return what `function`, the loss of a user, has `returned` for so many samples of a batch of `batch_size`.

    The sum over the samples of a part of the batch has their share of it as its count, so that the parts add up.

    Raises:
        ConfigError: if it is none of the forms that are possible.
    """
    values: Mapping[Any, Any] = returned if isinstance(returned, Mapping) else {"loss": returned}
    if not all(isinstance(name, str) and name for name in values):
        _refuse(f"it returns a dict with the names {[*values]}", function, "name each value by a text")
    if "loss" not in values:
        why = f"it returns a dict of {', '.join(values) or 'nothing'}"
        _refuse(why, function, 'call what is to be minimized "loss"')
    names = ("loss", *(name for name in values if name != "loss"))
    in_training = torch.is_grad_enabled()
    parts = [_total_and_count(values[name], function, in_training and name == "loss") for name in names]
    if _is_sum(function):
        parts = [(total, num_samples / batch_size if count is None else count) for total, count in parts]
    total, count = parts[0]
    device = next((each.device for each, _ in parts if isinstance(each, torch.Tensor)), torch.device("cpu"))
    if in_training and not (total.requires_grad or torch_private.is_batched(total)):
        _refuse(f"it returns a {total.dtype} that does not depend on the weights", function, NO_GRADIENT)
    to_sum = partial(_scalar, dtype=sum_dtype(device), device=device)
    sums = torch.stack([to_sum(total * (num_samples if count is None else 1)) for total, count in parts])
    counts = torch.stack([to_sum(num_samples if count is None else count) for _, count in parts])
    per_sample = total if count is None else total / num_samples
    return Losses(per_sample, names, torch.stack((sums, counts)).detach(), count is not None)


def _is_sum(function: Any) -> bool:
    """Return whether a loss says that it is a sum over samples, as modules of torch with `reduction="sum"` do."""
    options = function.keywords if isinstance(function, partial) else {}
    return "sum" in (getattr(function, "reduction", None), options.get("reduction"))


def added(sums: Mapping[str, torch.Tensor], more: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the sums and counts of several batches, given those of some and those of one more."""
    return {name: value + sums.get(name, 0) for name, value in more.items()}


def means_of(parts: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Return the mean of each value, given its sum and count, [2], in each process; one without samples knows none."""
    totals: dict[str, torch.Tensor] = {}
    for part in parts:
        totals = added(totals, {name: value.cpu().double() for name, value in part.items()}) or totals
    return {name: float(total / count) for name, (total, count) in totals.items()}


def _total_and_count(value: Any, function: Any, is_trained: bool) -> tuple[Any, Any]:
    """Return the sum and the count of a value that a loss returns; of a mean over samples, the mean and None.

    What is not trained may be a number, as of `item()`.
    """
    is_pair = isinstance(value, tuple) and len(value) == 2
    total, count = cast(Any, value if is_pair else (value, None))
    is_number = isinstance(count, Real) and not isinstance(count, bool)
    is_plain = not is_trained and isinstance(total, Real) and not isinstance(total, torch.Tensor)
    for each in (*([] if is_plain else [total]), *([count] if is_pair and not is_number else [])):
        if not isinstance(each, torch.Tensor) or each.numel() != 1:
            found = f"a tensor {list(each.shape)}" if isinstance(each, torch.Tensor) else f"a {type(each).__name__}"
            _refuse(f"it returns {'a pair with ' * is_pair}{found}, and no scalar", function, _REMEDY)
        if each.is_complex():
            _refuse("it returns a complex number", function, "return a real one, such as loss.real or loss.abs()")
    if is_number and not 0 <= float(count) < math.inf:
        _refuse(f"it returns the count {count}", function, "a count is finite and not negative, as that of tokens")
    return _without_dimensions(total), _without_dimensions(count)


def _without_dimensions(value: Any) -> Any:
    """Return a tensor of one number without dimensions, and a number of NumPy as one of Python."""
    if isinstance(value, torch.Tensor):
        return value.reshape(()) if value.dim() else value
    return value if value is None or type(value) in (int, float) else float(value)


def _scalar(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a number or a scalar tensor on `device`, to which a number is not copied: the host would wait."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype)
    return torch.full((), value, dtype=dtype, device=device)


def _refuse(why: str, function: Any, remedy: str) -> NoReturn:
    raise ConfigError("loss", ABSENT, why + functions.place(function), remedy)


def as_sum(loss: Any) -> Callable[[Any, Any, Any], Any] | None:
    """Return a function of (loss, outputs, targets) that returns the (sum, count) of torch's loss of classes.

    `loss` is a module, which is changed, or a function, perhaps a `functools.partial` of it. For anything else, and for
    another reduction than the mean, the result is None. Torch divides by the sum of the weights of the targets that
    are not ignored, which makes the mean of a batch another one than that of the means of its parts.
    """
    if type(loss) in (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss) and loss.reduction == "mean":
        loss.reduction = "sum"
        return lambda loss, outputs, targets: (loss(outputs, targets), _count(targets, loss.weight, loss.ignore_index))
    function, options = (loss.func, loss.keywords) if type(loss) is partial and not loss.args else (loss, {})
    ours = torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss
    if function in ours and not {"reduction", "reduce", "size_average"} & options.keys():
        counted = (options.get("weight"), options.get("ignore_index", IGNORED))
        total = partial(function, **options, reduction="sum")
        return lambda loss, outputs, targets: (total(outputs, targets), _count(targets, *counted))
    return None


def summed_cross_entropy(
    outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the cross-entropy of logits [n, num_classes, …], and its count, as torch divides them."""
    options: dict[str, Any] = {"reduction": "sum", "label_smoothing": label_smoothing}
    total = torch.nn.functional.cross_entropy(outputs, targets, weights, **options)
    return total, _count(targets, weights, IGNORED)


def _count(targets: torch.Tensor, weights: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """Return the sum of the weights of the targets that are not ignored; of probabilities, the number of targets."""
    if targets.is_floating_point():
        return targets.new_full((), targets[:, 0].numel())
    valid = targets != ignore_index
    if weights is None:
        return valid.sum()
    return (weights[torch.where(valid, targets, 0)] * valid).sum()
