"""The state that changes during training, which checkpoints save and restore."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runner.batching import Step
from runner.code_places import roots_of
from runner.code_state import CodeState
from runner.config import user_code
from runner.config.errors import check, shortened
from runner.config.hooks import Hooks
from runner.data.base import Samples, copied
from runner.device import flops_per_second
from runner.parallel.modules import Modules
from runner.parallel.session import Session
from runner.parallel.step_metrics import StepMetrics
from runner.result import Result
from runner.run import Run, config_hash
from runner.seeds import derive, random_states, set_random_states
from runner.storage.checkpoint import SIGNATURE
from runner.storage.checkpoints import Checkpoints
from runner.storage.run_directory import CONFIG
from runner.storage.saved_run import config_text
from runner.storage.signature import signature_text
from runner.system import memory
from runner.system.generators import drawing_from
from runner.torch_optimizer import options_of
from runner.tracking.metrics import BatchSums, DivergedError, StepTimer, quantiles
from runner.workloads.base import Workload, check_metrics
from runner.workloads.phases import Phase

log = logging.getLogger(__name__)


class State:
    """The training state of a run: what changes while it trains.

    Args:
        run, session: the options, and the process with its part of the work, which do not change.
        directory: the run directory.
        model: the model, as returned by the parallel mode's `place`.
        optimizer: optimizer of the model's parameters.
        model_description, model_table: the whole model in a line, and its blocks in a table, for the log.
        forward_flops: the floating-point operations of a forward pass of one sample; 0 if they are not known.
    """

    def __init__(
        self,
        run: Run,
        session: Session,
        directory: Path,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        model_description: str = "",
        model_table: str = "",
        forward_flops: int = 0,
    ):
        self.run, self.session, self.directory, self.model, self.optimizer = run, session, directory, model, optimizer
        self.model_description, self.model_table = model_description, model_table
        self.flops_per_sample = run.workload.forward_passes * forward_flops
        self.modules = Modules(model, session)
        self.code = CodeState(roots_of(model, run.workload.user_loss))
        self.code.begin()
        self.options = options_of(optimizer)  # which hooks may change
        self.step = 0
        self._is_checked = False
        self.has_saved = False  # whether a checkpoint has been written, or begun, in this session
        self.average = run.ema.build(model)
        self.stopping = run.stop.build(session.eval_metrics)
        self.rates = run.schedule.build(session.eval_metrics, run.workload.selection, run.optimizer.schedules())
        others = self.rates.others(optimizer, session.num_steps)
        why = "the step is compiled once, with the first value"
        check(not others or run.compile != "step", "schedule.options", ", ".join(others), why, "compile=true")
        # Whether an average or a target network follows the weights, which must not move if an update is skipped.
        has_target = type(run.workload).after_step is not Workload.after_step
        self.weights_are_followed = has_target or run.ema.decay is not None
        self.phases = run.workload.phases(model)
        self.step_metrics = StepMetrics(self.phases, session)
        self.step_timer = StepTimer(session.devices)
        self.metrics: dict[str, float] = {}
        self.best: dict[str, Any] = {}
        own = zip(Hooks._fields, user_code.hooks(), Hooks(), strict=True)
        self.hooks = Hooks(**{name: self._alike_everywhere(hook) for name, hook, none in own if hook is not none})
        self._to_log, self._save_soon = dict[str, Any](), False
        self._stop_reason = ""
        self.out_of_time = ""  # the rule `stop.max_time` in words, once the time of rank 0 is up
        self.hash, config = config_hash(run.config), config_text(run.config)
        self.checkpoints = Checkpoints(
            directory,
            run.keep,
            session.rank,
            session.world_size,
            session.collectives.barrier,
            session.collectives.timeout,
            {CONFIG: lambda: config, SIGNATURE: partial(_signature_text, run)},
        )

    def check_trained(self) -> None:
        """Refuse, after the first step, what no optimizer would train or no checkpoint restore."""
        if not self._is_checked:
            self._is_checked = True
            self.code.check_trained(self.model)
            self.modules.check_names()

    @property
    def last_step(self) -> int:
        """The last step of the run: `num_steps`, or the current step if `patience` or `target` ends the run."""
        return self.step if self.stopping.reason else self.session.num_steps

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context for an evaluation, with averaged weights: the training goes on as without it."""
        random = random_states(self.session.devices)
        try:
            with self.code.unchanged(in_evaluation=True), self.average.applied(), self.modules.evaluating():
                yield
        finally:
            set_random_states(random, self.session.devices)

    # For hooks

    def _alike_everywhere(self, hook: Callable[..., object]) -> Callable[..., object]:
        """Return `hook`, which gets the same random numbers in all processes of all modes."""

        def called(*arguments: Any) -> object:
            seed = derive(self.session.plan.seed, "hooks", self.step)
            with drawing_from(seed, self.session.devices), self.run.parallel.calling_hooks():
                return hook(*arguments)

        return called

    def log(self, tag: str, value: float | str | torch.Tensor) -> None:
        """Log a number, a scalar tensor or a text at the next point of the curves; of several of a tag, the last.

        Only those of rank 0 are logged. A tensor is read only then, so that the host does not wait for the device.

        Raises:
            TypeError: if it is something else, here, where the traceback names the line of the hook.
        """
        given: Any = value
        is_tensor = isinstance(given, torch.Tensor)
        if not is_tensor and getattr(given, "size", 0) == 1:  # of NumPy
            given = given.item()
        is_number = given.numel() == 1 and not given.is_complex() if is_tensor else hasattr(given, "__float__")
        if not isinstance(tag, str) or not (is_number or isinstance(given, str)):
            found = f"{given.dtype} {list(given.shape)}" if is_tensor else shortened(repr(given))
            raise TypeError(f"log({tag!r}, …) takes a tag, and one number or a text, and not {found}")
        self._to_log[tag] = given if isinstance(given, str) else given.detach() if is_tensor else float(given)

    def logged_by_hooks(self, own: Iterable[str]) -> dict[str, Any]:
        """Return what hooks have logged since the last call, by tag.

        Raises:
            ValueError: if a tag is among the run's `own`.
        """
        logged, self._to_log = self._to_log, {}
        if taken := sorted(logged.keys() & {*own}):
            raise ValueError(f"log({taken[0]!r}, …): the run logs this tag itself; choose another one")
        return logged

    def stop(self, reason: str) -> None:
        """End the run as done, on all ranks, after a checkpoint: after this step or the next one."""
        self._stop_reason = reason

    def save_soon(self) -> None:
        """Save a checkpoint, on all ranks, after this step or the next one."""
        self._save_soon = True

    def copied_data_values(self) -> dict[str, Any]:
        """Return what `Samples.copied_values` does of the training samples, which a hook must not change."""
        samples = getattr(self.run.workload, "train", None)
        return samples.copied_values() if isinstance(samples, Samples) else {}

    def agree(self, interrupted: bool) -> tuple[bool, bool]:
        """Return whether any rank is `interrupted`, and whether a hook of any asks to save; take over its `stop`.

        Called on every rank.
        """
        if not self.session.collectives.any_rank(interrupted or self._save_soon or bool(self._stop_reason)):
            return False, False
        found = self.session.collectives.all_gather((interrupted, self._save_soon, self._stop_reason))
        self._save_soon, self.stopping.asked = False, next((reason for *_, reason in found if reason), "")
        return any(stop for stop, *_ in found), any(save for _, save, _ in found)

    def phases_due(self, step: Step, batches: Iterator[Any]) -> Iterator[tuple[Phase, Iterator[Any]]]:
        """Yield the phases of `step`, and for each an iterator over its micro-batches, which all phases have in common.

        `batches` yields those of all steps.
        """
        if len(self.phases) == 1:
            yield self.phases[0], batches
            return
        of_step = list(itertools.islice(batches, len(step.micro_batches)))
        for phase in self.phases:
            if step.number % phase.every == 0:
                yield phase, map(copied, of_step)

    def divide_gradients(self, phase: Phase, sums: BatchSums) -> None:
        """Divide the gradients by the count of the loss, if that is another than the number of samples; on every rank.

        `sums` are those of `phase` on this process.
        """
        if self.step_metrics.has_own_count.get(phase.name):
            self.run.parallel.divide_gradients(self.model, sums[1, 0])

    def record_evaluation(self, metrics: dict[str, float]) -> bool:
        """Record an evaluation, whose `metrics` by tag are the same on all ranks; return whether it is the best so far.

        Raises:
            DivergedError: if a loss is not finite. Another metric may be, if it is not defined: it is never the best.
            ConfigError: if a metric that the workload lists is not measured.
        """
        check_metrics(self.run.workload, [tag.removeprefix("eval/") for tag in metrics])
        losses = [tag for tag in metrics if tag.rpartition("/")[2] == "loss"]
        broken = [tag for tag in losses if not math.isfinite(metrics[tag])]
        if broken:
            # Raises DivergedError for the first training step since the last log that was not finite, if any.
            self.step_metrics.peek()
            raise DivergedError(self.step, broken[0])
        self.metrics |= metrics
        self.stopping.evaluated(metrics, self.step)
        self.rates.evaluated(metrics, self.step)
        name, direction = self.run.workload.selection
        value, best = metrics[f"eval/{name}"], self.best.get("value")
        if not math.isfinite(value) or (best is not None and not {"max": value > best, "min": value < best}[direction]):
            return False
        self.best = {"metric": f"eval/{name}", "value": value, "step": self.step}
        return True

    def result(self, status: str, error: str) -> Result:
        """Return the result of the run up to the current step, with the given `status` and `error`.

        Called on every rank, unless the run crashed.
        """
        session, step_timer = self.session, self.step_timer
        step_seconds = quantiles(step_timer.steady())
        rule = self.stopping.reason or self.out_of_time
        in_step = status in ("done", "stopped")  # all ranks are here; after an error, perhaps only this one
        rate = session.plan.samples_per_round / step_seconds["median"] if step_seconds else 0.0
        flops, peak = rate * self.flops_per_sample, 0.0
        if flops and in_step and session.rank == 0 and session.device.type != "cpu":
            dtype = self.run.precision.compute_dtype(session.device) or next(
                (each.dtype for each in self.model.parameters()), torch.float32
            )
            peak = flops_per_second(session.device, dtype) * session.world_size * len(session.devices)
        return Result(
            status=status,
            steps=self.step,
            metrics=self.metrics,
            best=self.best,
            seconds=step_timer.elapsed(),
            samples_per_second=rate,
            step_seconds=step_seconds,
            tflops=flops / 1e12,
            peak_share=flops / peak if peak else None,
            peak_memory_bytes=int(memory.usage(session.device)["memory/peak"]),
            world_size=session.world_size,
            config_hash=self.hash,
            notes=self.run.workload.extra_results(session.collectives.all_gather if in_step else lambda value: [value]),
            error=error,
            stopped_by=rule if in_step and self.step < session.num_steps else "",
        )


def _signature_text(run: Run) -> str:
    identity = run.workload.samples_identity()
    entries = run.workload.signature() | run.parallel.signature()
    return signature_text(entries | ({"data": identity} if identity else {}))
