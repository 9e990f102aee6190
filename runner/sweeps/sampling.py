"""Proposes the combinations of a search with the samplers of Optuna, which this module imports."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

from optuna import Study, Trial
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial

from runner.sweeps.engines.base import Engine
from runner.sweeps.search_space import Dimension, Space

TPE_OPTIONS: dict[str, Any] = {"multivariate": False, "constant_liar": True}
"""What `sweep.search=tpe` relies on, whatever Optuna's defaults are: trials that run count as bad ones meanwhile."""


def proposed(study: Study, trial: Trial, space: Space, options: Engine) -> list[str]:
    """Return the overrides that Optuna's sampler proposes for a trial, and that no earlier trial has."""
    untried = None
    if space.combinations is not None:
        earlier = study.get_trials(deepcopy=False)[: trial.number]
        tried = {frozenset(each.user_attrs.get("overrides", [])) for each in earlier}
        untried = [words for each in space.combinations if (words := frozenset(each)) not in tried]

    def value(dimension: Dimension) -> list[str]:
        nonlocal untried
        # A value depends only on the seed, the number of the trial, the dimension and the results so far: a search that
        # was killed after it had stored some values of a trial draws the others as if it had not been killed.
        known = f"{options.sampler_seed} {trial.number} {space.dimensions.index(dimension)}"
        seed = int.from_bytes(hashlib.sha256(known.encode()).digest()[:4], "big")
        sampler: BaseSampler = RandomSampler(seed)
        if options.search == "tpe":
            sampler = TPESampler(seed=seed, **TPE_OPTIONS)
        if untried is not None:
            allowed = [words for words in dimension.values if any(each.issuperset(words) for each in untried)]
            whole_numbers = dimension.interval is not None
            texts = [int(words[0].partition("=")[2]) if whole_numbers else " ".join(words) for words in allowed]
            sampler = _UntriedSampler(sampler, texts, seed)
        study.sampler = sampler
        words = _suggested(trial, dimension)
        if untried is not None:
            untried = [each for each in untried if each.issuperset(words)]
        return words

    return space.overrides(value)


def _suggested(trial: Trial, dimension: Dimension) -> list[str]:
    if interval := dimension.interval:
        low, high, log, whole = interval
        if whole:
            value: float = trial.suggest_int(dimension.name, int(low), int(high), log=log)
        else:
            value = trial.suggest_float(dimension.name, low, high, log=log)
        return [f"{dimension.name}={value!r}"]
    if not dimension.varies:
        return dimension.choices[0]
    labels = {" ".join(words): words for words in dimension.choices}
    return labels[str(trial.suggest_categorical(dimension.name, list(labels)))]


class _UntriedSampler(RandomSampler):
    """Suggests what another sampler suggests, or a random allowed value if that is not allowed."""

    def __init__(self, sampler: BaseSampler, allowed: Sequence[Any], seed: int):
        super().__init__(seed)
        self._sampler, self._allowed, self._seed = sampler, allowed, seed

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        value = self._sampler.sample_independent(study, trial, param_name, param_distribution)
        return value if value in self._allowed else random.Random(self._seed).choice(self._allowed)
