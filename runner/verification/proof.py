"""The proof at the start of a run: its first step, in its mode, against that of the same network on a single device.

It is for code from elsewhere, which a parallel mode, a compiler or a memory format may compute differently. Compared
are the samples of the first batch, the loss, the gradients, the buffers, and the outputs of an evaluation. Both steps
are those of copies of the components, with a learning rate of zero, so that the run begins as it does without a proof.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from runner import code_state
from runner.batching import Accumulation, Plan
from runner.config import user_code
from runner.config.errors import ConfigError, described
from runner.config.options import chosen_option
from runner.config.schema import component_fields
from runner.failures import torch_refusals
from runner.model.networks import NamedModel
from runner.parallel.base import Parallel
from runner.parallel.collectives import Collectives
from runner.parallel.launch.process_group import no_process_group
from runner.parallel.session import Session
from runner.precision import Double, Precision
from runner.run import Run
from runner.schedule import Schedule
from runner.seeds import derive, random_states, seed_all, set_random_states
from runner.system import torch_errors
from runner.system.lazy_import import nothing_frozen
from runner.system.memory import too_little_memory_raises
from runner.tracking.log_file import quiet
from runner.tracking.metrics import DivergedError
from runner.verification.carried_state import carried_state, clipped_gradient
from runner.verification.steps import Steps, record
from runner.verification.verdict import (
    FLOAT32_ROUNDING,
    MARGIN,
    Difference,
    Pair,
    first_other_samples,
    largest_difference,
)
from runner.workloads.base import Workload
from runner.workloads.losses import SUM

log = logging.getLogger(__name__)

T = TypeVar("T")

_KINDS = ("loss", "gradients", "buffers", "evaluation")
"""The kinds of tensors that are compared (see `Steps`)."""

_SWITCHES: tuple[Callable[[torch.nn.Module], object], ...] = (
    lambda model: None,
    lambda model: [module.eval() for module in model.modules() if isinstance(module, _DropoutNd)],
    lambda model: model.eval(),
)
"""What is done to a network until it draws no random numbers, which processes and micro-batches draw differently."""


@dataclass
class _Still(Schedule):
    """A learning rate of zero, with which rounding in the gradients changes no weight before the evaluation."""

    def factor(self, update: int, num_updates: int) -> float:
        return 0.0


def prove(run: Run, session: Session) -> None:
    """Compare the first step of `run` with that of a single device; called on every rank, before the run is prepared.

    Raises:
        ConfigError: if they differ by more than rounding, or only a single device can compute the step.
    """
    run = copy.copy(run)
    run.parallel = run.parallel.of_one_run()
    ways = _ways(run, session)
    if not ways or not _is_due(run):
        return
    start, states = time.monotonic(), random_states(session.devices)
    given = user_code.given()
    without_hooks = replace(given, objects={**given.objects, **dict.fromkeys(("schedule", *user_code.Hooks._fields))})
    with (
        quiet(),
        nothing_frozen(),
        user_code.using(without_hooks),
        tempfile.TemporaryDirectory(prefix="runner-proof-") as scratch,
    ):
        text = _Proof(run, session, ways, Path(scratch)).text()
    set_random_states(states, session.devices)
    if session.rank == 0:
        log.info("proof: %s (%.1f s)", text, time.monotonic() - start)


def _is_due(run: Run) -> bool:
    if run.proof != "auto":
        return bool(run.proof)
    parts = [run.workload, *(getattr(run.workload, name) for name in component_fields(type(run.workload)))]
    is_foreign = any(not type(part).__module__.startswith("runner.") or isinstance(part, NamedModel) for part in parts)
    return is_foreign or bool(run.code)


def _ways(run: Run, session: Session) -> dict[str, str]:
    """Return the options by which `run` is computed in another way than the plain one, by key.

    They are empty if nothing can be compared: of agents, and of modes whose processes train different models.
    """
    several = session.world_size * len(session.devices) > 1
    if (run.parallel.difference and several) or "env" in component_fields(type(run.workload)):
        return {}
    shape = run.workload.input_shape()
    ways = {
        "parallel": chosen_option("parallel", run.parallel) if several or session.plan.chunks > 1 else "",
        "accumulation": str(session.plan.accumulation) if session.plan.accumulation > 1 else "",
        "compile": str(run.compile).lower() if run.compile else "",
        # A memory format concerns tensors of four dimensions, of which the first is that of the samples.
        "channels_last": "true" if run.channels_last and (shape is None or len(shape) == 3) else "",
    }
    return {key: value for key, value in ways.items() if value}


class _Proof:
    """The steps of a single device, which rank 0 computes alone, and those of the run, by precision."""

    def __init__(self, run: Run, session: Session, ways: Mapping[str, str], scratch: Path):
        self._run, self._session, self._ways, self._scratch = run, session, ways, scratch
        plan = session.plan
        self._num_parts = plan.num_parts
        self._fine = run.precision if run.precision.tolerance <= Precision.tolerance else Precision()
        self._references: dict[tuple[type[Precision], int], Steps] = {}
        self._tested: dict[type[Precision], Steps] = {}
        self._switch, self._parts, self._batch_norms = 0, 1, set[str]()

    def text(self) -> str:
        """Return in words what was found; raise a `ConfigError` if the steps differ. Called on every rank."""
        on_rank_0, own, exact = self._on_rank_0, self._run.precision, Double()
        fine = self._fine
        self._switch, why_not, self._draws = on_rank_0(self._choose)
        if why_not:
            return f"left out, as {why_not}"
        self._train(fine)
        if self._draws:  # which may change nothing, as the order of a sum
            found = on_rank_0(partial(self._difference, fine))
            return f"left out, as {self._draws}" if found else "the first step is that of a single device"
        found = on_rank_0(partial(self._difference, fine))
        if found and not isinstance(fine, Double) and on_rank_0(self._has_float64):  # it may be rounding
            self._train(exact)
            found = on_rank_0(partial(self._difference, exact))
        if not found and fine is not own:
            self._train(own)
            found = on_rank_0(partial(self._beyond_rounding, own, fine, own.tolerance))
        if found:
            raise self._refused(found)
        return "the first step is that of a single device" + on_rank_0(self._remark)

    def _on_rank_0(self, function: Callable[[], T]) -> T:
        return self._session.collectives.from_rank_0(no_process_group()(function))

    # On rank 0

    def _choose(self) -> tuple[int, str, str]:
        """Return the index of what switches random numbers off, why nothing can be compared, and why none is off."""
        fine = self._fine
        if self._num_parts > 1 and (name := self._of_one_device(clipped_gradient)):
            why = f"the gradient of {name} is no multiple of that of the loss, as of a hook that limits it"
            raise self._refused(f"{why}, and in parts of a batch, losses have another size")
        try:
            draws = ""
            for self._switch in range(len(_SWITCHES)):
                self._find_batch_norm()
                steps = self._reference(fine)
                if steps.diverged:
                    return self._switch, f"{steps.diverged} on a single device, too", ""
                if not steps.draws:
                    break
                self._references.clear()
            else:
                draws = "the network draws random numbers in evaluations, too"
        except Exception as error:
            if torch_errors.is_out_of_memory(error):
                return self._switch, "a single device has no memory for it", ""
            if not self._switch:
                raise
            draws = f"the network draws random numbers, and in evaluation mode it fails: {described(error)}"
        if draws:
            self._switch = 0
            self._references.clear()
            self._find_batch_norm()
            if self._is_same_with_others(fine, self._reference(fine)):
                draws = ""
        steps = self._reference(fine)
        why = "something other than the optimizer, such as the forward pass, writes weights"
        plan, is_compiled = self._session.plan, bool(self._run.compile)
        is_in_passes = plan.accumulation * plan.chunks > 1 or is_compiled
        if names := steps.written * (self._num_parts > 1 or is_compiled) + steps.replaced * is_in_passes:
            raise self._refused(f"{why} ({names[0]}): each part of a batch would leave others")
        if plan.accumulation * plan.chunks > 1 and (name := self._carried()):
            why = f"each forward pass changes {name}, with which the next one computes"
            raise self._refused(f"{why}, and a single device has one pass a step, of the whole batch")
        return self._switch, "", draws

    def _find_batch_norm(self) -> None:
        """Find the layers whose results depend on the batch; then, a single device takes the batch in parts, too."""
        model = self._run.workload.build_model()
        _SWITCHES[self._switch](model)
        synchronized = getattr(self._run.parallel, "sync_batch_norm", False)
        layers = {name: each for name, each in model.named_modules() if isinstance(each, _BatchNorm) and each.training}
        is_of_ranges = not self._session.devices[1:] and not (synchronized and self._session.plan.accumulation > 1)
        if layers and not is_of_ranges:  # as replicas in one process, or synchronized micro-batches
            self._switch, layers = len(_SWITCHES) - 1, {}
        self._parts = self._num_parts if layers and not synchronized else 1
        self._batch_norms = {f"{name}.{key}" for name, each in layers.items() for key, _ in each.named_buffers()}

    def _reference(self, precision: Precision, parts: int | None = None) -> Steps:
        """Return the first step of a single device, which takes the batch in `parts`, on rank 0."""
        parts = parts or self._parts
        key = type(precision), parts
        if key not in self._references:
            self._references[key] = self._alone(precision, parts, _SWITCHES[self._switch])
        return self._references[key]

    def _alone(self, precision: Precision, parts: int, change: Callable[[torch.nn.Module], object]) -> Steps:
        run = self._copied(precision, Parallel(), accumulation=Accumulation(parts), compile=False)
        plan = Plan(run.batch_size, parts, seed=self._session.plan.seed)
        process = Collectives(self._session.devices[:1])
        session = Session(process, plan, run.workload, run.precision, num_steps=1)
        with too_little_memory_raises(session.device):
            return self._recorded(replace(run, channels_last=False), session, change)

    def _is_same_with_others(self, precision: Precision, steps: Steps) -> bool:
        """Return whether a single device computes `steps` with other random numbers, as of a choice among one size."""

        def change(model: torch.nn.Module) -> None:
            _SWITCHES[self._switch](model)
            seed_all(derive(self._session.plan.seed, "proof"))

        others = self._alone(precision, self._parts, change)
        return not others.diverged and all(
            self._largest(others, steps, kind).size <= FLOAT32_ROUNDING for kind in _KINDS
        )

    def _has_float64(self) -> bool:
        try:
            Double().check_device(self._session.device)
            return not self._reference(Double()).diverged
        except Exception:  # code that computes with values in float32, for example
            return False

    def _difference(self, precision: Precision) -> str:
        """Return in words what differs by more than the rounding of float32; empty if nothing does."""
        tested, reference = self._tested[type(precision)], self._reference(precision)
        if tested.diverged:
            return f"{tested.diverged}, but not on a single device"
        if first_other_samples(Pair(tested, reference)):
            return "it trains on other samples than a single device: what the data returns depends on who reads it"
        for kind in _KINDS:
            if not (found := self._largest(tested, reference, kind)).size <= FLOAT32_ROUNDING:
                parts = self._num_parts if self._parts == 1 else 1
                is_of_parts = parts > 1 and (
                    self._largest(tested, self._reference(precision, parts), kind).size <= 10 * FLOAT32_ROUNDING
                )
                why = "; a single device computes the same from the parts of the batch: the network or the loss "
                more = f"{why}depends on how it is divided" * is_of_parts + self._is_sum(tested, reference)
                return _words(kind, found, FLOAT32_ROUNDING) + more
        if lost := sorted({*tested.replaced} ^ {*reference.replaced}):
            return f"weights that the forward pass replaces ({lost[0]}) are not kept, or only by some processes"
        if not (found := self._largest(tested, reference, "weights")).size <= FLOAT32_ROUNDING:
            return _words("weights", found, FLOAT32_ROUNDING)
        return self._other_buffers(tested, reference)

    def _is_sum(self, tested: Steps, reference: Steps) -> str:
        """Return in words what to do if the losses of the parts add up to that of the batch; else, an empty text."""
        total = {name: each * self._num_parts for name, each in tested.tensors["loss"].items()}
        adds_up = largest_difference(total, reference.tensors["loss"]).size <= FLOAT32_ROUNDING
        name = "training_step" if self._run.workload.has_steps else "loss"
        return "; " + SUM.format(name) if adds_up and self._num_parts > 1 else ""

    def _beyond_rounding(self, rough: Precision, fine: Precision, least: float) -> str:
        """Return in words what differs by more than `least` and `MARGIN` × the rounding of a single device."""
        tested, reference = self._tested[type(rough)], self._reference(rough)
        if reference.diverged or not _is_finite(reference):  # an overflow of float16, which skips the step
            return ""
        for kind in _KINDS:
            rounding = self._largest(reference, self._reference(fine), kind)
            found, limit = self._largest(tested, reference, kind), max(least, MARGIN * rounding.size)
            if not found.size <= limit:
                return _words(kind, found, limit)
        return ""

    def _largest(self, tested: Steps, reference: Steps, kind: str) -> Difference:
        ours, theirs = tested.tensors[kind], reference.tensors[kind]
        if kind == "evaluation" and (self._parts > 1 or not (ours and theirs)):  # it uses the running statistics
            return Difference(0.0, "not compared")
        if self._parts > 1:  # statistics of the whole batch are not those of its parts
            ours, theirs = ({n: t for n, t in each.items() if n not in self._batch_norms} for each in (ours, theirs))
        return largest_difference(ours, theirs)

    def _other_buffers(self, tested: Steps, reference: Steps) -> str:
        """Return in words which state of a process is not that of a single device, if training uses it."""
        theirs = {name.removesuffix(" of rank 0"): each for name, each in reference.tensors["buffers of ranks"].items()}
        for name, ours in tested.tensors["buffers of ranks"].items():
            buffer = name.rpartition(" of rank ")[0]
            if buffer not in theirs:  # of a mode, such as the sums of deferred batch normalization
                continue
            if not (found := largest_difference({name: ours}, {name: theirs[buffer]})).size <= FLOAT32_ROUNDING:
                words = _words("buffers or attributes", found, FLOAT32_ROUNDING) + "; later steps compute with them"
                return words if self._carried() else ""
        return ""

    def _carried(self) -> str:
        """Return the name of what a forward pass in training leaves to the next one (see `carried_state`)."""
        return self._of_one_device(carried_state)

    def _of_one_device(self, find: Callable[[Run, Session, int], str]) -> str:
        with code_state.before(self._run).unchanged():
            return find(self._copied(self._fine, Parallel()), self._session, self._num_parts)

    def _remark(self) -> str:
        if self._parts > 1:
            return ", but that batch normalization sees its parts (parallel=ddp parallel.sync_batch_norm=true: all)"
        return f", in {('', 'dropout', 'training mode')[self._switch]} switched off" * bool(self._switch)

    # On every rank

    def _train(self, precision: Precision) -> None:
        run = self._copied(precision, copy.copy(self._run.parallel))
        session = replace(self._session, workload=run.workload, precision=run.precision, num_steps=1)
        try:
            self._tested[type(precision)] = self._recorded(run, session, _SWITCHES[self._switch])
        except ConfigError:
            raise
        except Exception as error:
            if torch_errors.is_lost_peer(error) or torch_errors.is_out_of_memory(error):
                raise
            raise self._refused(f"it fails in its first step: {described(error)}") from error

    def _copied(self, precision: Precision, parallel: Parallel, **options: object) -> Run:
        workload = _copied(self._run.workload)
        parts = {
            "precision": copy.deepcopy(precision),
            "parallel": parallel,
            "workload": workload,
            "schedule": _Still(),
        }
        copied = replace(self._run, **parts, resume="never", **options)  # pyright: ignore[reportArgumentType]
        copied.config = self._run.config
        return copied

    def _recorded(self, run: Run, session: Session, change: Callable[[torch.nn.Module], object]) -> Steps:
        try:
            with torch_refusals(run), code_state.before(run).unchanged():
                steps = record(run, session, self._scratch, change)
        except DivergedError as error:
            return Steps(diverged=str(error))
        weights = steps.tensors["weights"]  # all the others are as they were
        steps.tensors["weights"] = {name: each for name, each in weights.items() if name in steps.replaced}
        return steps

    def _refused(self, why: str) -> ConfigError:
        key, value = next(iter(self._ways.items()))
        plain = {"parallel": "single", "accumulation": "1"}
        remedy = " ".join(f"{name}={plain.get(name, 'false')}" for name in self._ways)
        more = "`python -m runner verify` with the same options shows more, and proof=false trains it nevertheless"
        return ConfigError(key, value, why, f"{remedy} computes it; {more}")


def _words(kind: str, found: Difference, limit: float) -> str:
    what = {"loss": "its loss is not that", "evaluation": "its outputs in evaluations are not those"}
    is_not = what.get(kind, f"its {kind} are not those")
    by = f"{found.where} differs by {found.size:.1e}, and rounding explains {limit:.0e}"
    return f"{is_not} of a single device: {by if found.size < torch.inf else found.where}"


def _copied(workload: Workload) -> Workload:
    """Return a copy that shares the data, but no object that can be called, such as a loss with statistics."""
    copied = copy.copy(workload)
    for name, value in vars(workload).items():
        if callable(value):  # of a function, `deepcopy` returns the function
            setattr(copied, name, copy.deepcopy(value))
    return copied


def _is_finite(steps: Steps) -> bool:
    return all(bool(tensor.isfinite().all()) for kind in _KINDS for tensor in steps.tensors[kind].values())
