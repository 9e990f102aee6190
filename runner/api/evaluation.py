"""Evaluates a checkpoint as its run did, in the parallel mode of the run or in another one."""

from __future__ import annotations

import reprlib
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from runner.api.composing import check_list_of_texts, compose
from runner.cli.arguments import override_value
from runner.config.errors import ABSENT, ConfigError, check
from runner.parallel.context import Process
from runner.run import Session, build_run, check_used
from runner.storage.checkpoint import load
from runner.storage.manifest import DamagedError, verified_manifest
from runner.storage.signature import saved_signature
from runner.training import initial_state


class Evaluation(NamedTuple):
    """An evaluation of a checkpoint.

    Args:
        metrics: a dict from TensorBoard tags to the values of the metrics.
        description: what was evaluated, such as {"data": "Digits, 1,438 training and 359 held-out samples …"}.
    """

    metrics: dict[str, float]
    description: dict[str, str]


def evaluate_checkpoint(checkpoint: Path, overrides: Sequence[str] = ()) -> Evaluation:
    """Evaluate `checkpoint`. Nothing is written to its run.

    If the parallel mode, the device and the precision are those of the run, the metrics equal, to the last bit, those
    that the run computed at the step of the checkpoint.

    Args:
        checkpoint: the path of a checkpoint in a run directory.
        overrides: changes of the run's config, such as `["parallel=single", "data.root=…"]`.

    Raises:
        ConfigError: if the checkpoint is damaged, or the config cannot run.
        RankError: if a process fails.
    """
    check_list_of_texts(overrides)
    source = override_value(overrides, "resume")
    check(source is None, "resume", source, "the checkpoint of the evaluation is already named", "leave it out")
    try:
        verified_manifest(checkpoint)
    except DamagedError as error:
        raise ConfigError("checkpoint", str(checkpoint), str(error), "evaluate another one of the run") from None
    run = build_run(dict(compose([f"resume={checkpoint}", "tracking=none", *overrides])))
    check_used(run, overrides)
    launcher = run.parallel.launcher(run.device)
    with tempfile.TemporaryDirectory(prefix="runner-evaluate-") as scratch, launcher.connect() as process:
        session = process.collectives.on_all_ranks(lambda: run.prepare(process))
        _check_signature(session.run.workload.signature(), saved_signature(checkpoint))
        rank_main = partial(_evaluate_rank, run.config, checkpoint)
        here = partial(_evaluate, session, checkpoint)
        try:
            metrics = launcher.launch(here, rank_main, session.context, Path(scratch))
            return Evaluation(metrics, session.run.workload.describe())
        except ConfigError as error:
            if error.key == "resume" and overrides:  # it is not the checkpoint that is wrong
                why = "the checkpoint is not one of a run with these options"
                raise ConfigError(" ".join(overrides), ABSENT, why, "leave out what changes the model") from error
            raise


def _check_signature(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Check that the evaluation data has the same names of classes or targets as the training data.

    The size of the inputs is not checked, because some networks take images of any size.

    Args:
        own: the signature of the workload with the evaluation data (see `Workload.signature`).
        saved: the signature in the checkpoint. If it contains no names of classes or targets, nothing is checked.

    Raises:
        ConfigError: with the key `data`, if the names differ.
    """
    for key in ("classes", "targets"):
        here, there = (list(signature.get(key) or []) for signature in (own, saved))
        why = f"the model was trained with the {key} {reprlib.repr(there)}"
        check(here == there or not there, "data", reprlib.repr(here), why, "evaluate it on data with the same ones")


def _evaluate_rank(config: dict[str, Any], checkpoint: Path, process: Process) -> dict[str, float]:
    """Evaluate `checkpoint` in `process`, which a launcher has started, and return the metrics."""
    return _evaluate(build_run(config).prepare(process), checkpoint)


def _evaluate(session: Session, checkpoint: Path) -> dict[str, float]:
    run = session.run
    with session.settings():
        state = initial_state(session, checkpoint.parent.parent)
        state.load(load(checkpoint, session.rank))
        state.model.eval()
        with state.average.applied():
            metrics, _ = run.parallel.evaluate(state.model)
    return {f"eval/{name}": value for name, value in metrics.items()}
