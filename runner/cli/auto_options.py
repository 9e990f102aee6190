"""Before a run begins, replaces `accumulation=auto` and `how=auto` by specific options.

The options for `accumulation` are chosen so that the run fits into memory. Those for `how` make the run fast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from runner.cli.composition import Job
from runner.config.errors import ConfigError, check
from runner.config.overrides import override_key
from runner.parallel.launch.cluster import external_world_size
from runner.planning.auto_accumulation import fitting_accumulation
from runner.planning.choice import measured_choice
from runner.planning.choice_cache import Choice, ChoiceCache, may_be_chosen, today
from runner.planning.trial import TrialError
from runner.resume.changed_options import differences
from runner.run import Run, Session, build_run
from runner.storage.run_directory import read_result, readable_entries
from runner.storage.saved_config import UnreadableConfigError
from runner.storage.saved_run import saved_config

_FIRST_SECONDS = 300.0
"""Seconds that the first steps of the run may take. If they take longer, no other ways to train it are measured."""

_LEAST_SECONDS = 600.0
"""The length of a run in seconds below which measuring is not worthwhile."""

_SHARE, _LEAST_BUDGET, _MOST_BUDGET = 0.05, 60.0, 600.0
"""The fraction of a run's time that measuring may take, and the lower and upper limits of measuring in seconds."""


Compose = Callable[[Sequence[str]], Job]


def with_choices(job: Job, compose: Compose, directory: Path | None = None, config_dir: str | None = None) -> Job:
    """Return `job` with choices for this machine in place of `accumulation=auto` and `how=auto`.

    `accumulation=auto` is replaced by a number of micro-batches with which the run fits into memory. `how=auto` is
    replaced by a list of overrides that make the run faster, for example `parallel=ddp`; the list may be empty. The
    choices become part of the config.

    If `resume=auto` continues a run, the choices of that run are reused, so that the resume is exact.

    Args:
        job: the composed config, and the overrides from which it was composed.
        compose: function that composes the config from its overrides.
        directory: the value of the flag `--run-directory`, which every job of a sweep has; None if the flag is absent.
        config_dir: a directory with the user's own options, for example of `parallel`; None if there is none.

    Raises:
        ConfigError: if the config is refused, the run does not fit into memory with any number of micro-batches, or
            torchrun or SLURM has started several processes.
    """
    options = {"accumulation": job.config["accumulation"].get("steps"), "how": job.config.get("how")}
    keys = [key for key, value in options.items() if value == "auto"]
    for key in keys:
        _check_no_external_launch(key)
    continued = _continued(job, keys, compose, directory) if keys else None
    if continued is not None:
        return continued
    if "accumulation" in keys:
        job = with_fitting_accumulation(job, compose)
    if "how" in keys:
        job = with_choice(job, compose, config_dir)
    return job


def with_fitting_accumulation(job: Job, compose: Compose) -> Job:
    """Return `job` with `accumulation=auto` replaced by a number of micro-batches with which the run fits into memory.

    The number is found by `fitting_accumulation`. The arguments and the errors are those of `with_choices`.
    """
    typed = _without(job.overrides, ["accumulation"])
    report = partial(_say, "accumulation")
    try:
        count = fitting_accumulation(lambda each: build_run(compose([*typed, *_divided(each)]).config), report)
    except TrialError as error:
        raise ConfigError("accumulation", "auto", error.why, "accumulation=1 shows the error in full") from None
    return compose([*typed, *_divided(count)])


def with_choice(job: Job, compose: Compose, config_dir: str | None = None) -> Job:
    """Return `job` with `how=auto` replaced by the overrides that are chosen for the config on this machine.

    In the returned config, the value of `how` is the list of these overrides. The overrides are read from the cache of
    choices. If the cache has no choice for the config, several ways to train the run are measured. If the run is too
    short for measuring to pay off, or if its steps cannot be measured, the list is empty.

    The arguments and the errors are those of `with_choices`.
    """
    typed = _without(job.overrides, ["how"])
    overrides = _chosen(job, typed, compose, config_dir)
    words = [*typed, *overrides]
    return Job(compose(words).config | {"how": overrides}, words)


def _divided(count: object) -> list[str]:
    """Return the overrides for `count` micro-batches per step."""
    return ["accumulation=1", f"accumulation.steps={count}"]


def _without(overrides: Iterable[str], keys: Collection[str]) -> list[str]:
    return [text for text in overrides if override_key(text) not in keys]


