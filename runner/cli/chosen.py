"""Options that are chosen before a run begins: `accumulation=auto` by memory, `how=auto` by speed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runner.cli.composition import Job
from runner.config.errors import ConfigError, check
from runner.parallel.launch.cluster import external_world_size
from runner.planning.choice import measured_choice
from runner.planning.choice_cache import Choice, ChoiceCache, today
from runner.planning.fitting import fitting_accumulation
from runner.planning.trial import TrialError
from runner.run import Run, Session, build_run
from runner.storage.saved_config import UnreadableConfigError
from runner.storage.saved_run import saved_config

_FIRST_SECONDS = 300.0
"""Seconds that the first steps of the run may take, before other ways to train it are measured."""

_LEAST_SECONDS = 600.0
"""Runs that are shorter are not worth measuring."""

_SHARE, _LEAST_BUDGET, _MOST_BUDGET = 0.05, 60.0, 600.0
"""The fraction of a run's time that measuring may take, and its lower and upper limit in seconds."""


Compose = Callable[[Sequence[str]], Job]


def with_choices(job: Job, compose: Compose, directory: Path | None = None, config_dir: str | None = None) -> Job:
    """Return `job` with a number of micro-batches for `accumulation=auto`, and a way to train for `how=auto`.

    Both are chosen for this machine, and become part of the config, so that a resumed run is trained as before.

    Args:
        job: the composed config, and the overrides from which it was composed.
        compose: function that composes the config from its overrides.
        directory: the run directory that `--run-directory` names, as it does for the jobs of a sweep; otherwise None.
            If the run in it has begun, its choices are kept.
        config_dir: a directory with options of the user's own, parallel modes among them; None if there is none.

    Raises:
        ConfigError: if the config is refused.
    """
    if job.config["accumulation"].get("steps") == "auto":
        job = with_fitting_accumulation(job, compose, directory)
    if job.config.get("how") == "auto":
        job = with_choice(job, compose, directory, config_dir)
    return job


def with_fitting_accumulation(job: Job, compose: Compose, directory: Path | None = None) -> Job:
    """Return `job`, whose config has `accumulation=auto`, with the fewest micro-batches with which it fits into memory.

    The arguments and the errors are those of `with_choices`.
    """
    _check_started_here("accumulation")
    typed = [text for text in job.overrides if text.lstrip("+").partition("=")[0] != "accumulation"]

    def words(count: int) -> list[str]:
        return [*typed, "accumulation=1", f"accumulation.steps={count}"]

    begun = _saved(directory).get("accumulation")
    count = begun.get("steps") if isinstance(begun, dict) else None
    if not isinstance(count, int):
        report = partial(_say, "accumulation")
        try:
            count = fitting_accumulation(lambda each: build_run(compose(words(each)).config), report)
        except TrialError as error:
            raise ConfigError("accumulation", "auto", error.why, "accumulation=1 shows the error in full") from None
    return compose(words(count))


def with_choice(job: Job, compose: Compose, directory: Path | None = None, config_dir: str | None = None) -> Job:
    """Return `job`, whose config has `how=auto`, with the overrides that were chosen for it on this machine.

    The option `how` of the returned config is the list of these overrides, so that a resumed run is trained as before.
    If no choice for this config is in the cache, ways to train it are measured, unless the run is short.

    The arguments and the errors are those of `with_choices`.
    """
    _check_started_here("how")
    typed = [text for text in job.overrides if text.lstrip("+").partition("=")[0] != "how"]
    overrides = _of_begun(directory)
    if overrides is None:
        overrides = _chosen(job, typed, compose, config_dir)
    words = [*typed, *overrides]
    return Job(compose(words).config | {"how": overrides}, words)


def _chosen(job: Job, typed: list[str], compose: Compose, config_dir: str | None) -> list[str]:
    """Return the overrides that are chosen for the config, and print why."""
    cache = ChoiceCache(job.config, typed)
    choice, problem = cache.read()
    if choice is None:
        with cache.lock():
            choice, problem = cache.read()  # another run may have measured it meanwhile
            if problem:
                _say("how", f"{problem}, and ignored")
            if choice is None:
                choice = _measured(typed, compose, config_dir)
                if choice is not None:
                    cache.write(choice)
    if choice is None:
        return []
    words = " ".join(choice.overrides)
    faster = f"{words}: {choice.speedup:.2f} × as fast as without" if words else "nothing is faster than without"
    _say("how", f"{faster} (measured on this machine, {choice.measured})")
    return choice.overrides


def _measured(typed: list[str], compose: Compose, config_dir: str | None) -> Choice | None:
    """Measure and return the choice; None if the run is too short, or its steps cannot be measured."""
    lengths: list[float] = []

    def budget(session: Session, step_seconds: float) -> float:
        lengths.append(session.num_steps * step_seconds)
        worthwhile = lengths[0] >= _LEAST_SECONDS
        seconds = min(_MOST_BUDGET, max(_LEAST_BUDGET, _SHARE * lengths[0])) if worthwhile else 0.0
        if worthwhile:
            _say("how", f"about {lengths[0] / 60:,.0f} minutes as it is: other ways are measured for {seconds:.0f} s")
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
        _say("how", f"its steps cannot be measured ({error.why}): trained as it is")
        return None
    if lengths[0] < _LEAST_SECONDS:
        _say("how", f"about {lengths[0]:.0f} s: too short to measure other ways; trained as it is")
        return None
    return Choice(found["chosen"], found["speedup"], today())


def _of_begun(directory: Path | None) -> list[str] | None:
    """Return the overrides that were chosen for the run in `directory`; None if there is no such run or choice."""
    how: Any = _saved(directory).get("how")
    return [str(text) for text in how] if isinstance(how, list) else None


def _saved(directory: Path | None) -> Mapping[str, Any]:
    """Return the config of the run in `directory`; empty if there is no run with a config that can be read."""
    if directory is None or not directory.exists():
        return {}
    try:
        return saved_config(directory).values
    except UnreadableConfigError:
        return {}


def _check_started_here(key: str) -> None:
    started = external_world_size()
    why = f"torchrun or SLURM has started {started} processes, each of which would choose by itself"
    remedy = (
        "choose on one machine first (python -m runner.tools.tune, python -m runner.tools.plan), and type the choice"
    )
    check(started == 1, key, "auto", why, remedy)


def _say(key: str, line: str) -> None:
    print(f"{key}=auto: {line}", file=sys.stderr, flush=True)
