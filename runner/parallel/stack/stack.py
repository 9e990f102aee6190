"""The stack: it gives turns to its runs, and computes their passes together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.func import functional_call, vmap

from runner.parallel.attributes import attributes_kept
from runner.parallel.stack.checks import (
    alone,
    carried,
    different,
    dropout_off,
    place,
    rounding,
    seconds,
)
from runner.parallel.stack.member import ALONE, Request, UpdateRequest
from runner.parallel.stack.updates import update_together
from runner.parallel.stack.weights import Weights
from runner.seeds import drawn_since, random_states, set_random_states
from runner.system.torch_errors import is_out_of_memory
from runner.system.trees import Tree, map_tensors, tensors_of
from runner.system.turns import Seat

_PAYS = 1.1
"""How many times as fast a stacked pass has to be in the first step, for `sweep.stack=auto` to go on with it."""


class Stack:
    """Gives turns to runs, each in a seat, and computes their passes together.

    Args:
        seats: those of the runs.
        ended: called with the number of a run, and its exit code, when it has ended.
        received: called before each round of turns; it may ask seats to stop.
        has_to_pay: whether passes are only stacked if that is faster in the first step.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        ended: Callable[[int, int], None],
        received: Callable[[], None] = lambda: None,
        has_to_pay: bool = False,
    ):
        self._seats, self._ended, self._received, self._has_to_pay = [*seats], ended, received, has_to_pay
        self._alone: set[Any] = set()
        """The kinds of passes that each run computes itself: (whether it is for outputs, whether in training mode)."""
        self._checked: set[Any] = set()
        self._weights = Weights([])

    def run(self) -> None:
        """Give turns until all runs have ended."""
        while True:
            self._received()
            for seat in self._seats:
                if seat.code is None and seat.request is None:
                    seat.go_on()
                if seat.code is not None:
                    self._ended(seat.number, seat.code)
            self._seats = [seat for seat in self._seats if seat.code is None]
            if not self._seats:
                return
            # Passes of training wait until all others, as of evaluations, and updates are done: then, they are as many
            # as possible.
            first = min(seat.request.order for seat in self._seats)
            groups: dict[Any, list[Seat]] = {}
            for seat in self._seats:
                if seat.request.order == first:
                    groups.setdefault(seat.request.form(), []).append(seat)
            for form, group in groups.items():
                for seat, answer in zip(group, self._answers(form[:2], [seat.request for seat in group]), strict=True):
                    seat.answer(answer)

    def _answers(self, kind: tuple[bool, bool], requests: list[Any]) -> Sequence[Any]:
        one_by_one, why = [ALONE] * len(requests), ""
        if len(requests) == 1 or kind in self._alone:
            return one_by_one
        if isinstance(requests[0], UpdateRequest):
            update_together([each.optimizer for each in requests])
            return [None] * len(requests)
        try:
            if kind not in self._checked:
                self._checked.add(kind)
                why = self._why_alone(requests)
            if not why:
                return self._computed(requests, keep=True)
        except Exception as error:  # a run meets errors of its own again
            why = f"torch.func.vmap cannot take the code ({place(error)})"
            if is_out_of_memory(error):
                why = f"there is not enough memory for {len(requests)} at once"
        self._alone.add(kind)
        for each in requests:
            what = "training" if each.weight is not None else "evaluations"
            each.member.warn("%s: the runs of the stack are computed one by one: %s", what, why)
        return one_by_one

    def _why_alone(self, requests: list[Request]) -> str:
        """Return why the runs must not be computed together; empty if they may."""
        devices = requests[0].member.devices
        random = random_states(devices)
        with dropout_off([each.model for each in requests]):
            for each in requests:
                if why := carried(each):
                    return why
            stacked, single = self._computed(requests, keep=False), [alone(each) for each in requests]
        for ours, theirs in () if drawn_since(random, devices) else zip(stacked, single, strict=True):
            if name := different(ours, theirs, rounding(requests[0])):
                return f"{name} would be another than alone"
        gain = _PAYS
        if self._has_to_pay:
            together = seconds(lambda: self._computed(requests, keep=False))
            gain = seconds(lambda: [*map(alone, requests)]) / together
        set_random_states(random, devices)
        return f"that takes {gain:.2f} times as long as together" if gain < _PAYS else ""

    def _computed(self, requests: list[Request], keep: bool) -> Sequence[Any]:
        """Return the answer to each request; in training, add its gradients to those of its parameters.

        If `keep` is false, nothing changes, and the answers have the gradients and the buffers.
        """
        first = requests[0]
        is_training = first.weight is not None
        parameters, buffers = self._weights_of([each.model for each in requests], is_training)
        buffers = {name: each.clone() for name, each in buffers.items()}
        trains = {name for name, each in first.model.named_parameters() if each.requires_grad and is_training}
        trained = {name: each.requires_grad_() for name, each in parameters.items() if name in trains}
        batches = [torch.stack(each) for each in zip(*(tensors_of(request.batch) for request in requests), strict=True)]
        form: list[Tree] = []

        def of_one(tensors: dict[str, torch.Tensor], own: dict[str, torch.Tensor], leaves: list[torch.Tensor]) -> Any:
            def network(*inputs: Any, **options: Any) -> Any:
                both = tensors | own  # one dict, where `functional_call` leaves the buffers that forward assigns
                outputs = functional_call(first.model, both, inputs, options)
                own.update({name: both[name] for name in own})
                return outputs

            found = first.member.pass_of(first, network, _filled(first.batch, leaves))
            form[:] = [found]
            return tensors_of(found), own

        together = vmap(of_one, randomness="different")
        with attributes_kept([first.model]):  # also if it fails: what `vmap` computes with must not stay
            found, buffers = together(parameters | trained, buffers, batches)
        if not is_training:
            return [_filled(form[0], rows) for rows in zip(*(each.unbind(0) for each in found), strict=True)]
        weights = found[0].new_tensor([each.weight for each in requests])
        gradients = torch.autograd.grad((found[0] * weights).sum(), [*trained.values()], allow_unused=True)
        by_name = {name: each for name, each in zip(trained, gradients, strict=True) if each is not None}
        sums = [_filled(form[0], rows) for rows in zip(*(each.detach().unbind(0) for each in found), strict=True)]
        if not keep:
            kinds = {"gradients": by_name, "buffers": buffers}
            rows = [
                {kind: {name: each[index] for name, each in found.items()} for kind, found in kinds.items()}
                for index in range(len(requests))
            ]
            return [{"loss": loss, "metrics": metrics} | row for (loss, metrics), row in zip(sums, rows, strict=True)]
        self._weights.set_gradients(by_name)
        self._weights.set_buffers(buffers)
        return [metrics for _, metrics in sums]

    def _weights_of(self, models: list[torch.nn.Module], is_training: bool) -> tuple[dict[str, torch.Tensor], ...]:
        """Return the stacked parameters and buffers of `models`."""
        if not self._weights.are_of(models):
            weights = Weights(models)
            if not is_training:  # of some of the runs, or averaged ones: only for this pass
                return weights.parameters, weights.buffers
            weights.share()
            self._weights = weights
        return self._weights.parameters, self._weights.buffers


def _filled(tree: Tree, tensors: Sequence[torch.Tensor]) -> Tree:
    rest = iter(tensors)
    return map_tensors(lambda _: next(rest), tree)