def _continued(job: Job, keys: Collection[str], compose: Compose, directory: Path | None) -> Job | None:
    """Return `job` with the choices of the earlier run that `job` continues; None if there is no such run.

    If `directory` is given, only the run in `directory` is tried. Otherwise, all unfinished runs are tried, newest
    first. To try a run, its choices are applied to `job`. If the result has the same config as the run, `job` continues
    this run.

    A run directory may come from somebody else. Therefore, a run is skipped if its choices set an option that
    `accumulation=auto` and `how=auto` cannot choose.

    Args:
        job: the composed config, and the overrides from which it was composed.
        keys: the options to choose: `accumulation`, `how`, or both.
        compose: function that composes the config from its overrides.
        directory: the run directory that `--run-directory` names; otherwise None.
    """
    typed = _without(job.overrides, keys)
    composed = cache(lambda *words: compose(words))  # many runs have the same choices
    for path in _to_continue(job.config, directory):
        with suppress(UnreadableConfigError, ConfigError, HydraException, OmegaConfBaseException):
            saved = saved_config(path).values
            accumulation = saved.get("accumulation")
            steps = accumulation.get("steps") if isinstance(accumulation, dict) else None
            divided = _divided(steps) if "accumulation" in keys else []
            how = saved.get("how") if "how" in keys else []
            if not isinstance(how, list) or not all(map(may_be_chosen, [*divided, *how])):
                continue
            words = [*typed, *divided, *how]
            config = composed(*words).config
            if not differences(saved, config):
                return Job(config | ({"how": how} if "how" in keys else {}), words)
    return None


def _to_continue(config: Mapping[str, Any], directory: Path | None) -> list[Path]:
    """Return the directories of the runs that a run with `config` may continue, newest first.

    The list is empty if `resume` is not `auto`. Otherwise, if `directory` is given, the list contains only `directory`.

    Raises:
        ConfigError: with the key `output_root`, if the directory of the runs cannot be read.
    """
    if config["resume"] != "auto":
        return []
    if directory is not None:
        return [directory]
    paths = reversed(readable_entries(Path(config["output_root"], config["name"])))
    return [path for path in paths if read_result(path).get("status") != "done"]


def _chosen(job: Job, typed: list[str], compose: Compose, config_dir: str | None) -> list[str]:
    """Return the overrides that `how=auto` chooses for the config, and print their measured speedup.

    The choice is read from the cache, or measured and then cached. The list is empty if the config as typed is
    already the fastest, if the run is too short for measuring to pay off, or if its steps cannot be measured.

    Args:
        job: the composed config with `how=auto`.
        typed: the overrides of `job`, except `how`.
        compose: as in `with_choices`.
        config_dir: as in `with_choices`.
    """
    entry = ChoiceCache(job.config, typed, config_dir)
    choice, problem = entry.read()
    if choice is None:
        with entry.lock():
            choice, problem = entry.read()  # another run may have measured it meanwhile
            if problem:
                _say("how", f"{problem} and is ignored")
            if choice is None:
                choice = _measured(typed, compose, config_dir)
                if choice is not None:
                    entry.write(choice)
    if choice is None:
        return []
    words = " ".join(choice.overrides)
    faster = f"{words}: {choice.speedup:.2f} × as fast as the config as it is"
    faster = faster if words else "no other way to train is faster"
    _say("how", f"{faster} (measured on this machine, {choice.measured})")
    return choice.overrides


def _measured(typed: list[str], compose: Compose, config_dir: str | None) -> Choice | None:
    """Measure several ways to train the run, and return the fastest.

    Return None if the run is too short for measuring to pay off, or if its steps cannot be measured.
    """
    lengths: list[float] = []

    def budget(session: Session, step_seconds: float) -> float:
        lengths.append(session.num_steps * step_seconds)
        worthwhile = lengths[0] >= _LEAST_SECONDS
        seconds = min(_MOST_BUDGET, max(_LEAST_BUDGET, _SHARE * lengths[0])) if worthwhile else 0.0
        if worthwhile:
            minutes = f"about {lengths[0] / 60:,.0f} minutes with the config as typed"
            _say("how", f"{minutes}: other ways are measured for {seconds:.0f} s")
        return seconds

    def run(more: Sequence[str]) -> Run:
        return build_run(compose([*typed, *more]).config)

    try:
        report = partial(_say, "how")
        found = measured_choice(run, typed, _FIRST_SECONDS, (), report, config_dir, budget)
    except TrialError as error:
        if error.refused:
            raise ConfigError(
                "how", "auto", error.why, "see the message; how=default trains without measuring"
            ) from None
        _say("how", f"the steps of the run cannot be measured ({error.why}): trained with the config as typed")
        return None
    if lengths[0] < _LEAST_SECONDS:
        _say("how", f"about {lengths[0]:.0f} s: too short to measure other ways; trained with the config as typed")
        return None
    return Choice(found["chosen"], found["speedup"], today())


def _check_no_external_launch(key: str) -> None:
    """Raise a `ConfigError` if torchrun or SLURM has started several processes.

    Each process would choose by itself, and the choices could differ.
    """
    started = external_world_size()
    why = f"torchrun or SLURM has started {started} processes, each of which would choose by itself"
    remedy = "choose on one machine first (python -m runner tune, python -m runner plan), and type the choice"
    check(started == 1, key, "auto", why, remedy)


def _say(key: str, line: str) -> None:
    print(f"{key}=auto: {line}", file=sys.stderr, flush=True)
