"""`accumulation=auto`: the largest micro-batch that fits into the memory of the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import torch
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from runner.config.composition import Job
from runner.config.errors import ConfigError
from runner.config.overrides import override_key
from runner.parallel.collectives import Collectives
from runner.parallel.launch.cluster import external_world_size
from runner.parallel.pipelining.schedules import divisors
from runner.planning.fake_step import prepared, trace_ranks
from runner.planning.trial import Trial, TrialError
from runner.resume.changed_options import differences
from runner.run import Run, build_run
from runner.storage.run_directory import read_result, readable_entries
from runner.storage.saved_run import saved_config
from runner.system.accelerator import total_bytes
from runner.system.memory import host_memory

_CERTAIN = 0.5
"""A run whose predicted peak is at most this fraction of the available memory is not tried out."""

_PATIENCE = 1800.0
"""Seconds that each of the two steps of a trial may take; the first step includes the start of its processes."""

_PROCESS_BYTES = 0.4e9
"""Bytes that a process takes in addition to its tensors."""

_USABLE = 0.95
"""The fraction of a GPU's memory that the CUDA context and fragmentation leave for tensors."""


def available_bytes(process: Collectives) -> float:
    """Return the bytes that all processes of a run may use, given any: a part of its GPUs, or available host memory."""
    device = process.devices[0]
    if device.type not in ("cpu", "mps"):
        count = max(process.world_size, len(process.devices))
        return _USABLE * total_bytes(device) * count
    return host_memory()["available_bytes"] or 0


def needed_bytes(device: torch.device, peaks: Sequence[int]) -> float:
    """Return the predicted memory in bytes of all processes of a run together, to compare it with `available_bytes`.

    On GPUs, it is the largest of the `peaks` of tensors times the number of ranks, as one rank cannot use the
    free memory of another. Otherwise, it is the sum of the peaks, plus what each process takes besides tensors.
    """
    if device.type not in ("cpu", "mps"):
        return max(peaks) * len(peaks)
    return sum(peaks) + _PROCESS_BYTES * len(peaks)


def fitting_accumulation(
    compose: Callable[[int], Run],
    report: Callable[[str], None],
    available: Callable[[Collectives], float] = available_bytes,
    start: Callable[..., Trial] = Trial,
) -> int:
    """Return a number of micro-batches per step, as small as possible, with which a run fits into memory.

    The numbers are tried in increasing order, each at least twice as large as the one before. If the predicted peak is
    larger than the available memory, the number is rejected; if it is at most half of it, and no trial has run out of
    memory so far, the number is accepted. Otherwise, a trial of a few steps in processes of its own decides.

    Args:
        compose: function that returns the run with a number of micro-batches per step, or raises ConfigError.
        report: function that is called with a line about each attempt.
        available: function that returns the memory in bytes of all processes of the run, given any of them.
        start: function that starts a trial, with the arguments of `Trial`.

    Raises:
        ConfigError: if the run is refused, or does not fit even with one sample in a micro-batch.
        TrialError: if a trial fails for another reason than a lack of memory.
    """
    whole = prepared(compose(1))
    room = available(whole.collectives)
    refusal: ConfigError | None = None
    count, failed = 0, False
    for each in divisors(whole.plan.batch_size // whole.plan.data_shard[1]):
        if each < 2 * count:
            continue
        try:
            run = compose(each)
            session = prepared(run)
        except ConfigError as error:  # a pipeline cannot split every number of samples
            refusal = error
            continue
        count = each
        ranks = trace_ranks(run, session)
        needed = needed_bytes(session.device, [rank.peak_bytes for rank in ranks])
        what = f"{count} micro-batch{'es' * (count > 1)}: {needed / 1e9:,.2f} of {room / 1e9:,.2f} GB"
        if needed > room:
            report(f"{what}: does not fit")
            continue
        if failed or needed > _CERTAIN * room:
            try:
                with closing(start(run.config, _PATIENCE)) as trial:
                    trial.burst(_PATIENCE)  # the optimizer state is allocated at the end of the first step
            except TrialError as error:
                if not error.out_of_memory:
                    raise
                failed = True  # there is less memory than it seems: the next number is tried, however little it needs
                report(f"{what}: out of memory ({error.why})")
                continue
        if count > 1 and any(rank.normalizes for rank in ranks):
            what += "; batch normalization sees smaller batches (model.norm=group avoids this)"
        report(what)
        return count
    if not count and refusal is not None:
        raise refusal
    smaller = "a smaller batch_size, model.checkpoint_activations=true, parallel=fsdp, or precision=bf16"
    raise ConfigError("accumulation", "auto", "the run does not fit even with the smallest micro-batches", smaller)


def resolve_auto_accumulation(job: Job, compose: Callable[[Sequence[str]], Job], directory: Path | None = None) -> Job:
    """Return `job` with a number of micro-batches in place of `accumulation=auto`; any other job is returned unchanged.

    If `resume=auto` continues a run, its number is used again, so that the resume is exact. As the run directory may
    come from somebody else, nothing but this number is taken from it.

    Args:
        job: the composed config, and the overrides from which it was composed.
        compose: function that composes the config from its overrides.
        directory: the value of the flag `--run-directory`, which every job of a sweep has.

    Raises:
        ConfigError: if the config is refused, the run does not fit into memory with any number of micro-batches, or
            torchrun or SLURM has started several processes, each of which would choose by itself.
    """
    if job.config["accumulation"].get("steps") != "auto":
        return job
    if (started := external_world_size()) != 1:
        why = f"torchrun or SLURM has started {started} processes, each of which would choose by itself"
        remedy = "choose on one machine first (python -m runner plan), and type the number"
        raise ConfigError("accumulation", "auto", why, remedy)
    typed = [text for text in job.overrides if override_key(text) != "accumulation"]

    def divided(count: object) -> Job:
        return compose([*typed, "accumulation=1", f"accumulation.steps={count}"])

    if job.config["resume"] != "auto":
        paths = []
    elif directory is not None:
        paths = [directory]
    else:  # the runs that it may continue, the newest first
        entries = reversed(readable_entries(Path(job.config["output_root"], job.config["name"])))
        paths = [path for path in entries if read_result(path).get("status") != "done"]
    for path in paths:
        with suppress(ConfigError, HydraException, OmegaConfBaseException, KeyError, TypeError):
            saved = saved_config(path).values
            steps = saved["accumulation"]["steps"]
            if type(steps) is int and not differences(saved, build_run(job.config).config):
                continued = divided(steps)
                build_run(continued.config)
                return continued
    try:
        say = partial(print, "accumulation=auto:", file=sys.stderr, flush=True)
        return divided(fitting_accumulation(lambda count: build_run(divided(count).config), say))
    except TrialError as error:
        raise ConfigError("accumulation", "auto", error.why, "accumulation=1 shows the error in full") from None
