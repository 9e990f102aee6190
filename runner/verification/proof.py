"""The proof at the start of a run: its first step, in its mode, against that of the same network on a single device.

It is for code from elsewhere, which a parallel mode, a compiler or a memory format may compute differently. Compared
are the samples of the first batch, the loss, the gradients, the buffers, and the outputs of an evaluation.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from runner.config import user_code
from runner.config.errors import ConfigError, described
from runner.config.options import chosen_option
from runner.config.schema import component_fields
from runner.model.networks import NamedModel
from runner.parallel.launch.process_group import no_process_group
from runner.parallel.session import Session
from runner.precision import Double, Precision
from runner.run import Run
from runner.seeds import random_states, set_random_states
from runner.system import torch_errors
from runner.system.lazy_import import nothing_frozen
from runner.tracking.log_file import quiet
from runner.verification.single_device import KINDS, SWITCHES, SingleDevice, copy_of, first_step
from runner.verification.steps import Steps
from runner.verification.verdict import (
    FLOAT32_ROUNDING,
    MARGIN,
    Difference,
    Pair,
    first_other_samples,
    largest_difference,
)
from runner.workloads.losses import SUM

log = logging.getLogger(__name__)

T = TypeVar("T")


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
    """The first step of a run, by precision, beside that of a single device, which rank 0 computes alone."""

    def __init__(self, run: Run, session: Session, ways: Mapping[str, str], scratch: Path):
        self._run, self._session, self._ways, self._scratch = run, session, ways, scratch
        self._num_parts = session.plan.num_parts
        self._alone = SingleDevice(run, session, scratch)
        self._tested: dict[type[Precision], Steps] = {}

    def text(self) -> str:
        """Return in words what was found; raise a `ConfigError` if the steps differ. Called on every rank."""
        on_rank_0, own, exact = self._on_rank_0, self._run.precision, Double()
        fine = self._alone.fine
        self._alone.switch, why_not, draws, mistake = on_rank_0(self._alone.choose)
        if mistake:
            raise self._refused(mistake)
        if why_not:
            return f"left out, as {why_not}"
        self._train(fine)
        if draws:  # which may change nothing, as the order of a sum
            found = on_rank_0(partial(self._difference, fine))
            return f"left out, as {draws}" if found else "the first step is that of a single device"
        found = on_rank_0(partial(self._difference, fine))
        if found and not isinstance(fine, Double) and on_rank_0(self._alone.has_float64):  # it may be rounding
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

    def _difference(self, precision: Precision) -> str:
        """Return in words what differs by more than the rounding of float32; empty if nothing does."""
        tested, reference = self._tested[type(precision)], self._alone.steps(precision)
        if tested.diverged:
            return f"{tested.diverged}, but not on a single device"
        if first_other_samples(Pair(tested, reference)):
            return "it trains on other samples than a single device: what the data returns depends on who reads it"
        for kind in KINDS:
            if not (found := self._alone.largest(tested, reference, kind)).size <= FLOAT32_ROUNDING:
                parts = self._num_parts if self._alone.parts == 1 else 1
                is_of_parts = parts > 1 and (
                    self._alone.largest(tested, self._alone.steps(precision, parts), kind).size <= 10 * FLOAT32_ROUNDING
                )
                why = "; a single device computes the same from the parts of the batch: the network or the loss "
                more = f"{why}depends on how it is divided" * is_of_parts + self._is_sum(tested, reference)
                return _words(kind, found, FLOAT32_ROUNDING) + more
        if lost := sorted({*tested.replaced} ^ {*reference.replaced}):
            return f"weights that the forward pass replaces ({lost[0]}) are not kept, or only by some processes"
        if not (found := self._alone.largest(tested, reference, "weights")).size <= FLOAT32_ROUNDING:
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
        tested, reference = self._tested[type(rough)], self._alone.steps(rough)
        if reference.diverged or not _is_finite(reference):  # an overflow of float16, which skips the step
            return ""
        for kind in KINDS:
            rounding = self._alone.largest(reference, self._alone.steps(fine), kind)
            found, limit = self._alone.largest(tested, reference, kind), max(least, MARGIN * rounding.size)
            if not found.size <= limit:
                return _words(kind, found, limit)
        return ""

    def _other_buffers(self, tested: Steps, reference: Steps) -> str:
        """Return in words which state of a process is not that of a single device, if training uses it."""
        theirs = {name.removesuffix(" of rank 0"): each for name, each in reference.tensors["buffers of ranks"].items()}
        for name, ours in tested.tensors["buffers of ranks"].items():
            buffer = name.rpartition(" of rank ")[0]
            if buffer not in theirs:  # of a mode, such as the sums of deferred batch normalization
                continue
            if not (found := largest_difference({name: ours}, {name: theirs[buffer]})).size <= FLOAT32_ROUNDING:
                words = _words("buffers or attributes", found, FLOAT32_ROUNDING) + "; later steps compute with them"
                return words if self._alone.carried() else ""
        return ""

    def _remark(self) -> str:
        if self._alone.parts > 1:
            return ", but that batch normalization sees its parts (parallel=ddp parallel.sync_batch_norm=true: all)"
        return f", in {('', 'dropout', 'training mode')[self._alone.switch]} switched off" * bool(self._alone.switch)

    # On every rank

    def _train(self, precision: Precision) -> None:
        run = copy_of(self._run, precision, copy.copy(self._run.parallel))
        session = replace(self._session, workload=run.workload, precision=run.precision, num_steps=1)
        try:
            self._tested[type(precision)] = first_step(run, session, self._scratch, SWITCHES[self._alone.switch])
        except ConfigError:
            raise
        except Exception as error:
            if torch_errors.is_lost_peer(error) or torch_errors.is_out_of_memory(error):
                raise
            raise self._refused(f"it fails in its first step: {described(error)}") from error

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


def _is_finite(steps: Steps) -> bool:
    return all(bool(tensor.isfinite().all()) for kind in KINDS for tensor in steps.tensors[kind].values())
