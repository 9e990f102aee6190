"""An evaluation before the first step, which shows what an evaluation of a user's code cannot do."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

import torch

from runner.config.errors import ConfigError
from runner.parallel.attributes import attributes_kept
from runner.state import State

log = logging.getLogger(__name__)


def try_evaluation(state: State) -> None:
    """Evaluate a few samples, so that what an evaluation of a user's code cannot do shows before the first step.

    Where they are too few for a metric, all are evaluated: what raises an error then would end the run later. It leaves
    no trace: neither in modules and their buffers nor in the states of the generators.

    Raises:
        ConfigError: as in `EvaluationMetrics.trial`.
    """
    session = state.session
    each, num_shards = max(2, min(session.plan.micro_size, 16)), session.plan.eval_shard[1]
    few_samples = session.workload.few_samples(each * num_shards, session.device)
    if few_samples is None:
        return
    _evaluate(state, few_samples)
    all_samples = session.workload.all_samples()
    if any(session.collectives.all_gather(all_samples is not None)):
        log.info("a metric cannot be computed of a few samples: before the first step, all held-out ones are evaluated")
        _evaluate(state, all_samples or nullcontext())


def _evaluate(state: State, samples: AbstractContextManager[None]) -> None:
    session = state.session
    eager = torch.compiler.set_stance("force_eager") if session.compile else nullcontext()
    is_late = state.step == 0 and state.modules.begins_without_values
    if is_late and session.plan.splits_network:  # one process alone would fail
        return
    try:
        with samples, eager, state.code.unchanged(), attributes_kept(state.modules.each), state.evaluating():
            state.run.parallel.evaluate(state.model)
    except ConfigError:
        raise
    except Exception as error:
        if not is_late:
            raise
        log.debug("an evaluation before the first step, which gives buffers their values, fails", exc_info=error)
    session.collectives.barrier()  # processes may share buffers
