"""The comparison of a config with its reference for `runner verify`: differences, limits, table and verdict.

`runner/commands/verify.py` states the limits and the three verdicts. A large rounding error of the reference never
makes a limit larger: the config then cannot be judged, except if both agree very closely (see `Row.verdict`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

import torch

from runner.precision import Precision
from runner.verification.steps import Steps, Tensors

EXACT = 1e-9
"""The largest acceptable relative difference in float64. Correct modes agree to 1e-12, even on deep networks."""

FLOAT32_SUMS = 1e-6
"""The same for the mean losses of the curves, whose sums are float32 in every precision."""

FLOAT32_ROUNDING = 1e-5
"""Relative differences up to this size in a float64 run may come from something that computes in float32."""

MARGIN = 10
"""How many times the measured effect of rounding a difference may be, to be explained by rounding."""

KINDS = ("loss", "gradients", "weights", "buffers", "evaluation")


class Verdict(IntEnum):
    """The verdict on a config. Its value is the exit code of `runner verify`, which is 2 for a refused config."""

    SAME = 0
    DIFFERENT = 1
    UNJUDGED = 3


class Difference(NamedTuple):
    """The largest relative difference between tensors of two runs; `where` names the tensor, or is a remark."""

    size: float
    where: str


class Pair(NamedTuple):
    """The first steps of a config and the first steps of the reference, both in the same precision."""

    tested: Steps
    reference: Steps


class Row(NamedTuple):
    """One line of the table: the differences between the tested run and the reference for one kind of tensor.

    Args:
        what: the kind of tensor, for example `gradients`.
        exact: the difference in float64; None if the device does not support float64.
        configured: the difference in the precision of the config; None if this precision is float64.
        rounding: the rounding error of the reference: the difference between the reference in the precision of the
            config and in float64; 0 if one of them is missing.
        limit: the largest acceptable size of `configured`.
        tolerance: a stricter limit, which replaces `limit` without float64, or if the reference is noisy.
        exact_limit: the largest acceptable size of `exact`.
    """

    what: str
    exact: Difference | None
    configured: Difference | None
    rounding: Difference
    limit: float
    tolerance: float
    exact_limit: float

    @property
    def is_noisy(self) -> bool:
        """Whether two correct runs may differ by more than `limit`."""
        return not 2 * self.rounding.size <= self.limit

    @property
    def verdict(self) -> Verdict:
        is_exact = self.exact is None or self.exact.size <= self.exact_limit
        limit = self.tolerance if self.exact is None or self.is_noisy else max(self.limit, self.tolerance)
        if is_exact and (self.configured is None or self.configured.size <= limit):
            return Verdict.SAME
        beyond, explained = self.configured, MARGIN * self.rounding.size if self.is_noisy else self.limit
        if not is_exact:  # the reference amplifies also rounding that is hidden in float64
            amplified = max(1.0, self.rounding.size / self.tolerance) if self.is_noisy else 1.0
            beyond, explained = self.exact, FLOAT32_ROUNDING * amplified
        is_rounding = beyond is not None and beyond.size <= explained
        return Verdict.UNJUDGED if is_rounding else Verdict.DIFFERENT


HEADLINES = {
    Verdict.SAME: "the same: this config computes what a single device computes, up to rounding",
    Verdict.DIFFERENT: "different: this config does not compute what a single device computes",
    Verdict.UNJUDGED: "cannot be judged",
}


class Outcome(NamedTuple):
    """The result of a comparison: the lines of a table, none if a run diverged; the verdict; and why, or nothing.

    `changes` are the options, versions and commits that differ between two commits.
    """

    lines: list[str]
    verdict: Verdict
    reason: str
    changes: Sequence[str] = ()

    def __str__(self) -> str:
        return "\n".join([*self.lines, *filter(None, (HEADLINES[self.verdict], self.reason))])


def compare(configured: Pair | None, exact: Pair | None, precision: Precision) -> Outcome:
    """Compare the first steps of a config with the first steps of the reference.

    `configured` are the steps of both in the `precision` of the config, None if it is float64; `exact` are those in
    float64, None if the device does not support it.
    """
    pairs = [pair for pair in (exact, configured) if pair is not None]
    for pair in pairs:
        if pair.reference.diverged:
            why = f"on a single device, {pair.reference.diverged}"
            return Outcome([], Verdict.UNJUDGED, f"{why}. Try a smaller learning rate, or fewer --steps")
    for pair in pairs:
        if pair.tested.diverged:
            return Outcome([], Verdict.DIFFERENT, f"{pair.tested.diverged}, but it is on a single device")
    other_samples = max(map(first_other_samples, pairs))
    rows = [_row(kind, configured, exact, precision) for kind in KINDS]
    remarks = []
    weights = KINDS.index("weights")
    if configured and exact and rows[weights].is_noisy:
        lost = _lost_in_rounding(configured.reference, exact.reference)
        without = _row("weights", _without(lost, configured), _without(lost, exact), precision)
        rows[weights] = without._replace(exact=rows[weights].exact)
        count = sum(int(each.sum()) for each in lost.values())
        remarks = [f"{'':16}   as configured without {count:,} weights whose gradients are lost in rounding"]
    lines = _table(rows, other_samples, pairs[0].reference) + remarks
    if other_samples:
        return Outcome(lines, Verdict.DIFFERENT, "It trains on other samples.")
    verdict, reason = _judge(rows)
    return Outcome(lines, verdict, pairs[0].tested.expected if verdict is Verdict.DIFFERENT else reason)


def _lost_in_rounding(configured: Steps, exact: Steps) -> Tensors:
    """Return for each weight where rounding makes up half of its first gradient or more, as of the bias of attention's
    keys, whose true gradient is zero. Optimizers such as Adam divide by it, which makes steps of that rounding."""
    rounded, true = configured.tensors["gradients"], exact.tensors["gradients"]
    both = rounded.keys() & true.keys()
    return {name: (_wide(rounded[name]) - true[name]).abs() > true[name].abs() / 2 for name in both}


def _without(lost: Tensors, pair: Pair) -> Pair:
    def without(steps: Steps) -> Steps:
        kept = {
            name: each.masked_fill(lost[name], 0) for name, each in steps.tensors["weights"].items() if name in lost
        }
        return replace(steps, tensors={**steps.tensors, "weights": {**steps.tensors["weights"], **kept}})

    return Pair(without(pair.tested), without(pair.reference))


def first_other_samples(pair: Pair) -> int:
    """Return the number of the first step whose samples differ, from 1; 0 if there is none."""
    steps = enumerate(zip(pair.tested.samples, pair.reference.samples, strict=True), start=1)
    return next((number for number, (ours, theirs) in steps if ours != theirs), 0)


def _row(kind: str, configured: Pair | None, exact: Pair | None, precision: Precision) -> Row:
    limit, tolerance, exact_limit = max(1e-2, 5 * precision.tolerance), precision.tolerance, EXACT
    if kind == "loss":
        exact_limit, tolerance = FLOAT32_SUMS, max(FLOAT32_SUMS, tolerance)

    def difference(pair: Pair) -> Difference:
        ours, theirs = pair.tested.tensors[kind], pair.reference.tensors[kind]
        if kind == "evaluation" and not (ours and theirs):  # a mode may evaluate without the methods that are observed
            return Difference(0.0, "not compared")
        return largest_difference(ours, theirs)

    rounding = Difference(0.0, "")
    if configured is not None and exact is not None:
        rounding = difference(Pair(configured.reference, exact.reference))
    in_float64, as_configured = (pair and difference(pair) for pair in (exact, configured))
    return Row(kind, in_float64, as_configured, rounding, limit, tolerance, exact_limit)


def largest_difference(tested: Tensors, reference: Tensors) -> Difference:
    """Return the largest relative difference between tensors of the same name.

    The relative difference of two tensors is the norm of their difference, divided by the norm of the reference tensor.
    The divisor is at least a thousandth of the norm of all reference tensors together, because a tensor may be zero up
    to rounding errors, for example the gradient of a bias before batch normalization. Of integers and booleans, it is
    the root of the share of values that differ. If a tensor is missing or has another shape or kind of numbers, the
    result is infinity.
    """
    forms, expected = ({name: _form(each) for name, each in tensors.items()} for tensors in (tested, reference))
    if others := [name for name in forms | expected if forms.get(name) != expected.get(name)]:
        return Difference(torch.inf, f"{min(others)} is missing or has another shape")
    exact = {name: each for name, each in reference.items() if not (each.is_floating_point() or each.is_complex())}
    sizes = {name: float((tested[name] != each).double().mean().sqrt()) for name, each in exact.items() if each.numel()}
    # One at a time, as in float64 all of them would take twice the memory of the network.
    norms = {name: _norm(_wide(each)) for name, each in reference.items() if name not in exact}
    least = 1e-3 * torch.stack([torch.zeros(()), *norms.values()]).norm()
    for name, norm in norms.items():
        difference = _wide(tested[name]) - _wide(reference[name])
        if not (size := difference.norm()).isfinite():  # infinite values of a mask may be equal
            ours, theirs = tested[name], reference[name]
            size = difference[(ours != theirs) & ~(ours.isnan() & theirs.isnan())].norm()
        sizes[name] = float(size / torch.maximum(norm, least).clamp_min(1e-30))
    if not sizes:
        return Difference(0.0, "there are none")
    worst = max(sizes, key=lambda name: (sizes[name] != sizes[name], sizes[name]))  # nan is the largest
    return Difference(sizes[worst], worst)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm of the finite values of `tensor`."""
    return norm if (norm := tensor.norm()).isfinite() else tensor[tensor.isfinite()].norm()


