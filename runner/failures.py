"""A run that fails: errors of torch as errors of the config, and the batch at which it diverged."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.config.errors import ConfigError
from runner.parallel.collectives import encode
from runner.parallel.session import Session
from runner.run import Run
from runner.storage.files import write_bytes
from runner.system import torch_errors
from runner.system.trees import tensors_of

log = logging.getLogger(__name__)


def save_diverged_batch(session: Session, directory: Path, step: int) -> None:
    """Save this process's batch of `step`, at which the run diverged, in `directory`, if it is still available."""
    path = directory / f"diverged_step_{step:08d}_rank_{session.rank}.pt"
    try:
        batch = session.workload.diverged_batch(session.plan, step, session.device)
        if batch is None:
            return
        # Not `torch.save` to the file: it raises its own errors, and leaves half of it.
        write_bytes(path, encode({"step": step, **batch}))
    except OSError as error:
        log.error("the batch of step %d cannot be saved: %s", step, error)
    else:
        parts = {name: tensors_of(part) for name, part in batch.items()}
        wrong = [name for name, tensors in parts.items() if not all(bool(each.isfinite().all()) for each in tensors)]
        why = f"; its {' and '.join(wrong)} have values that are NaN or infinite" * bool(wrong)
        log.error("the batch of step %d is in %s%s", step, path, why)


@contextmanager
def torch_refusals(run: Run) -> Iterator[None]:
    """Raise a config error in place of an error in the context by which torch says that it cannot train the config."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Using a target size .* different")  # targets that would be broadcast
            yield
    except ConfigError:
        raise
    except Exception as error:
        if run.deterministic and (why := torch_errors.nondeterministic_operation(error)):
            remedy = "set deterministic=false, or choose another model"
            raise ConfigError("deterministic", True, why, remedy) from error
        if run.compile and (refusal := torch_errors.compiler_refusal(error, run.compile == "step")):
            raise ConfigError("compile", run.compile, *refusal) from error
        if refusal := torch_errors.refusal(error):
            raise ConfigError(*refusal) from error
        if torch_errors.is_single_value_batch_norm(error):
            why = "batch normalization would see one sample of one pixel, which has no variance"
            larger = "more samples in one forward pass (batch_size, accumulation.steps, parallel.split_size)"
            remedy = f"{larger}, larger images, or model.norm=group"
            raise ConfigError("batch_size", run.batch_size, why, remedy) from error
        raise
