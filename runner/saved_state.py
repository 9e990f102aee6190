"""What a checkpoint holds of the state of a run: how it is saved, and loaded again."""

from __future__ import annotations

import copy
import logging
import math
from functools import partial

import torch

from runner.config import user_code
from runner.config.errors import ConfigError
from runner.parallel import full_state
from runner.seeds import random_states, set_random_states
from runner.state import State
from runner.storage.checkpoint import Checkpoint
from runner.storage.checkpoints import prune
from runner.storage.manifest import untrusted
from runner.storage.run_directory import step_name, step_of
from runner.storage.saved_run import named_checkpoint
from runner.storage.signature import saved_signature
from runner.storage.value_checks import CONTENT_ERRORS, TensorSpec, check_like
from runner.system import torch_errors
from runner.torch_optimizer import changed_options, load_changed_options
from runner.tracking.metrics import DivergedError

log = logging.getLogger(__name__)


def save(state: State) -> None:
    """Copy the state, check that it is finite, and begin to write it in the background; called on every rank.

    Raises:
        DivergedError: if a training metric since the last log, the model or the optimizer state is not finite.
            Nothing is then written, and earlier checkpoints are kept.
        StorageError: if the previous checkpoint could not be written, or the new directory cannot be created.
    """
    run, collectives, device = state.run, state.session.collectives, state.session.device
    window = state.step_metrics.window()
    collect = partial(run.parallel.full_state, state.model)
    own = state.modules.of_rank()
    with state.modules.synchronized():
        tensors, optimizer_state = collect(state.optimizer)
        ema, loss = state.average.full_tensors(collect), state.modules.loss_state()
        attributes = state.modules.attributes()
        own = state.modules.only_of_rank(own)
    named = {f"{key} of {name}": t for name, moments in optimizer_state.items() for key, t in moments.items()}
    broken = [name for name in full_state.not_finite(tensors | named) if name not in state.modules.not_finite]
    totals = collectives.all_reduce({"broken": torch.tensor(float(bool(broken)), device=device)})
    if totals["broken"]:  # all-reduced, because not every rank has every tensor
        raise DivergedError(state.step, broken[0] if broken else "the state")
    code = state.code.changed()
    state.modules.check_names(is_late=True)
    if not state.has_saved:
        state.modules.say_unsaved(code)
    state.has_saved = True
    shared = {
        "optimizer": optimizer_state,
        "precision": run.precision.state_dict(),
        "window": window,
        "metrics": {tag: value for tag, value in state.metrics.items() if math.isfinite(value)},
        "best": dict(state.best),
        "num_steps": state.session.num_steps,
        "stop": state.stopping.state_dict(),
        "loss": loss,
        "attributes": attributes,
        "workload": run.workload.shared_state(),
        "schedule": state.rates.state_dict(),
        "code": code,
        "options": changed_options(state.optimizer, state.options),
    }
    local = {
        "workload": copy.deepcopy(run.workload.state_dict()),
        "parallel": run.parallel.local_state(state.model, state.optimizer),
        "random": random_states(state.session.devices),
        "buffers": own,
        "replicas": state.modules.replicas,
        "code": code if state.session.world_size > 1 else {},
        "ema": run.parallel.local_state(state.model, state.average.optimizer) if run.ema.decay else {},
    }
    checkpoint = Checkpoint(state.step, tensors, shared, local, ema, run.workload.parts())
    state.checkpoints.save(checkpoint, state.best.get("step"))