def _form(tensor: torch.Tensor) -> tuple[torch.Size, bool, bool]:
    return tensor.shape, tensor.is_floating_point(), tensor.is_complex()


def _judge(rows: Sequence[Row]) -> tuple[Verdict, str]:
    verdicts = [row.verdict for row in rows]
    noisy = [row for row in rows if row.is_noisy and row.verdict is not Verdict.SAME]
    if Verdict.DIFFERENT in verdicts:
        return Verdict.DIFFERENT, ""
    if noisy:
        row = max(noisy, key=lambda row: row.rounding.size)
        size, half = f"{row.rounding.size:.1e}", f"{row.limit / 2:.1e}"
        why = f"on a single device alone, the {row.what} ({row.rounding.where}) are {size} from those in float64"
        why += f", more than {half}: either rounding is amplified, or float64 computes something else"
        remedy = "Compare with precision=64, fewer --steps, a smaller learning rate or a smaller network"
        return Verdict.UNJUDGED, f"{why}. {remedy}"
    if Verdict.UNJUDGED not in verdicts:
        return Verdict.SAME, ""
    if all(row.exact is None for row in rows):
        return Verdict.UNJUDGED, "nothing was computed in float64, which tells rounding apart; try device=cpu"
    why = "with precision=64, something here computes in fewer than 64 bits"
    why += ", and rounding cannot be told apart from a mistake"
    return Verdict.UNJUDGED, f"{why}. Use the dtype of the inputs in the model and the loss: x.to(other.dtype)"


def _table(rows: Sequence[Row], other_samples: int, reference: Steps) -> list[str]:
    total = sum(map(len, reference.samples))
    heads = [("in float64", rows[0].exact), ("as configured", rows[0].configured)]
    lines = [f"{'':16}" + "".join(f"{name:>15}{'limit':>10}" for name, found in heads if found) + "   largest in"]
    samples = f"{total:,}, the same bit for bit" if total else "not compared"
    if other_samples:
        samples = f"others in step {other_samples}   <- different"
    lines.append(f"{'samples':16}   {samples}")
    for row in rows:
        limits = row.exact_limit, row.limit if row.exact is not None else row.tolerance
        shown = [(found, limit) for found, limit in zip((row.exact, row.configured), limits, strict=True) if found]
        if any(found.where == "not compared" for found, _ in shown):
            lines.append(f"{row.what:16}   not compared")
            continue
        sizes = "".join(f"{found.size:>15.1e}{limit:>10.1e}" for found, limit in shown)
        beyond = [found for found, limit in shown if not found.size <= limit]
        where = (beyond or [found for found, _ in shown])[0].where
        lines.append(f"{row.what:16}{sizes}   {where}{'   <- too large' if beyond else ''}")
    return lines
