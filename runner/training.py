"""The training loop. It prepares the state of a run, and trains until the last optimizer step.

Read this module from top to bottom. The loop depends only on the base classes of parallel modes, precisions and
workloads, not on any subclass.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runner import code_state
from runner.batching import Step
from runner.code_places import reads_parameters
from runner.config import user_code
from runner.config.errors import ConfigError, described
from runner.device import oversubscription
from runner.failures import save_diverged_batch, torch_refusals
from runner.models.blocks import table_of
from runner.parallel.buffers import with_own_memory
from runner.parallel.collectives import Collectives
from runner.parallel.round_trip import check_dense, check_round_trip
from runner.parallel.session import Session
from runner.result import CrashedError, Result
from runner.run import Run, build_run, describe_model
from runner.saved_state import resume, save
from runner.seeds import derive, seed_all
from runner.state import State
from runner.storage.saved_run import config_yaml
from runner.storage.signature import signature_to_resume
from runner.system import memory, torch_private
from runner.system.provenance import environment
from runner.system.section_timer import timer
from runner.system.signals import StopRequest, is_of_signal
from runner.torch_optimizer import learning_rates
from runner.tracking.log_file import LogFile
from runner.tracking.metrics import DivergedError, in_words
from runner.tracking.progress import Progress, progress_for
from runner.tracking.recorder import Recorder
from runner.trial import try_evaluation

log = logging.getLogger(__name__)

TakeStep = Callable[[State, Iterator[Any], Step, bool], torch.Tensor | None]


def train(
    run: Run,
    session: Session,
    directory: Path,
    begin: Callable[[], None] = lambda: None,
    prove: Callable[[Run, Session], None] = lambda run, session: None,
) -> Result:
    """Train one run until it is done, stopped, or diverged, and return its result; called on every rank.

    Args:
        run: the options.
        session: this process, and its part of the work.
        directory: the run directory.
        begin: function that rank 0 calls once no rank has refused the config or the checkpoint to resume from. It
            writes the config to the directory of a run that is resumed.
        prove: function that every rank calls first; it raises `ConfigError` if this mode would compute something else.

    Raises:
        ConfigError: if the model, the optimizer or the data do not fit the config or the checkpoint to resume from, or
            torch cannot train the config.
        CrashedError: if the training loop raises any other error; it holds the result up to the last completed step.
    """
    writes = session.rank == 0
    with run.settings(session.device):
        run.parallel.continue_with(signature_to_resume(directory, run.resume))
        with code_state.before(run).unchanged():
            prove(run, session)
        with torch_refusals(run):  # already here, as a pipeline measures the blocks of the model
            state = prepare(run, session, directory, with_table=True)
            take_step = step_function(state)
        if state.step == 0:  # the checkpoints of a resumed run are partly there
            session.collectives.from_rank_0(lambda: run.workload.check_disk(shutil.disk_usage(directory).free))
        session.collectives.from_rank_0(begin)
        with (
            Recorder(run.tracking, directory, state.step, visible=writes) as recorder,
            progress_for(session.num_steps, state.step, visible=writes) as progress,
            run.profiler.profile(directory, *session.devices),
            run.device.memory_recorded(directory / f"memory_rank_{session.rank}.pickle"),
            StopRequest() as stop,
            state.code.standing_for(code_state.copies(state.model, run.workload.user_loss)),
        ):
            introduce(state, recorder)
            try:
                with torch_refusals(run):
                    if state.step == 0 and user_code.given().names():
                        check_round_trip(state.modules, run.parallel, session)
                    try_evaluation(state)
                    status, error = loop(state, take_step, recorder, progress, stop), ""
            except DivergedError as diverged:
                status, error = "diverged", str(diverged)
                save_diverged_batch(session, directory, diverged.step)
                state.checkpoints.wait()
            except ConfigError as refusal:
                state.checkpoints.finish_after_error()
                # A signal to the whole process group, as of a scheduler, also ends the C++ compiler.
                was_compiler_stopped = refusal.key == "compile" and stop.received and session.world_size == 1
                if was_compiler_stopped:
                    status, error = "stopped", ""
                elif state.has_saved:  # a refused run leaves nothing behind, but this one has to keep what it saved
                    raise CrashedError(state.result("crashed", str(refusal))) from refusal
                else:
                    raise
            except BaseException as error:  # of a user's code, which may also call `sys.exit()`
                if is_of_signal(error):
                    raise
                state.checkpoints.finish_after_error()
                raise CrashedError(state.result("crashed", described(error))) from error
            result = state.result(status, error)  # before the trackers are closed: it involves collectives
            recorder.finish(status)
        return result


def train_rank(
    config: dict[str, Any], directory: Path, collectives: Collectives, **functions: Callable[..., None]
) -> Result:
    """Train the run of `config` in this process, which a launcher has started; otherwise, like `train`."""
    run = build_run(config)
    session = run.prepare(collectives)
    with LogFile(directory, session.rank):
        return train(run, session, directory, **functions)


def prepare(run: Run, session: Session, directory: Path, with_table: bool = False) -> State:
    """Return the state of the run, with the model on its devices, resumed from a checkpoint if there is one.

    Raises:
        ConfigError: as in `initial_state` and `State.resume`.
    """
    if user_code.given().names():
        session.check_same_samples()
    state = initial_state(run, session, directory, with_table)
    resume(state)
    return state


def initial_state(run: Run, session: Session, directory: Path, with_table: bool = False) -> State:
    """Return the state of the run before its first step, with the model on its devices, and a table of it for the log.

    The weights depend only on the seed of the plan; later random numbers also depend on the process. This function
    seeds the global generators of torch, `random` and NumPy, and resets the global timer and the peak of the memory.

    Raises:
        ConfigError: if the model or the optimizer cannot be built from the config.
    """
    timer.reset()
    memory.reset_peak(session.device)
    run.precision.prepare(session.device)
    torch_private.defer_compiler()  # optimizers and the table import it: a second before the first step
    seed_all(derive(session.plan.seed, "weights"))
    model = run.workload.build_model()
    check_dense(model)
    with code_state.before(run).unchanged():
        table = table_of(model, run.workload.input_shape()) if with_table else ("", 0)  # before a mode splits the model
    model = run.precision.convert(model)
    description = describe_model(with_own_memory(model))
    groups = run.optimizer.parameter_groups(model)
    if session.plan.shards_parameters:
        session = replace(session, reads_parameters=reads_parameters(model, run.workload.user_loss))
    model = run.parallel.place(model, session)
    seed_all(derive(session.plan.seed, "rank", session.plan.rng_stream))
    return State(run, session, directory, model, run.optimizer.build(model, groups), description, *table)


def loop(state: State, take_step: TakeStep, recorder: Recorder, progress: Progress, stop: StopRequest) -> str:
    """Train the remaining steps, and return `done`, or `stopped` after a stop signal or when the time is up.

    Raises:
        DivergedError: if a loss, a metric or the state is not finite.
        StorageError: if a checkpoint cannot be written.
    """
    run, session = state.run, state.session
    batches = run.parallel.batches(state.model, state.step)
    state.modules.train()
    state.step_timer.start(math.ceil((state.last_step - state.step) / session.plan.steps_per_round))

    for step in session.plan.steps(state.step, state.last_step):
        log_due = session.is_due(run.log_every, step.number)
        norm = take_step(state, batches, step, log_due)
        state.hooks.after_step(state)
        state.check_trained()
        evaluation_due = session.is_due(session.eval_every, step.number)
        save_due = session.is_due(session.save_every, step.number)
        state.step_timer.lap(pausing=log_due or evaluation_due or save_due)

        # All ranks take part in what is due, because it may involve collectives; rank 0 writes.
        is_best = False
        if log_due:
            with timer.section("log"):
                state.checkpoints.check_directory()
                log_training(state, recorder, progress, norm)
        if evaluation_due:
            with timer.section("evaluate"):
                is_best = evaluate(state, recorder, progress)
        if session.rank == 0:  # whose clock decides for all ranks, as its log and result name the rule
            state.out_of_time = state.stopping.out_of_time(state.step_timer.elapsed())
        stopping, asked_to_save = state.agree(bool(stop.received or state.out_of_time))
        if save_due or asked_to_save or is_best or stopping or state.stopping.reason:
            state.step_timer.end_window()  # after a stop, which is not foreseen
            with timer.section("checkpoint"):
                state.checkpoints.wait()  # for the previous one, whose copy of the state takes memory
                recorder.flush()  # a run resumed from this checkpoint does not log earlier steps again
                state.hooks.before_save(state)
                save(state)
        state.checkpoints.check()  # they are written in the background
        progress.step(step.number)
        run.profiler.after_step(step.number)
        if state.stopping.reason:
            break
        if stopping and step.number < session.num_steps:
            state.checkpoints.wait()
            state.out_of_time = session.collectives.from_rank_0(lambda: state.out_of_time)
            log.info("%s: saved after step %d", state.out_of_time or "asked to stop", step.number)
            return "stopped"
    state.checkpoints.wait()
    return "done"


def step_function(state: State) -> TakeStep:
    """Return the function that computes the steps of a run: `train_step`, or what `compile=step` puts in its place."""
    if state.run.compile == "step":
        from runner.compiled_step import CompiledStep  # imports torch.func: 0.1 s

        return CompiledStep(state)
    return train_step


def train_step(state: State, batches: Iterator[Any], step: Step, log_due: bool) -> torch.Tensor | None:
    """Run one optimizer step: the forward and backward passes of its micro-batches, and the update.

    The host does not wait for the device. With loss scaling, however, it waits for the end of the previous step, or of
    this one if there is an average of the weights or a target network.

    Returns:
        The gradient norm before clipping, a scalar on the device; None if no log is due and gradients are not clipped.
    """
    run, session, model = state.run, state.session, state.model
    norms, num_skipped = list[torch.Tensor | None](), 0
    for phase, of_phase in state.phases_due(step, batches):
        with run.parallel.phase(model, phase):
            for micro in step.micro_batches:
                with timer.section("data"):
                    batch = next(of_phase)
                with run.parallel.measured(micro):
                    sums = run.parallel.accumulate(model, batch, micro, log_due)
                state.step_metrics.add(phase, sums)
            number = min(step.local, step.number)  # in the last round, `local` may be beyond the end
            sums = state.step_metrics.end_phase(phase, number)
            with timer.section("optimizer"):
                state.divide_gradients(phase, sums)
                num_skipped = num_skipped if norms else run.precision.num_skipped()
                state.rates.set_lr(state.optimizer, step.number - 1 - num_skipped, session.num_steps)
                clip = partial(run.parallel.clip_gradients, model, run.max_grad_norm)
                clip_due = log_due or run.max_grad_norm is not None
                combine_overflow = session.collectives.combine_overflow if session.plan.splits_network else None
                update = partial(run.parallel.update, state.optimizer)
                norms.append(run.precision.step(state.optimizer, clip if clip_due else None, combine_overflow, update))
    with timer.section("optimizer"):
        if not state.weights_are_followed or run.precision.num_skipped() == num_skipped:
            state.average.update()
            run.workload.after_step(model, step.local - num_skipped)
    state.step = step.number
    return norm_of(norms)


def norm_of(norms: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the norm of the gradients of all phases of a step, given those of each; None if they are not known."""
    known = [norm for norm in norms if norm is not None]
    if len(norms) == 1 or len(known) < len(norms):
        return norms[0]
    return torch.stack(known).norm()