def resume(state: State) -> None:
    """Load the newest intact checkpoint of the run directory, or of those up to the one that `resume` names.

    Called on every rank.

    Raises:
        ConfigError: if all are damaged, or the content, part of which may be loaded by then, does not fit this run.
    """
    named = named_checkpoint(state.run.resume)
    last_step = math.inf if named is None else step_of(named) or 0
    checkpoint = state.checkpoints.latest(last_step)
    if checkpoint is None:
        if state.run.resume != "never":
            what = "unfinished run with these options" if state.run.resume == "auto" else "checkpoint"
            log.info("there is no %s to resume from: the run starts at step 1", what)
        return
    saved, workload = saved_signature(state.checkpoints.root / step_name(checkpoint.step)), state.run.workload
    workload.continue_with(saved)  # with its normalization of the data
    if change := state.session.collectives.from_rank_0(partial(workload.check_same_samples, saved)):
        log.warning("the data has changed, as data.changed=accept allows: %s", change)
    load(state, checkpoint)
    log.info("resumed after step %d", state.step)
    schedule, num_steps, before = state.rates.schedule, state.session.num_steps, checkpoint.state["num_steps"]
    if before not in (0, num_steps) and schedule.is_stretched and 0 < state.step < num_steps:  # 0: not known
        text = "the run has %d steps instead of %d: the learning rate schedule is stretched to them, "
        text += "and goes on at %.3g × optimizer.lr"
        log.info(text, num_steps, before, schedule.factor(state.step, num_steps))
    if state.session.rank == 0:
        prune(state.checkpoints.root, keep=None)  # here, as a run that has no step left does not save again


def load(state: State, checkpoint: Checkpoint) -> None:
    """Load the state that is in `checkpoint`; called on every rank.

    Raises:
        ConfigError: if the content does not fit this run. A part of the content may have been loaded.
    """
    try:
        _load(state, checkpoint)
    except CONTENT_ERRORS as error:
        lost = isinstance(error, torch.distributed.DistError) or torch_errors.is_lost_peer(error)
        if lost or torch_errors.is_out_of_memory(error):
            raise
        log.debug("the checkpoint cannot be loaded", exc_info=error)
        path = state.checkpoints.root / step_name(checkpoint.step)
        names = user_code.given().names()
        if name := names.get("model") or names.get("workload"):
            why = f"its network is not that of {path}, or that is not what a run writes: {error}"
            remedy = "give the network with which the run was trained, or start a new run"
            raise ConfigError("model", name, why, remedy) from None
        raise untrusted(path, f"the hashes are correct, but the content is not: {error}") from None


def _load(state: State, checkpoint: Checkpoint) -> None:
    run, devices = state.run, state.session.devices
    shared, local = checkpoint.state, checkpoint.local
    window = state.step_metrics.form()
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
    load_full = partial(run.parallel.load_full_state, state.model)
    load_full(state.optimizer, checkpoint.tensors, shared["optimizer"])
    load_changed_options(state.optimizer, shared.get("options", []))
    state.average.load(checkpoint.ema, lambda averages, own: load_full(averages, checkpoint.tensors, own))
    state.stopping.load_state_dict(shared["stop"])
    state.rates.load_state_dict(shared.get("schedule", {}))
    run.precision.load_state_dict(shared["precision"])
    state.step, state.metrics, state.best = checkpoint.step, shared["metrics"], shared["best"]
    run.workload.load_shared_state(shared.get("workload", {}))
    window = shared["window"]
    if "logged" in shared:
        num_samples = (state.step - shared["logged"]) * run.batch_size
        window = torch.stack((window, torch.full_like(window, num_samples / max(1, len(window)))), 1)
    state.step_metrics.load(window, state.step)
    run.parallel.load_local_state(state.model, state.optimizer, local.get("parallel", {}))
    if run.ema.decay and local.get("ema"):
        run.parallel.load_local_state(state.model, state.average.optimizer, local["ema"])
    state.modules.load(checkpoint.tensors, shared, local.get("buffers", {}), local.get("replicas", []))
    has_own = local.get("code") and local["replicas"] == state.modules.replicas
    state.code.load(local["code"] if has_own else shared.get("code", {}), state.session.device)
    if local:
        run.workload.load_state_dict(local["workload"])
        run.workload.load_parts(checkpoint.part_files)
        for name, now in random_states(devices).items():
            needed = ("cpu",) if is_older else ("cpu", "random", "numpy")
            if name in local["random"] or name in needed:  # a run on other devices saved no state for this one
                check_like(local["random"][name], now, f"the random state, {name}")
        set_random_states(local["random"], devices)
    else:
        log.info("rank %d saved nothing in this checkpoint: its random numbers start anew", state.session.rank)
