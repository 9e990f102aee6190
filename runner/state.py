"""The state that changes during training, which checkpoints save and restore."""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runner.batching import Step
from runner.code_state import CodeState, roots_of
from runner.config import user_code
from runner.config.errors import ConfigError, check, shortened
from runner.config.hooks import Hooks
from runner.data.base import Samples, copied
from runner.device import flops_per_second
from runner.parallel import full_state
from runner.parallel.modules import Modules
from runner.parallel.session import Session
from runner.parallel.step_metrics import StepMetrics
from runner.result import Result
from runner.run import Run, config_hash
from runner.seeds import random_states, set_random_states
from runner.storage.checkpoint import SIGNATURE, Checkpoint
from runner.storage.checkpoints import Checkpoints, prune
from runner.storage.manifest import untrusted
from runner.storage.run_directory import CONFIG, step_name, step_of
from runner.storage.saved_run import config_text, named_checkpoint
from runner.storage.signature import saved_signature, signature_text
from runner.storage.value_checks import CONTENT_ERRORS, TensorSpec, check_like
from runner.system import memory, torch_errors
from runner.torch_optimizer import changed_options, load_changed_options, options_of
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
        self._options = options_of(optimizer)  # which hooks may change
        self.step = 0
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
        self.hooks, self._to_log, self._save_soon = user_code.hooks(), dict[str, Any](), False
        if session.plan.shards_parameters:
            self.hooks = Hooks(*map(full_state.writing_shards, self.hooks))
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

    def resume(self) -> None:
        """Load the newest intact checkpoint of the run directory, or of those up to the one that `resume` names.

        Called on every rank.

        Raises:
            ConfigError: if all are damaged, or the content, part of which may be loaded by then, does not fit this run.
        """
        named = named_checkpoint(self.run.resume)
        last_step = math.inf if named is None else step_of(named) or 0
        checkpoint = self.checkpoints.latest(last_step)
        if checkpoint is None:
            if self.run.resume != "never":
                what = "unfinished run with these options" if self.run.resume == "auto" else "checkpoint"
                log.info("there is no %s to resume from: the run starts at step 1", what)
            return
        saved, workload = saved_signature(self.checkpoints.root / step_name(checkpoint.step)), self.run.workload
        workload.continue_with(saved)  # with its normalization of the data
        if change := self.session.collectives.from_rank_0(partial(workload.check_same_samples, saved)):
            log.warning("the data has changed, as data.changed=accept allows: %s", change)
        self.load(checkpoint)
        log.info("resumed after step %d", self.step)
        schedule, num_steps, before = self.rates.schedule, self.session.num_steps, checkpoint.state["num_steps"]
        if before not in (0, num_steps) and schedule.is_stretched and 0 < self.step < num_steps:  # 0: not known
            text = "the run has %d steps instead of %d: the learning rate schedule is stretched to them, "
            text += "and goes on at %.3g × optimizer.lr"
            log.info(text, num_steps, before, schedule.factor(self.step, num_steps))
        if self.session.rank == 0:
            prune(self.checkpoints.root, keep=None)  # here, as a run that has no step left does not save again

    def load(self, checkpoint: Checkpoint) -> None:
        """Load the state that is in `checkpoint`; called on every rank.

        Raises:
            ConfigError: if the content does not fit this run. A part of the content may have been loaded.
        """
        try:
            self._load(checkpoint)
        except CONTENT_ERRORS as error:
            lost = isinstance(error, torch.distributed.DistError) or torch_errors.is_lost_peer(error)
            if lost or torch_errors.is_out_of_memory(error):
                raise
            log.debug("the checkpoint cannot be loaded", exc_info=error)
            path = self.checkpoints.root / step_name(checkpoint.step)
            names = user_code.given().names()
            if name := names.get("model") or names.get("workload"):
                why = f"its network is not that of {path}, or that is not what a run writes: {error}"
                remedy = "give the network with which the run was trained, or start a new run"
                raise ConfigError("model", name, why, remedy) from None
            raise untrusted(path, f"the hashes are correct, but the content is not: {error}") from None

    def _load(self, checkpoint: Checkpoint) -> None:
        run, devices = self.run, self.session.devices
        shared, local = checkpoint.state, checkpoint.local
        window = self.step_metrics.form()
        like = {"optimizer": {str: dict}, "precision": dict, "window": window, "num_steps": int}
        if "logged" in shared:  # in an older one, whose sums have no counts
            like |= {"window": TensorSpec(torch.float32, (None, None)), "logged": int}
        like |= {"metrics": {str: float}, "best": dict, "stop": dict}
        is_older = not {"buffers", "replicas"} & local.keys()  # without the state of a loss, `random` and NumPy
        like |= {"loss": [dict]} if "loss" in shared or not is_older else {}
        like |= {"attributes": {str: object}} if "attributes" in shared else {}
        later = {"workload": dict, "schedule": dict, "code": {str: object}}
        later["options"] = [{str: [object]}]
        like |= {key: form for key, form in later.items() if key in shared}  # not in an older one
        check_like(shared, like, "the state")
        if shared["best"]:
            check_like(shared["best"], {"metric": str, "value": float, "step": int}, "the best evaluation")
        if local:
            like = {"workload": dict, "parallel": dict, "random": dict, "ema": dict}
            like |= {} if is_older else {"buffers": dict, "replicas": [int]}
            like |= {"code": {str: object}} if "code" in local else {}
            check_like(local, like, "the state of a rank")
        load = partial(run.parallel.load_full_state, self.model)
        load(self.optimizer, checkpoint.tensors, shared["optimizer"])
        load_changed_options(self.optimizer, shared.get("options", []))
        self.average.load(checkpoint.ema, lambda averages, state: load(averages, checkpoint.tensors, state))
        self.stopping.load_state_dict(shared["stop"])
        self.rates.load_state_dict(shared.get("schedule", {}))
        run.precision.load_state_dict(shared["precision"])
        self.step, self.metrics, self.best = checkpoint.step, shared["metrics"], shared["best"]
        run.workload.load_shared_state(shared.get("workload", {}))
        window = shared["window"]
        if "logged" in shared:
            num_samples = (self.step - shared["logged"]) * run.batch_size
            window = torch.stack((window, torch.full_like(window, num_samples / max(1, len(window)))), 1)
        self.step_metrics.load(window, self.step)
        run.parallel.load_local_state(self.model, self.optimizer, local.get("parallel", {}))
        if run.ema.decay and local.get("ema"):
            run.parallel.load_local_state(self.model, self.average.optimizer, local["ema"])
        self.modules.load(checkpoint.tensors, shared, local.get("buffers", {}), local.get("replicas", []))
        has_own = local.get("code") and local["replicas"] == self.modules.replicas
        self.code.load(local["code"] if has_own else shared.get("code", {}), self.session.device)
        if local:
            run.workload.load_state_dict(local["workload"])
            run.workload.load_parts(checkpoint.part_files)
            for name, now in random_states(devices).items():
                needed = ("cpu",) if is_older else ("cpu", "random", "numpy")
                if name in local["random"] or name in needed:  # a run on other devices saved no state for this one
                    check_like(local["random"][name], now, f"the random state, {name}")
            set_random_states(local["random"], devices)
        else:
            log.info("rank %d saved nothing in this checkpoint: its random numbers start anew", self.session.rank)

    def save(self) -> None:
        """Copy the state, check that it is finite, and begin to write it in the background; called on every rank.

        Raises:
            DivergedError: if a training metric since the last log, the model or the optimizer state is not finite.
                Nothing is then written, and earlier checkpoints are kept.
            StorageError: if the previous checkpoint could not be written, or the new directory cannot be created.
        """
        run, collectives, device = self.run, self.session.collectives, self.session.device
        window = self.step_metrics.window()
        collect = partial(run.parallel.full_state, self.model)
        own = self.modules.of_rank()
        with self.modules.synchronized():
            tensors, optimizer_state = collect(self.optimizer)
            ema, loss = self.average.full_tensors(collect), self.modules.loss_state()
            attributes = self.modules.attributes()
            own = self.modules.only_of_rank(own)
        moments = {f"{key} of {name}": t for name, state in optimizer_state.items() for key, t in state.items()}
        broken = [name for name in full_state.not_finite(tensors | moments) if name not in self.modules.not_finite]
        totals = collectives.all_reduce({"broken": torch.tensor(float(bool(broken)), device=device)})
        if totals["broken"]:  # all-reduced, because not every rank has every tensor
            raise DivergedError(self.step, broken[0] if broken else "the state")
        code = self.code.changed()
        if not self.has_saved:
            self.modules.say_unsaved(code)
        self.has_saved = True
        shared = {
            "optimizer": optimizer_state,
            "precision": run.precision.state_dict(),
            "window": window,
            "metrics": {tag: value for tag, value in self.metrics.items() if math.isfinite(value)},
            "best": dict(self.best),
            "num_steps": self.session.num_steps,
            "stop": self.stopping.state_dict(),
            "loss": loss,
            "attributes": attributes,
            "workload": run.workload.shared_state(),
            "schedule": self.rates.state_dict(),
            "code": code,
            "options": changed_options(self.optimizer, self._options),
        }
        local = {
            "workload": copy.deepcopy(run.workload.state_dict()),
            "parallel": run.parallel.local_state(self.model, self.optimizer),
            "random": random_states(self.session.devices),
            "buffers": own,
            "replicas": self.modules.replicas,
            "code": code if self.session.world_size > 1 else {},
            "ema": run.parallel.local_state(self.model, self.average.optimizer) if run.ema.decay else {},
        }
        checkpoint = Checkpoint(self.step, tensors, shared, local, ema, run.workload.parts())
        self.checkpoints.save(checkpoint, self.best.get("step"))

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