def log_training(state: State, recorder: Recorder, progress: Progress, norm: torch.Tensor | None) -> None:
    """Log one point of every training curve; `norm` is the gradient norm of the last step."""
    run, step = state.run, state.step
    means = state.step_metrics.flush()
    state.metrics |= means
    rates = state.step_timer.rates(state.session.plan.samples_per_round, state.flops_per_sample)
    progress.metrics(means | rates, step)
    log.debug("step %d: %s", step, in_words(means))
    points = means | rates | {"train/gradient_norm": norm} | learning_rates(state.optimizer)
    points |= run.precision.scalars() | run.workload.scalars(rates) | run.parallel.scalars()
    if state.session.steps_per_epoch:
        points["epoch"] = step / state.session.steps_per_epoch
    points |= memory.usage(state.session.device)
    # At once, as each call is a record on the disk, and a request to a remote tracker.
    recorder.scalars(points | state.logged_by_hooks(points), step)


def evaluate(state: State, recorder: Recorder, progress: Progress) -> bool:
    """Evaluate the model on the held-out data, log the metrics, and return whether the model is the best so far."""
    run = state.run
    with state.evaluating():
        metrics, sums = run.parallel.evaluate(state.model)
    # Those of rank 0, though every rank has computed them: what follows from them must not differ by a rounding.
    metrics = state.session.collectives.from_rank_0(lambda: {f"eval/{name}": value for name, value in metrics.items()})
    progress.metrics(metrics, state.step)
    log.debug("step %d: %s", state.step, in_words(metrics))
    recorder.scalars(metrics, state.step)
    if state.session.rank == 0:  # which alone writes images and texts
        recorder.texts(run.workload.texts(sums), state.step)
        recorder.images(run.workload.images(sums) | run.parallel.images(state.directory), state.step)
    is_best = state.record_evaluation(metrics)
    state.hooks.after_evaluation(state, metrics)
    best = {f"best/{run.workload.selection[0]}": state.best["value"]} if state.best else {}
    recorder.scalars(best | state.logged_by_hooks((*metrics, *best)), state.step)
    return is_best


def introduce(state: State, recorder: Recorder) -> None:
    """Log a description of the session, a table of the model, the config, and the environment."""
    run, session = state.run, state.session
    config = config_yaml(run.config)
    log.info("%s", run.describe(session, state.model_description, state.directory))
    log.debug("model:\n%s", state.model_table)
    log.debug("config:\n%s", config)
    if session.rank == 0:
        for why in oversubscription(session.device, run.workload.num_data_workers), run.ema.too_slow(session.num_steps):
            if why:
                log.warning("%s", why)
        texts = {"network": state.model_table, "config": config, "environment": json.dumps(environment(), indent=2)}
        recorder.hyperparameters(run.config)  # first: if they have changed, a backend may begin another run
        recorder.texts(texts)
