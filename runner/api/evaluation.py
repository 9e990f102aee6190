"""Evaluates a checkpoint as its run did, in the parallel mode of the run or in another one."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from runner import saved_state
from runner.api.composing import check_list_of_texts, compose
from runner.config import user_code
from runner.config.errors import ABSENT, ConfigError, check
from runner.config.overrides import override_key, override_value
from runner.parallel.collectives import Collectives
from runner.parallel.session import Session
from runner.run import Run, build_run, check_used
from runner.storage.checkpoint import load
from runner.storage.manifest import DamagedError, verified_manifest
from runner.storage.saved_run import saved_config, warn_of_changed_code
from runner.storage.signature import saved_signature
from runner.training import initial_state
from runner.trial import try_evaluation


class Evaluation(NamedTuple):
    metrics: dict[str, float]
    """The values of the metrics by TensorBoard tag."""
    description: dict[str, str]
    """What was evaluated, such as {"data": "Digits, the 359 samples of val, …"}."""
    details: dict[str, Any]
    """Tables of it (see `Workload.details`)."""


def evaluate_checkpoint(checkpoint: Path, overrides: Sequence[str] = (), split: str | None = None) -> Evaluation:
    """Evaluate the checkpoint at this path as `SavedRun.evaluate` says. Nothing is written to its run.

    Raises:
        ConfigError: if the checkpoint is damaged, the config cannot run, or the data does not suit the model.
        RankError: if a process fails.
    """
    check_list_of_texts(overrides)
    source = override_value(overrides, "resume")
    check(source is None, "resume", source, "the checkpoint of the evaluation is already named", "leave it out")
    try:
        verified_manifest(checkpoint)
    except DamagedError as error:
        raise ConfigError("checkpoint", str(checkpoint), str(error), "evaluate another one of the run") from None
    plain = ["tracking=none", *without_initial_weights(saved_config(checkpoint).values)]
    run = build_run(dict(compose([f"resume={checkpoint}", *plain, *overrides])))
    check_used(run, overrides)
    user_code.check_given(run.code, str(checkpoint.parent.parent), "directory")
    is_other = any(override_key(text) in ("data", "data.root", "data.file") for text in overrides)
    launcher = run.parallel.launcher(run.device)
    with tempfile.TemporaryDirectory(prefix="runner-evaluate-") as scratch, launcher.connect() as collectives:
        session = collectives.on_all_ranks(lambda: _session(run, collectives, checkpoint, split, is_other))
        rank_main = partial(_evaluate_rank, run.config, checkpoint, run.workload.split or None)
        here = partial(_evaluate, run, session, checkpoint)
        try:
            metrics, skipped, details = launcher.launch(here, rank_main, session, Path(scratch))
            description = run.workload.describe()
            if session.rank == 0:
                warn_of_changed_code(checkpoint.parent.parent)  # now that all of it has been imported
            if skipped:
                description["skipped"] = f"{skipped} of these samples, which cannot be read"
            return Evaluation(metrics, description, details)
        except ConfigError as error:
            if error.key == "resume" and overrides:  # it is not the checkpoint that is wrong
                why = "the checkpoint is not one of a run with these options"
                raise ConfigError(" ".join(overrides), ABSENT, why, "leave out what changes the model") from error
            raise


def without_initial_weights(config: Mapping[str, Any]) -> list[str]:
    """Return overrides of a saved config with which nothing is read that the weights of a checkpoint replace."""
    named = (config.get("model") or {}).get("weights") is not None
    return ["model.weights=null", "model.reset_head=false"] if named else []


def _session(
    run: Run, collectives: Collectives, checkpoint: Path, split: str | None, is_other: bool = False
) -> Session:
    load_data = partial(run.workload.session_with_data, saved_signature(checkpoint), split, is_other)
    return run.session_with_data(collectives, load_data)


def _evaluate_rank(
    config: dict[str, Any], checkpoint: Path, split: str | None, collectives: Collectives
) -> tuple[dict[str, float], int, dict[str, Any]]:
    run = build_run(config)
    return _evaluate(run, _session(run, collectives, checkpoint, split), checkpoint)


def _evaluate(run: Run, session: Session, checkpoint: Path) -> tuple[dict[str, float], int, dict[str, Any]]:
    with run.settings(session.device):
        state = initial_state(run, session, checkpoint.parent.parent)
        saved_state.load(state, load(checkpoint, session.rank))
        try_evaluation(state)
        with state.evaluating():
            metrics, sums = run.parallel.evaluate(state.model)
        skipped = run.workload.extra_results(session.collectives.all_gather).get("skipped_images", 0)
    details = run.workload.details(sums) if session.rank == 0 else {}  # some modes have the sums there alone
    return {f"eval/{name}": value for name, value in metrics.items()}, skipped, details
