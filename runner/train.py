"""The story of one run, from composed parts to the last optimizer step. Read it top to bottom.

It names no mode, no precision and no workload: they are asked, through the contracts of their base classes.
"""

from __future__ import annotations

import json
import logging
from functools import partial

import torch
from omegaconf import OmegaConf

from runner import memory
from runner.clock import clock
from runner.environment import environment
from runner.progress import Progress, progress_for
from runner.record import Record
from runner.run import CrashedError, Result, Run
from runner.seeds import derive
from runner.signals import StopRequest
from runner.state import State
from runner.window import DivergedError

log = logging.getLogger(__name__)


def train(run: Run) -> Result:
    """Train one run to its end, to a signal, or to the step that diverged; every process of the run enters here.

    Raises:
        CrashedError: from any error of a step, with what was done up to it.
    """
    parallel = run.parallel
    device = parallel.device(run.device)
    writes = parallel.rank == 0
    with run.device.settings(device, run.deterministic):
        state = prepare(run, device)
        with (
            Record(run.directory, state.step, visible=writes) as record,
            progress_for(run.num_steps, run.batch_size, state.step, visible=writes) as progress,
            run.profiler.profile(run.directory, device),
            StopRequest() as stop,
        ):
            describe(run, record)
            try:
                status, error = loop(state, record, progress, stop), ""
            except DivergedError as diverged:
                status, error = "diverged", str(diverged)
                save_offending(run, diverged.step, device)
            except Exception as error:
                raise CrashedError(state.result("crashed", f"{type(error).__name__}: {error}")) from error
            if status == "done":
                record.close_row()
                state.checkpoints.finish()
        return state.result(status, error)


def prepare(run: Run, device: torch.device) -> State:
    """The parts, placed and resumed. Weights come from the root seed alone; what is random later, from the rank too."""
    clock.reset()
    memory.reset_peak(device)
    run.precision.prepare(device)
    torch.manual_seed(derive(run.seed, "weights"))
    model = run.precision.convert(run.workload.build_model())
    model = run.parallel.place(model, device, run)
    torch.manual_seed(derive(run.seed, "rank", run.parallel.random_stream))
    state = State(run, model, run.optimizer.build(model), device)
    state.resume()
    return state


def loop(state: State, record: Record, progress: Progress, stop: StopRequest) -> str:
    """The steps that are left; returns `done` or `stopped`."""
    run, model, optimizer = state.run, state.model, state.optimizer
    parallel, precision, workload, plan = run.parallel, run.precision, run.workload, run.plan
    clip = partial(parallel.clip_gradients, model, run.max_grad_norm)
    batches = workload.batches(model, plan, state.step, state.device)
    model.train()
    state.stopwatch.start()

    for step, micros in plan.steps(state.step, run.num_steps):
        # One update. Nothing here waits for the device: sums and norm stay on it until a log is due.
        for micro in micros:
            with clock.section("data"):
                batch = next(batches)
            state.window.add(parallel.accumulate(model, workload, batch, precision, micro))
        state.window.end_step()
        log_due = run.due(run.log_every, step)
        with clock.section("optimizer"):
            run.schedule.set_lr(optimizer, step - 1 - precision.num_skipped(), run.num_steps)
            norm = precision.step(optimizer, clip if log_due or run.max_grad_norm else None, parallel.anywhere)
            workload.after_step(model, step)
        state.step = step
        evaluation_due, save_due = run.due(run.eval_every, step), run.due(run.save_every, step)
        state.stopwatch.lap(pausing=log_due or evaluation_due or save_due)

        # Whatever is due. Every rank enters; rank 0 writes.
        is_best = False
        if log_due:
            with clock.section("log"):
                log_training(state, record, progress, norm)
        if evaluation_due:
            with clock.section("evaluate"):
                is_best = evaluate(state, record, progress)
        stopping = parallel.agree(bool(stop.received))
        if save_due or is_best or stopping:
            with clock.section("checkpoint"):
                record.sync()  # a resume does not log again what came before the checkpoint
                state.save()
        progress.step(step)
        run.profiler.after_step(step)
        if stopping and step < run.num_steps:
            log.info("asked to stop by a signal: saved after step %d", step)
            return "stopped"
    return "done"


def log_training(state: State, record: Record, progress: Progress, norm: torch.Tensor | None) -> None:
    """A point of every training curve."""
    run = state.run
    means = state.take_window()
    state.metrics |= means
    progress.metrics(means)
    log.debug("step %d: %s", state.step, means)
    record.scalars(means, state.step)
    record.scalars({"train/gradient_norm": norm, "lr": state.optimizer.param_groups[0]["lr"]}, state.step)
    record.scalars(run.precision.scalars() | run.workload.scalars() | run.parallel.scalars(), state.step)
    record.scalars(state.stopwatch.rates(run.round_size) | memory.usage(state.device), state.step)


def evaluate(state: State, record: Record, progress: Progress) -> bool:
    """Measure the held-out data; returns whether this is the best so far."""
    run, model, parallel = state.run, state.model, state.run.parallel
    model.eval()
    metrics, sums = parallel.evaluate(model, run.workload, run.precision, state.device)
    model.train()
    metrics = {f"eval/{name}": value for name, value in metrics.items()}
    progress.metrics(metrics)
    log.debug("step %d: %s", state.step, metrics)
    record.scalars(metrics, state.step)
    record.pictures(run.workload.pictures(sums) | parallel.pictures(), state.step)
    return state.take_evaluation(metrics)


def describe(run: Run, record: Record) -> None:
    """The config and the machine as text, and the run's row in the table of hyper-parameters."""
    config = OmegaConf.to_yaml(OmegaConf.create(run.config))
    record.texts({"config": config, "environment": json.dumps(environment(), indent=2)})
    record.open_row(run.config)


def save_offending(run: Run, step: int, device: torch.device) -> None:
    """Keep the batch whose loss was not finite, for a look at it."""
    batch = run.workload.offending(run.plan, step, device)
    if batch is not None:
        path = run.directory / f"diverged_step_{step:08d}_rank_{run.parallel.rank}.pt"
        torch.save({"step": step, **batch}, path)
        log.error("the batch of step %d is in %s", step, path)
