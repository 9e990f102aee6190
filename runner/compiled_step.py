"""`compile=step`: the whole optimizer step in one function that torch.compile has compiled."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.func import functional_call, grad

from runner.batching import Step
from runner.config.errors import ConfigError, check
from runner.data.base import copied
from runner.device import sum_dtype
from runner.parallel.attributes import attributes_kept, without_value
from runner.parallel.compiling import compile_whole
from runner.seeds import random_states, set_random_states
from runner.state import State
from runner.system import torch_private
from runner.system.section_timer import timer
from runner.torch_optimizer import is_of_user, parts_of
from runner.tracking.metrics import BatchSums

log = logging.getLogger(__name__)


class CompiledStep:
    """Forward pass, loss, gradients, clipping, update and average of the weights as one compiled function.

    With accumulation, there is a second one for the micro-batches before the last, which only adds gradients. Each is
    compiled once for each shape of a batch: learning rates are tensors, and gradients keep their memory from one step
    to the next, so that no later step differs from the first one.

    Raises:
        ConfigError: if the loss is scaled, a parameter has hooks, or the optimizer would behave differently after its
            first step, or when it is compiled.
    """

    def __init__(self, state: State):
        self._state, run, model, device = state, state.run, state.model, state.session.device
        why = "it calls the network as a function, and steps of a user's may call parts of it, or have several phases"
        check(not run.workload.has_steps, "compile", "step", why, "compile=true")
        if run.precision.compute_dtype(device) == torch.float16:
            why = "loss scaling decides after each step whether to keep the update"
            raise ConfigError("compile", "step", why, "precision=bf16, or compile=true")
        hooked = [name for name, each in model.named_parameters() if each._backward_hooks]
        why = f"it does not call the hooks of parameters ({', '.join(hooked[:3])})"
        check(not hooked, "compile", "step", why, "compile=true")
        groups = [group for group in state.optimizer.param_groups if "dampening" in group and group["momentum"]]
        why, remedy = "SGD's first step differs from the later ones", "no dampening, or compile=true"
        begun = all(p in state.optimizer.state for group in groups for p in group["params"])
        check(begun, "optimizer.options", "dampening", why, remedy)
        why = "it orthogonalizes in bfloat16, and compiled code rounds elsewhere"
        kinds = {type(each).__name__ for each in parts_of(state.optimizer)}
        check("Muon" not in kinds, "optimizer", "muon", why, "compile=true")
        why = "it may count steps in Python, and compiled code computes with what it has in the first step"
        check(not is_of_user(state.optimizer), "optimizer.name", ", ".join(kinds), why, "compile=true")
        self._parameters: dict[str, torch.Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._buffers, self._without_value = dict(model.named_buffers()), without_value(model)
        self._averages, has_begun = state.average.pairs()
        self._later_share = 1 - (run.ema.decay or 0)
        share = self._later_share if has_begun else 1.0
        self._share = torch.tensor(share, device=device, dtype=sum_dtype(device))
        self._accumulates = state.session.plan.accumulation > 1
        self._add, self._train = compile_whole(self._add_gradients, device), compile_whole(self._take_step, device)
        is_double = any(p.dtype == torch.float64 for p in self._parameters.values())
        self._settings = _float64_by_default if is_double else nullcontext
        self._ready, self._no_norm = False, torch.zeros((), device=device)
        self._no_count = torch.zeros((), device=device, dtype=sum_dtype(device))

    def __call__(self, state: State, batches: Iterator[Any], step: Step, log_due: bool) -> torch.Tensor:
        """Run one optimizer step, as `training.train_step` does; return the gradient norm before clipping."""
        run, session = state.run, state.session
        norm, on_cpu, count = self._no_norm, session.device.type == "cpu", self._no_count
        for micro in step.micro_batches:
            with timer.section("data"):
                batch = next(batches)
            if not self._ready:
                self._prepare(batch)
            if self._accumulates and micro is step.micro_batches[0]:
                for gradient in self._gradients.values():
                    gradient.zero_()
            with timer.section("step"), run.parallel.measured(micro), self._settings():
                if micro.is_last:
                    state.rates.set_lr(state.optimizer, step.number - 1, session.num_steps)
                    sums, norm = self._train(batch, micro.weight, count)
                    if self._averages:
                        self._share.fill_(self._later_share)
                else:
                    sums = self._add(batch, micro.weight)
                    count = count + sums[1, 0]
            state.step_metrics.add(state.phases[0], sums if on_cpu else sums.clone())
        state.step_metrics.end_phase(state.phases[0], min(step.local, step.number))
        if step.micro_batches:
            run.workload.after_step(state.model, step.local)
        state.step = step.number
        return norm

    def _prepare(self, batch: Any) -> None:
        """Let the options and the state of the optimizer be tensors, and give each parameter in use a gradient."""
        state, device = self._state, self._state.session.device
        log.info("compile=step: the first step takes longer, as it is compiled")
        random = random_states(state.session.devices)
        before, (buffers, inputs) = state.modules.plain_values(), copied((self._buffers, batch))
        with state.code.unchanged(), attributes_kept(state.modules.each):
            loss, _ = self._loss(self._parameters, buffers, inputs, 1.0)
            self._check_state(batch, before, buffers)
        form = state.run.workload.loss_form
        self._has_own_count = form is not None and form[1]
        gradients = torch.autograd.grad(loss, [*self._parameters.values()], allow_unused=True)
        set_random_states(random, state.session.devices)
        for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
            parameter.grad = None if gradient is None else torch.zeros_like(parameter)
        self._gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self._parameters = {name: self._parameters[name] for name in self._gradients}
        if self._settings is _float64_by_default:
            for each in state.optimizer.state.values():
                each.update({key: value.double() for key, value in each.items() if key == "step"})
        for group in state.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = torch.tensor(float(group["lr"]), device=device, dtype=sum_dtype(device))
            # Here, `capturable` means that the number of the step is a tensor, too.
            switches = {"fused": False, "foreach": True, "capturable": True}
            group.update({key: value for key, value in switches.items() if key in group})
        kept = [*self._gradients.values(), *self._buffers.values(), self._share]
        kept += [average for average, _ in self._averages] + [group["lr"] for group in state.optimizer.param_groups]
        for tensor in kept:
            torch_private.mark_static(tensor)
        # Here, as loading a state replaces what parts have; torch's hooks cannot be compiled.
        self._updates = [partial(inspect.unwrap(type(each).step), each) for each in parts_of(state.optimizer)]
        self._ready = True

    def _check_state(self, batch: Any, before: dict[str, Any], buffers: dict[str, torch.Tensor]) -> None:
        """Refuse a forward pass that has changed what compiled code takes for constant: forms, flags and numbers."""
        after = self._state.modules.plain_values()
        names = [name for name, each in self._buffers.items() if buffers[name].shape != each.shape]
        names += {*self._without_value} - {*without_value(self._state.model)}
        names += [name[2:] for name, value in after.items() if type(value) is bool and value is not before.get(name)]
        if after != before:  # some numbers, such as the size of an image, only change in the first pass
            buffers, inputs = copied((self._buffers, batch))
            self._loss(self._parameters, buffers, inputs, 1.0)
            now = self._state.modules.plain_values()
            names += [name[2:] for name, value in now.items() if value != after.get(name)]
        why = f"forward changes {', '.join(names[:3])}, and compiled code computes with what it has in the first step"
        check(not names, "compile", "step", why, "compile=true, or a buffer of the same shape in each step for it")

    def _loss(
        self, parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], batch: Any, weight: float
    ) -> tuple[torch.Tensor, tuple[BatchSums, dict[str, torch.Tensor]]]:
        def network(*inputs: Any, **options: Any) -> Any:
            tensors = parameters | buffers  # one dict, where `functional_call` leaves the buffers that forward assigns
            outputs = functional_call(self._state.model, tensors, inputs, options)
            buffers.update({name: tensors[name] for name in buffers})
            return outputs

        with self._state.run.precision.autocast():
            loss, sums = self._state.run.workload.loss(network, batch)  # pyright: ignore[reportArgumentType]
            loss = self._state.run.parallel.of_batch(loss, sums)
        return loss * weight, (sums, buffers)

    def _add_gradients(self, batch: Any, weight: float) -> BatchSums:
        """Add the gradients of a micro-batch; without accumulation, replace them. Return the sums of its metrics."""
        buffers = {name: buffer.clone() for name, buffer in self._buffers.items()}
        gradients, (sums, updated) = grad(self._loss, has_aux=True)(self._parameters, buffers, batch, weight)
        for name, kept in self._gradients.items():
            if self._accumulates:
                kept.add_(gradients[name])
            else:
                kept.copy_(gradients[name])
        for name, buffer in self._buffers.items():
            buffer.copy_(updated[name])
        return sums

    def _take_step(self, batch: Any, weight: float, count: torch.Tensor) -> tuple[BatchSums, torch.Tensor]:
        """Add the gradients of the last micro-batch, divide them, and update; `count` is that of the ones before."""
        run = self._state.run
        sums = self._add_gradients(batch, weight)
        if self._has_own_count and self._accumulates:
            factor = run.batch_size / (count + sums[1, 0])
            for gradient in self._gradients.values():
                gradient.mul_(factor.to(gradient.dtype))
        # Not `clip_gradients`, whose `torch._foreach_norm` the compiler cannot combine with other operations.
        norm = torch.stack([torch.linalg.vector_norm(each) for each in self._gradients.values()]).square().sum().sqrt()
        if run.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), run.max_grad_norm, norm)
        for update in self._updates:
            update()
        for average, parameter in self._averages:
            average.lerp_(parameter, self._share.to(average.dtype))
        return sums, norm


@contextmanager
def _float64_by_default() -> Iterator[None]:
    """A context in which optimizers count steps, from which compiled code computes their corrections, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
